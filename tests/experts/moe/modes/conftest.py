"""Runtimes of the tests of modes end with the test that opened them."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers", reason="language models need the extra `moe`: pip install 'coserve[moe]'")

from experts.moe.model.runtime import MoeRuntime


@pytest.fixture(autouse=True)
def _closed_runtimes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    runtimes: list[MoeRuntime] = []
    inner = MoeRuntime.open

    def recording(*arguments: Any, **options: Any) -> MoeRuntime:
        runtimes.append(inner(*arguments, **options))
        return runtimes[-1]

    monkeypatch.setattr(MoeRuntime, "open", recording)
    yield
    for runtime in runtimes:
        runtime.close()
