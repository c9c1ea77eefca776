"""Runtimes end with the test that opened them."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _closed_runtimes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module: Any = sys.modules.get("experts.moe.model.runtime")  # policies are tested without torch
    if module is None:
        yield
        return
    runtimes: list[Any] = []
    inner = module.MoeRuntime.open

    def recording(*arguments: Any, **options: Any) -> Any:
        runtimes.append(inner(*arguments, **options))
        return runtimes[-1]

    monkeypatch.setattr(module.MoeRuntime, "open", recording)
    yield
    for runtime in runtimes:
        runtime.close()
