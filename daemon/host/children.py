"""Processes that live and die with the daemon: the web pages, and each consumer of the results.

They run at low priority, so that nothing in them delays an image. A child that ends is started again, at first soon,
then with growing pauses; one that hangs is killed. No child outlives the daemon, even a killed one.
"""

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

_LOOK_EVERY_S = 0.1
_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 30.0
#: After this uptime the restart back-off resets.
_WELL_AFTER_S = 30.0
#: A child that is silent for this long counts as hung (docs/decisions.md says why).
_HUNG_AFTER_S = 60.0
_BEAT_EVERY_S = 1.0
#: Factor on the allowed silence before the first beat: at low priority on a crowded machine a start takes minutes.
_TIMES_FOR_A_START = 10
#: Each check adds at most this to a silence: if the daemon itself was paused, its children may have been too.
_MAX_SILENCE_S = 0.2
_STOP_WITHIN_S = 3.0
_REAP_WITHIN_S = 1.0
#: Variables for the daemon alone: systemd would take a child that uses them for the daemon.
_NOT_FOR_CHILDREN = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
_PR_SET_PDEATHSIG = 1  # prctl(2)
#: If memory runs out, the kernel ends children first (the unit's own adjustment is -500).
_OOM_SCORE_ADJUST = "500"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A program to keep running; `pass_fds` are open files that it inherits under their own numbers.

    One that `is_idle` runs only while nothing else wants its core: SCHED_IDLE, in the daemon's session, because the
    kernel may share cores out by session first. One that `beats` gets `--heart FD` behind its arguments and is killed
    when it is silent for `hung_after_s`, a minute without it. One that ends again and again is started at least every
    `longest_back_off_s`.
    """

    name: str
    argv: tuple[str, ...]
    nice: int = 10
    pass_fds: tuple[int, ...] = ()
    beats: bool = False
    hung_after_s: float | None = None
    is_idle: bool = False
    longest_back_off_s: float = _LONGEST_BACK_OFF_S


class Heartbeat:
    """The daemon's end of one process's heartbeat: made with that process, asked often, closed with it.

    A process that is stopped, deadlocked or busy-looping does not end: its silence shows that it needs a restart. Beats
    are counted by an eventfd, which never fills and which a child cannot hold anything up with.
    """

    def __init__(self, now_s: float, hung_after_s: float) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._hung_after_s = hung_after_s
        self._silent_s = 0.0
        self._looked_s = now_s
        #: When it last beat; None before its first beat.
        self.heard_s: float | None = None

    def hangs(self, now_s: float) -> bool:
        """Return True if it was silent for longer than allowed, counting only time in which the daemon itself ran."""
        if self._has_beaten():
            self._silent_s, self.heard_s = 0.0, now_s
        else:
            self._silent_s += min(now_s - self._looked_s, _MAX_SILENCE_S)
        self._looked_s = now_s
        return self._silent_s >= self.patience_s

    @property
    def patience_s(self) -> float:
        """Seconds that its process may be silent now."""
        return self._hung_after_s * (_TIMES_FOR_A_START if self.heard_s is None else 1)

    def close(self) -> None:
        os.close(self.fd)

    def _has_beaten(self) -> bool:
        try:
            return os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False


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
        """Send SIGTERM to each, and SIGKILL 3 s later to those that still run. Does nothing before `start`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def hang_up(self, name: str) -> None:
        """Send SIGHUP to that child once it is up, so that it reads its token again. From any thread."""
        for child in self._children:
            if child.name == name:
                child.is_to_hang_up = True

    def status(self) -> list[dict[str, Any]]:
        """Return `name`, `state` (running, waiting, or hung: killed), `pid`, `restarts`, `last_end` of each child."""
        return [child.status for child in self._children]

    def _run(self) -> None:
        # One thread for all of a child's life: the kernel takes the end of the thread that made it for its parent's.
        while not self._stopping.is_set():
            for child in self._children:
                child.look(time.monotonic())
            self._stopping.wait(_LOOK_EVERY_S)
        for child in self._children:
            child.ask_to_end()
        until_s = time.monotonic() + _STOP_WITHIN_S
        for child in self._children:
            child.end_by(until_s)


