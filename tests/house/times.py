"""Seconds of each tier of the tests, in build/test-times.json: written after a whole run, read by `make house`."""

import json
import time

import pytest

from tests import ROOT

TIMES = ROOT / "build/test-times.json"
_began_s = time.monotonic()


def read_times() -> dict[str, float]:
    """Return the seconds of the last whole run of each tier: `fast`, `contract`, `everything`."""
    return json.loads(TIMES.read_text(encoding="utf-8")) if TIMES.exists() else {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if is_whole and not hasattr(config, "workerinput") and not config.option.collectonly:
        times = read_times() | {config.option.tier or "everything": round(time.monotonic() - _began_s, 1)}
        TIMES.parent.mkdir(exist_ok=True)
        TIMES.write_text(json.dumps(times) + "\n", encoding="utf-8")
