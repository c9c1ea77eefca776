"""Real processes that a daemon keeps running: their ends, its ends, and what reaches them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from daemon.host.children import Children, ChildSpec
from tests.waiting import until

SLEEPER = "import time; time.sleep(600)"
#: Writes its process number and environment to a file, then goes on until it is ended.
WITNESS = """
import json, os, signal, sys, time
from daemon.host.children import live_with_parent
live_with_parent()
heard = []
def hear(number, _): heard.append(number); say()
def say():
    facts = {"pid": os.getpid(), "heard": heard, "environ": dict(os.environ),
             "fds": sorted(map(int, os.listdir("/proc/self/fd")))}
    part = sys.argv[1] + ".part"
    with open(part, "w") as file: json.dump(facts, file)
    os.replace(part, sys.argv[1])
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1): signal.signal(number, hear)
say()
while True: time.sleep(600)
"""
#: Beats, and then hangs in one of three ways.
HANGS = """
import asyncio, os, signal, sys, threading
from daemon.host.children import heartbeat
def stop(): os.kill(os.getpid(), signal.SIGSTOP)
def lock(): one = threading.Lock(); one.acquire(); one.acquire()
def spin():
    while True: pass
async def run():
    beating = asyncio.create_task(heartbeat(int(sys.argv[3])))
    await asyncio.sleep(0)
    {"stop": stop, "lock": lock, "spin": spin}[sys.argv[1]]()
assert sys.argv[2] == "--heart"
asyncio.run(run())
"""
PARENT = """
import sys, time
from daemon.host.children import Children, ChildSpec
children = Children()
children.start([ChildSpec("witness", (sys.executable, "-c", sys.argv[1], sys.argv[2]))])
while True: time.sleep(0.1)  # a signal that another thread got is noticed by this one when it wakes
"""


def facts(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text()) if file.exists() else None


def is_alive(pid: int) -> bool:
    """Return True if there is such a process that is not a zombie (no parent reaps orphans here)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def stepped_back(pid: int) -> tuple[int, int]:
    return os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)


@contextmanager
def a_child(code: str, *arguments: str, **fields: Any) -> Iterator[Children]:
    children = Children()
    children.start([ChildSpec("child", (sys.executable, "-c", code, *arguments), **fields)])
    try:
        yield children
    finally:
        children.stop()


def pid_of(children: Children) -> int:
    return until(lambda: children.status()[0]["pid"])


@pytest.mark.promise(
    "Delivery to the plant",
    "Processes beside the line are restarted, run at lower priority, and never outlive the daemon",
)
def test_a_killed_child_is_started_again_and_says_how_it_ended() -> None:
    with a_child(SLEEPER) as children:
        first = pid_of(children)
        expected = {"name": "child", "state": "running", "pid": first, "restarts": 0, "last_end": None}
        assert children.status()[0] == expected
        os.kill(first, signal.SIGKILL)
        until(lambda: children.status()[0]["restarts"])
        assert children.status()[0]["last_end"] == "killed by SIGKILL"
        second = pid_of(children)
        assert second != first
        assert children.status()[0]["restarts"] == 1
    assert not is_alive(second)


def test_an_idle_child_gets_a_core_only_while_nothing_in_its_session_wants_it() -> None:
    with a_child(SLEEPER, nice=19, is_idle=True) as children:
        pid = pid_of(children)
        until(lambda: stepped_back(pid) == (19, os.SCHED_IDLE))
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C is the daemon's"


@pytest.mark.parametrize("spec", [{}, {"beats": True, "hung_after_s": 0.02}])  # the second hangs at each start
def test_a_child_that_ends_again_and_again_is_started_ever_more_rarely_up_to_its_limit(spec: dict[str, Any]) -> None:
    code = SLEEPER if spec else "raise SystemExit(3)"
    with capture_logs() as logs, a_child(code, longest_back_off_s=0.7, **spec) as children:
        until(lambda: children.status()[0]["restarts"] >= 3)
        end = children.status()[0]["last_end"]
        assert end.endswith("killed by SIGKILL" if spec else "exit status 3")
        assert children.troubles() == [f"the process child cannot start ({end}), so its work waits: the log says why"]
    assert [log["event"] for log in logs].count("child_cannot_start") == 1
    assert [log["again_in_s"] for log in logs if log["event"] == "child_ended"][:3] == [0.5, 0.7, 0.7]


def test_a_child_that_hangs_is_killed_and_started_again_whether_it_stands_waits_or_spins() -> None:
    ways = ("stop", "lock", "spin")
    children = Children()
    children.start([ChildSpec(way, (sys.executable, "-c", HANGS, way), beats=True, hung_after_s=0.5) for way in ways])
    try:
        until(lambda: all(row["restarts"] for row in children.status()))
        reason = "it hung: no sign of life for 0.5 s; killed by SIGKILL"
        assert {row["last_end"] for row in children.status()} == {reason}
    finally:
        children.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_child_outlives_the_daemon_however_that_died(tmp_path: Path, number: int) -> None:
    file = tmp_path / "facts"
    # A process that a shell starts in the background ignores Ctrl-C, and so would this one.
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + PARENT
    parent = subprocess.Popen([sys.executable, "-c", code, WITNESS, str(file)], stderr=subprocess.DEVNULL)
    try:
        child = until(lambda: facts(file))["pid"]
        parent.send_signal(number)
        parent.wait(60)
        until(lambda: not is_alive(child))
    finally:
        parent.kill()
        parent.wait()


def test_a_child_steps_back_and_gets_the_daemons_environment_but_not_its_notify_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "facts"
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    passed_fd, kept_back = os.pipe()
    try:
        with a_child(WITNESS, str(file), pass_fds=(passed_fd,)):
            witness = until(lambda: facts(file))
            expected = max(10, os.getpriority(os.PRIO_PROCESS, 0)), os.SCHED_BATCH
            until(lambda: stepped_back(witness["pid"]) == expected)  # soon after its start
    finally:
        os.close(passed_fd)
        os.close(kept_back)
    environ = witness["environ"]
    assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(environ)
    assert environ["PYTHONSAFEPATH"] == "1"
    assert passed_fd in witness["fds"]
    assert kept_back not in witness["fds"]
