"""A service manager's side of sd_notify(3), and daemons whose threads can be stopped from outside."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.waiting import until

#: A daemon on simulated devices: each thread on the way of an image (and some more calls) stands still while a file of
#: its name exists, and raises an exception while one of its name and `.defect` does.
HOLDABLE = """\
import sys, time
from pathlib import Path
from daemon.dispatch.drive import Drive
from daemon.intake.intake import Intake
from daemon.dispatch.pool import DevicePool
from daemon.operations import Operations
from daemon.storage.results_stream import ResultsStream
from daemon.monitor.pipeline_probe import PipelineProbe
from daemon.storage.retention import RetentionThread
from daemon.storage.writer import Writer
from tests.simulated import run

folder = Path(sys.argv[2])

def holdable(owner, method, name):
    original = getattr(owner, method)
    def wait(*arguments, **named):
        while (folder / name).exists():
            (folder / f"{name}.stands").touch()
            time.sleep(0.02)
        if (folder / f"{name}.defect").exists():
            raise RuntimeError(f"a defect of {name}")
        return original(*arguments, **named)
    setattr(owner, method, wait)

holdable(Intake, "_send_replies", "intake")
holdable(Writer, "_run_task", "writer")
holdable(Drive, "turn", "drive")
holdable(ResultsStream, "_send_all", "publish")
holdable(DevicePool, "_run", "executor")
holdable(Operations, "reload", "reload")
holdable(DevicePool, "_load", "load")
holdable(PipelineProbe, "send", "watch")
holdable(Intake, "start", "start")
holdable(RetentionThread, "stop", "stop")
sys.exit(run(Path(sys.argv[1])))
"""


class Manager:
    """Receives the news of a service; `address` is its NOTIFY_SOCKET."""

    def __init__(self, folder: Path, *, abstract: bool = False) -> None:
        path = str(folder / "notify.sock")
        self.address = f"@{path}" if abstract else path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{path}" if abstract else path)
        self._news: queue.Queue[dict[str, str]] = queue.Queue()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self.statuses: list[str] = []
        #: The service whose end ends the waiting for its news.
        self.service: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while news := self._socket.recv(65536):
            fields = dict(line.split("=", 1) for line in news.decode().splitlines())
            if "STATUS" in fields:
                self.statuses.append(fields["STATUS"])
            self._news.put(fields)

    def until(self, key: str, value: str | None = None, timeout_s: float = 60.0) -> dict[str, str]:
        """Return the next news with `key`, of this value if one is given, and drop all before it."""
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                news = self._news.get(timeout=0.2)
            except queue.Empty:
                ended = self.service.poll() if self.service else None
                assert ended is None, f"the service ended with {ended} before it sent {key}"
                assert time.monotonic() < until_s, f"{key} did not come within {timeout_s} s; {self.statuses[-3:]}"
                continue
            if key in news and value in (None, news[key]):
                return news

    def from_now(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(b"NOW=1", f"\0{self.address[1:]}" if self.address.startswith("@") else self.address)
        self.until("NOW")

    def during(self, seconds: float) -> list[dict[str, str]]:
        time.sleep(seconds)
        return [self._news.get() for _ in range(self._news.qsize())]

    def environ(self, watchdog_s: float | None = None) -> dict[str, str]:
        """Return the environment that systemd gives to a service of `Type=notify`."""
        named = {key: value for key, value in os.environ.items() if not key.startswith("WATCHDOG_")}
        if watchdog_s is not None:
            named["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        return named | {"NOTIFY_SOCKET": self.address, "PYTHONUNBUFFERED": "1"}


@contextmanager
def a_holdable_daemon(config: Path, manager: Manager, watchdog_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that speaks to `manager`, killed at the end if it still runs; files in its folder hold its threads."""
    log = (config.parent / "daemon.log").open("ab")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDABLE, str(config), str(config.parent)],
        env=manager.environ(watchdog_s),
        stdout=log,
        stderr=log,
    )
    manager.service = process
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        log.close()


def ended(process: subprocess.Popen[bytes], log: Path, within_s: float = 60.0) -> int:
    """Return the daemon's exit status; if it does not end, the assertion shows where each of its threads is."""
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        process.wait()
        raise AssertionError(f"the daemon does not end:\n{log.read_text()[-8000:]}") from None


@contextmanager
def held(folder: Path, thread: str) -> Iterator[None]:
    """While the body runs, this thread stands still, from its next piece of work on (`until_it_stands`)."""
    (folder / thread).touch()
    try:
        yield
    finally:
        (folder / thread).unlink()


def until_it_stands(folder: Path, thread: str) -> None:
    """Wait until the held thread stands still; once for each daemon and thread."""
    until((folder / f"{thread}.stands").exists, lambda: f"{thread} goes on")