class _Child:
    """One program, used by the children's thread alone; `status` is replaced atomically, and any thread may read it."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self.name = spec.name
        self.is_to_hang_up = False
        self._process: subprocess.Popen[bytes] | None = None
        self._heart: Heartbeat | None = None
        self._hung: str | None = None
        self._starts = 0
        self._started_s = self._start_at_s = 0.0
        self._back_off_s = _FIRST_BACK_OFF_S
        self._last_end: str | None = None
        self._log: Any = structlog.get_logger("children")
        self.status: dict[str, Any] = {}
        self._say()

    def look(self, now_s: float) -> None:
        """Start the child if it is due; notice its end, or that it hangs."""
        if self._process is None:
            if now_s >= self._start_at_s:
                self._start(now_s)
        elif (returned := self._process.poll()) is not None:
            self._ended(now_s, _end(returned))
        elif self._heart is not None and self._hung is None and self._heart.hangs(now_s):
            self._kill_hung(self._process, self._heart)
        elif self.is_to_hang_up and (self._heart is None or self._heart.heard_s is not None):
            self.is_to_hang_up = False  # before its first beat it may not listen yet, and SIGHUP would end it
            self._process.send_signal(signal.SIGHUP)

    def _kill_hung(self, process: subprocess.Popen[bytes], heart: Heartbeat) -> None:
        self._hung = f"it hung: no sign of life for {heart.patience_s:g} s"
        self._log.error("child_hung", child=self._spec.name, pid=process.pid, silent_s=heart.patience_s)
        process.kill()
        self._say()

    def ask_to_end(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def end_by(self, until_s: float) -> None:
        """Wait for its end, and kill it at `until_s`."""
        process = self._process
        if process is None:
            return
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._log.warning("child_killed", child=self._spec.name, why=f"no end within {_STOP_WITHIN_S:g} s")
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk that does not answer holds it
                process.wait(_REAP_WITHIN_S)
        self._forget_process()
        self._last_end = _end(process.returncode) if process.returncode is not None else "it did not end"
        self._say()

    def _start(self, now_s: float) -> None:
        spec, argv, pass_fds = self._spec, self._spec.argv, self._spec.pass_fds
        self._starts += 1
        self.is_to_hang_up = False
        try:
            if spec.beats:
                self._heart = Heartbeat(now_s, spec.hung_after_s or _HUNG_AFTER_S)
                argv, pass_fds = (*argv, "--heart", str(self._heart.fd)), (*pass_fds, self._heart.fd)
            self._process = subprocess.Popen(  # noqa: S603 - our own programs, no shell
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
        self._started_s = now_s
        self._step_back(self._process.pid)
        self._log.info("child_started", child=spec.name, pid=self._process.pid)
        self._say()

    def _step_back(self, pid: int) -> None:
        """Lower its priority below the line's, before it makes threads of its own, which inherit it."""
        try:
            os.setpriority(os.PRIO_PROCESS, pid, max(self._spec.nice, os.getpriority(os.PRIO_PROCESS, 0)))
            scheduling = os.SCHED_IDLE if self._spec.is_idle else os.SCHED_BATCH
            os.sched_setscheduler(pid, scheduling, os.sched_param(0))
        except OSError as error:  # it is gone already, or a sandbox forbids it
            self._log.warning("child_priority_not_set", child=self._spec.name, error=str(error))

    def _ended(self, now_s: float, end: str) -> None:
        well_until_s = now_s
        if self._hung is not None and self._heart is not None:
            well_until_s, end = self._heart.heard_s or self._started_s, f"{self._hung}; {end}"
        if self._process is not None and well_until_s - self._started_s >= _WELL_AFTER_S:
            self._back_off_s = _FIRST_BACK_OFF_S
        self._forget_process()
        self._last_end = end
        self._start_at_s = now_s + self._back_off_s
        self._log.warning("child_ended", child=self._spec.name, end=end, again_in_s=self._back_off_s)
        self._back_off_s = min(2 * self._back_off_s, self._spec.longest_back_off_s)
        self._say()

    def _forget_process(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._heart is not None:
            self._heart.close()
        self._process = self._heart = self._hung = None

    def _say(self) -> None:
        self.status = {
            "name": self._spec.name,
            "state": "waiting" if self._process is None else "running" if self._hung is None else "hung",
            "pid": None if self._process is None else self._process.pid,
            "restarts": max(0, self._starts - 1),
            "last_end": self._last_end,
        }


async def beat(fd: int | None, is_well: Callable[[], bool] = lambda: True) -> None:
    """Beat each second in which the process `is_well`, from its event loop. Without `fd` do nothing."""
    while fd is not None:
        if is_well():
            os.eventfd_write(fd, 1)
        await asyncio.sleep(_BEAT_EVERY_S)


def live_with_parent() -> None:
    """Have the kernel kill this process when the daemon ends, in any way. A child calls it first.

    Standard input is a pipe whose other end only the daemon holds and never writes to: if it is closed, the daemon was
    gone before the kernel was asked. A child that was started by hand ends with its terminal.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if _is_orphan():
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJUST, encoding="ascii")


def _is_orphan() -> bool:
    try:
        if not stat.S_ISFIFO(os.fstat(0).st_mode):
            return False
    except OSError:
        return False  # no standard input: started by hand
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
