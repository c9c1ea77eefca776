"""Processes that live and die with the daemon: the web pages, and each consumer of the results.

They run at low priority. A child that ends is restarted with growing pauses; a hung one is killed. None outlives the
daemon, even if that is killed.
"""

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

_POLL_EVERY_S = 0.1
_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 30.0
#: After this uptime the restart back-off resets.
_WELL_AFTER_S = 30.0
#: Failed starts in a row after which status, health and log say that a child cannot start.
_MANY_STARTS = 3
#: A child that is silent for this long counts as hung (docs/decisions.md says why).
_HUNG_AFTER_S = 60.0
_BEAT_EVERY_S = 1.0
#: Factor on the allowed silence before the first beat: at low priority on a crowded machine a start takes minutes.
_TIMES_FOR_A_START = 10
#: Each check adds at most this to a silence: if the daemon itself was paused, its children may have been too.
_MAX_SILENCE_S = 0.2
_STOP_WITHIN_S = 3.0
_REAP_WITHIN_S = 1.0
#: For the daemon alone: systemd would mistake a child that uses them for the daemon.
_NOT_FOR_CHILDREN = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
_PR_SET_PDEATHSIG = 1  # prctl(2)
#: If memory runs out, the kernel ends children first (the unit's own adjustment is -500).
_OOM_SCORE_ADJUST = "500"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A program to keep running; it inherits the open files `pass_fds` under their own numbers.

    `is_idle`: run only while nothing else needs the core (SCHED_IDLE), in the daemon's session, because the kernel may
    divide cores among sessions first. `beats`: append `--heart FD` to its arguments, and kill it after `hung_after_s`
    (default: a minute) without a heartbeat. `longest_back_off_s`: the longest pause before a restart. `lost` is a
    clause for people: what fails while it cannot start.
    """

    name: str
    argv: tuple[str, ...]
    nice: int = 10
    pass_fds: tuple[int, ...] = ()
    beats: bool = False
    hung_after_s: float | None = None
    is_idle: bool = False
    longest_back_off_s: float = _LONGEST_BACK_OFF_S
    lost: str = "its work waits"


class Children:
    """A thread that starts the children, restarts those that end, and stops them all."""

    def __init__(self) -> None:
        self._children: Sequence[_Child] = ()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="children", daemon=True)

    def start(self, specs: Sequence[ChildSpec]) -> None:
        self._children = [_Child(spec) for spec in specs]
        if self._children:
            self._thread.start()

    def stop(self) -> None:
        """Send SIGTERM to each, and SIGKILL 3 s later. Does nothing before `start`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def hang_up(self, name: str) -> None:
        """Send SIGHUP to that child once it is up, so that it rereads its token. Any thread."""
        for child in self._children:
            child.is_to_hang_up |= child.spec.name == name

    def status(self) -> list[dict[str, Any]]:
        """Return `name`, `state` (running, waiting, or hung: killed), `pid`, `restarts`, `last_end` of each child."""
        return [child.status() for child in self._children]

    def troubles(self) -> list[str]:
        """Name the children that cannot start, and what is missing meanwhile. Any thread."""
        return [trouble for child in self._children if (trouble := child.trouble())]

    def _run(self) -> None:
        # One thread starts all children and outlives them: PR_SET_PDEATHSIG fires when the thread that forked ends.
        while not self._stopping.is_set():
            for child in self._children:
                child.poll(time.monotonic())
            self._stopping.wait(_POLL_EVERY_S)
        for child in self._children:
            if child.process is not None:
                child.process.terminate()
        until_s = time.monotonic() + _STOP_WITHIN_S
        for child in self._children:
            child.end_by(until_s)


