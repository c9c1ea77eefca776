"""The heartbeat of a real process, and the silence that counts as hanging. The clock is the test's own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from daemon.host.children import Heartbeat

BEATING = "import asyncio, sys; from daemon.host.children import beat; asyncio.run(beat(int(sys.argv[1])))"
LIMIT_S = 60.0


class Looked:
    """An observer that looks ten times a second, with a clock that runs only meanwhile."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.heart = Heartbeat(self.now_s, LIMIT_S)

    def says_that_it_hangs(self, within_s: float, step_s: float = 0.1) -> bool:
        begun_s = self.now_s
        while self.now_s - begun_s < within_s:
            self.now_s += step_s
            if self.heart.hangs(self.now_s):
                return True
        return False

    def until_it_beats(self) -> None:
        until_s, before = time.monotonic() + 60, self.heart.heard_s
        while self.heart.heard_s == before:
            assert time.monotonic() < until_s, "it does not beat"
            time.sleep(0.02)
            self.now_s += 1e-6
            assert not self.heart.hangs(self.now_s)


@contextmanager
def looked_at(code: str) -> Iterator[tuple[Looked, "subprocess.Popen[bytes]"]]:
    looked = Looked()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(looked.heart.fd)], pass_fds=(looked.heart.fd,), stdin=subprocess.DEVNULL
    )
    try:
        yield looked, process
    finally:
        process.kill()
        process.wait()
        looked.heart.close()


def stop(process: "subprocess.Popen[bytes]", looked: Looked) -> None:
    """Stopped for sure, and every beat from before is heard."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    looked.heart.hangs(looked.now_s)


def test_one_that_was_stopped_and_goes_on_in_time_begins_anew_with_each_beat() -> None:
    with looked_at(BEATING) as (looked, process):
        looked.until_it_beats()
        for _ in range(2):
            stop(process, looked)
            assert not looked.says_that_it_hangs(LIMIT_S - 1)
            process.send_signal(signal.SIGCONT)
            looked.until_it_beats()
        stop(process, looked)
        assert looked.says_that_it_hangs(LIMIT_S + 1)


def test_a_start_has_ten_times_as_long() -> None:
    with looked_at("import time; time.sleep(600)") as (looked, _):
        assert not looked.says_that_it_hangs(10 * LIMIT_S - 1)
        assert looked.says_that_it_hangs(2)


def test_a_daemon_that_stood_still_itself_holds_nothing_against_its_children() -> None:
    with looked_at(BEATING) as (looked, process):
        looked.until_it_beats()
        stop(process, looked)
        assert not looked.says_that_it_hangs(24 * 3600, step_s=3600.0)
