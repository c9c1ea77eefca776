"""What each test costs: build/durations.jsonl, written while the tests run, and the slowest at the end.

Seconds of processor time, own and of processes that ended, do not depend on what else the machine does.
"""

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests import ROOT

DURATIONS, TIMES = ROOT / "build/durations.jsonl", ROOT / "build/test-times.json"
_SHOWN = 10
_began_s = time.monotonic()


def read_times() -> dict[str, float]:
    """Seconds of the last whole `make test-fast`, `make test` and `make test-all`."""
    return json.loads(TIMES.read_text(encoding="utf-8")) if TIMES.exists() else {}


def _processor_s() -> float:
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    wall_s, processor_s = time.monotonic(), _processor_s()
    result = yield
    record = {
        "test": item.nodeid,
        "wall_s": round(time.monotonic() - wall_s, 3),
        "processor_s": round(_processor_s() - processor_s, 2),
        "worker": os.environ.get("PYTEST_XDIST_WORKER", ""),
    }
    with DURATIONS.open("a", encoding="utf-8") as file:  # a short line is appended whole, whoever else appends
        file.write(json.dumps(record) + "\n")
    return result


def pytest_sessionstart(session: pytest.Session) -> None:
    DURATIONS.parent.mkdir(exist_ok=True)
    if not hasattr(session.config, "workerinput"):
        DURATIONS.unlink(missing_ok=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not DURATIONS.exists():
        return
    tests = [json.loads(line) for line in DURATIONS.read_text(encoding="utf-8").splitlines()]
    terminalreporter.section(f"slowest {_SHOWN} of {len(tests)} ({DURATIONS.relative_to(ROOT)})")
    for test in sorted(tests, key=lambda test: -test["wall_s"])[:_SHOWN]:
        terminalreporter.write_line("{wall_s:7.1f} s, processor {processor_s:6.1f} s  {test}".format(**test))


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if is_whole and not hasattr(config, "workerinput") and not config.option.collectonly:
        command = "test-fast" if config.option.fast else "test" if config.option.markexpr else "test-all"
        times = read_times() | {command: round(time.monotonic() - _began_s, 1)}
        TIMES.write_text(json.dumps(times) + "\n", encoding="utf-8")