class _Child:
    """One program; only the children's thread changes it."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.is_to_hang_up = False
        #: An eventfd that counts heartbeats: it never fills, so a child cannot block anybody with it.
        self._heart: int | None = None
        self._has_beaten, self._silent_s, self._polled_s = False, 0.0, 0.0
        self._hung: str | None = None
        self._starts = self._failed_starts = 0
        self._started_s = self._start_at_s = 0.0
        self._back_off_s = _FIRST_BACK_OFF_S
        self._last_end: str | None = None
        self._log: Any = structlog.get_logger("children").bind(child=spec.name)

    def status(self) -> dict[str, Any]:
        process = self.process
        return {
            "name": self.spec.name,
            "state": "waiting" if process is None else "running" if self._hung is None else "hung",
            "pid": None if process is None else process.pid,
            "restarts": max(0, self._starts - 1),
            "last_end": self._last_end,
        }

    def trouble(self) -> str | None:
        if self._failed_starts < _MANY_STARTS:
            return None
        return f"the process {self.spec.name} cannot start ({self._last_end}), so {self.spec.lost}: the log says why"

    def poll(self, now_s: float) -> None:
        if self.process is None:
            if now_s >= self._start_at_s:
                self._start(now_s)
        elif (returned := self.process.poll()) is not None:
            self._ended(now_s, _end(returned) if self._hung is None else f"{self._hung}; {_end(returned)}")
        elif self._heart is not None and self._hung is None and self._is_silent(self._heart, self.process.pid, now_s):
            self.process.kill()
        elif self.is_to_hang_up and (self._heart is None or self._has_beaten):
            self.is_to_hang_up = False  # until its first heartbeat it may have no handler, and SIGHUP would kill it
            self.process.send_signal(signal.SIGHUP)

    def _is_silent(self, heart: int, pid: int, now_s: float) -> bool:
        """Return True if it was silent for too long, counting only time in which the daemon itself ran."""
        try:
            os.eventfd_read(heart)
            self._has_beaten, self._silent_s, self._failed_starts = True, 0.0, 0
        except BlockingIOError:
            self._silent_s += min(now_s - self._polled_s, _MAX_SILENCE_S)
        self._polled_s = now_s
        patience_s = (self.spec.hung_after_s or _HUNG_AFTER_S) * (1 if self._has_beaten else _TIMES_FOR_A_START)
        if self._silent_s < patience_s:
            return False
        self._hung = f"it hung: no sign of life for {patience_s:g} s"
        self._log.error("child_hung", pid=pid, silent_s=patience_s)
        return True

    def _start(self, now_s: float) -> None:
        spec, argv, pass_fds = self.spec, self.spec.argv, self.spec.pass_fds
        self._starts += 1
        self.is_to_hang_up = self._has_beaten = False
        self._started_s = self._polled_s = now_s
        self._silent_s = 0.0
        try:
            if spec.beats:
                self._heart = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                argv, pass_fds = (*argv, "--heart", str(self._heart)), (*pass_fds, self._heart)
            self.process = subprocess.Popen(  # noqa: S603 - our own programs, no shell
                argv,
                stdin=subprocess.PIPE,  # its other end closes with the daemon: `live_with_parent`
                stdout=2,  # the daemon's own standard output is one line, for programs that wait until it is ready
                pass_fds=pass_fds,
                env={name: value for name, value in os.environ.items() if name not in _NOT_FOR_CHILDREN},
                # A terminal's Ctrl-C is the daemon's: it stops its children in its order.
                start_new_session=not spec.is_idle,
                process_group=0 if spec.is_idle else None,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._ended(now_s, f"cannot be executed: {error}")
            return
        try:  # before it starts threads, which inherit its priority
            os.setpriority(os.PRIO_PROCESS, self.process.pid, max(spec.nice, os.getpriority(os.PRIO_PROCESS, 0)))
            scheduling = os.SCHED_IDLE if spec.is_idle else os.SCHED_BATCH
            os.sched_setscheduler(self.process.pid, scheduling, os.sched_param(0))
        except OSError as error:  # it is gone already, or a sandbox forbids it
            self._log.warning("child_priority_not_set", error=str(error))
        self._log.info("child_started", pid=self.process.pid)

    def _ended(self, now_s: float, end: str) -> None:
        was_well = now_s - self._started_s - self._silent_s >= _WELL_AFTER_S
        if was_well:
            self._back_off_s = _FIRST_BACK_OFF_S
        self._failed_starts = 0 if was_well or self._has_beaten else self._failed_starts + 1
        self._forget_process(end)
        if self._failed_starts == _MANY_STARTS:
            self._log.error("child_cannot_start", problem=self.trouble())
        self._start_at_s = now_s + self._back_off_s
        self._log.warning("child_ended", end=end, again_in_s=self._back_off_s)
        self._back_off_s = min(2 * self._back_off_s, self.spec.longest_back_off_s)

    def end_by(self, until_s: float) -> None:
        if (process := self.process) is None:
            return
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._log.warning("child_killed", why=f"no end within {_STOP_WITHIN_S:g} s")
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that does not answer holds it
                process.wait(_REAP_WITHIN_S)
        self._forget_process("it did not end" if process.returncode is None else _end(process.returncode))

    def _forget_process(self, end: str) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        if self._heart is not None:
            os.close(self._heart)
        self._last_end = end
        self.process = self._heart = self._hung = None


async def heartbeat(fd: int | None, is_well: Callable[[], bool] = lambda: True) -> None:
    """Send a heartbeat from the event loop every second while `is_well()`. Without `fd` do nothing."""
    while fd is not None:
        if is_well():
            os.eventfd_write(fd, 1)
        await asyncio.sleep(_BEAT_EVERY_S)


def live_with_parent() -> None:
    """Have the kernel kill this process when the daemon ends, in any way. A child calls it first.

    Standard input is a pipe that only the daemon holds and never writes to: if it is closed, the daemon was gone before
    the kernel was asked. A child that was started by hand ends with its terminal.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if _is_orphan():
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJUST, encoding="ascii")


def _is_orphan() -> bool:
    poll = select.poll()
    poll.register(0, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _end(returned: int) -> str:
    return f"exit status {returned}" if returned >= 0 else f"killed by {signal_name(-returned)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal
