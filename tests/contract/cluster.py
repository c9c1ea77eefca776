"""A Ray cluster on this PC for tests: a head, as on the line's PC, and a worker that joins it."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil

from daemon.cluster.joining import unreachable
from tests.contract.client import Line, everything_is_whole
from tests.lines import a_jpeg
from tests.ports import free_port
from tests.waiting import until

#: 100 ports for each node, below those that the kernel gives away.
_FIRST_PORT = 21000


#: A PC with room for one classifier of three: images of all three that come at once need the other PC, too.
TOO_SMALL = {"cpu": {"expert_memory": "60MB"}}
THERE = {"pc2-cpu": {"host": "pc2/cpu", "expert_memory": "150MB"}}
_BURST = 12
#: Ray starts a node in seconds, and tries again where a crowded machine keeps its parts from being there in time.
RAY_S = 900.0


class Node:
    """`coserve worker` as a process, with Ray's processes below it."""

    def __init__(
        self,
        folder: Path,
        number: int,
        *options: str,
        token: Path,
        code: Path | None = None,
        before: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """`code` is a folder with other code than this checkout's; `before` is a command that runs the node's."""
        self._code = code
        self._environ = dict(environ or {})
        self._command = [*before, sys.executable, "-m", "tools", "worker", "--token", str(token), *options]
        self._command += ["--ports", str(_FIRST_PORT + 100 * number + 1000 * (os.getpid() % 10))]
        self._command += ["--dir", str(folder / f"n{number}"), "--cache", str(folder / f"cache{number}")]
        self.log = folder / f"n{number}.log"
        self.cache = folder / f"cache{number}"
        self.process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Lock()

    def start(self) -> None:
        """Start the process, and restart it when it exits, as the unit does: Ray may need several attempts."""
        self.start_once()
        threading.Thread(target=self._keep_running, daemon=True).start()

    def start_once(self) -> subprocess.Popen[bytes]:
        """Begin, and not again when it ends by itself."""
        environ = os.environ | self._environ | ({"PYTHONPATH": str(self._code)} if self._code else {})
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environ, start_new_session=True, cwd=self._code
            )
        return self.process

    def _keep_running(self) -> None:
        while process := self.process:
            process.wait()
            time.sleep(1)
            with self._ending:
                if self.process is process:
                    self.start_once()

    def actor(self) -> psutil.Process:
        """Return the process that computes."""
        found = until(
            lambda: [each for each in _session(self.process) if "DeviceWorker" in _name(each)], patience_s=RAY_S
        )
        return found[0]

    def kill_actor(self) -> None:
        """End the process that computes, as the kernel does when memory runs out."""
        self.actor().kill()

    def kill(self) -> None:
        """Cut the power of this node: one process that stays would keep its ports from the next."""
        with self._ending:
            process, self.process = self.process, None
        while left := _session(process):
            for each in left:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(left, 10)

    def stop(self) -> int:
        """SIGTERM, as systemd sends it; the exit status."""
        with self._ending:
            process, self.process = self.process, None
        assert process is not None
        process.send_signal(signal.SIGTERM)
        return process.wait(60)


def _session(leader: "subprocess.Popen[bytes] | None") -> list[psutil.Process]:
    """Return the processes of a node: none of Ray's leaves the session."""
    found: list[psutil.Process] = []
    for each in psutil.process_iter() if leader else ():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if leader and os.getsid(each.pid) == leader.pid and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def a_token(path: Path) -> Path:
    path.write_text(secrets.token_hex(32), encoding="ascii")
    path.chmod(0o600)
    return path


class RayCluster:
    """A head for the line, and the worker `pc2`."""

    def __init__(self, folder: Path, ip: str = "127.0.0.1", before_worker: Sequence[str] = ()) -> None:
        self._folder = folder
        self.token = a_token(folder / "token")
        port = free_port()
        self.address = f"{ip}:{port}"
        self.head = Node(folder, 0, "--name", "head", "--head", "--port", str(port), token=self.token)
        self.worker = Node(
            folder, 1, "--name", "pc2", "--address", self.address, token=self.token, before=before_worker
        )

    def start(self) -> None:
        self.head.start()
        until(lambda: unreachable(self.address) is None, patience_s=RAY_S)
        self.worker.start()

    def another(self, name: str, *, token: Path | None = None, **of_node: Any) -> Node:
        """Return a further worker's PC, with more of what `Node` takes."""
        options = ("--name", name, "--address", self.address)
        return Node(self._folder, 2, *options, token=token or self.token, **of_node)

    @property
    def settings(self) -> dict[str, str]:
        """Return `cluster` of coserve.yaml."""
        return {"address": self.address, "token": str(self.token)}

    def end(self) -> None:
        for node in (self.worker, self.head):
            node.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@contextmanager
def short_folder() -> Iterator[Path]:
    """Yield a new folder with a short path, as Ray's sockets need it."""
    with tempfile.TemporaryDirectory(prefix="c", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def is_used(line: Line) -> bool:
    rows = [row for row in line.status()["executors"] if row["device"] == "pc2-cpu"]
    return all("out_of_service" not in row and row["budget_bytes"] for row in rows)


def until_used(line: Line) -> None:
    line.wait(lambda: is_used(line), RAY_S)


def times_lost(line: Line) -> int:
    """Count how often the line has noticed that the other PC is gone: that may be over before one looks."""
    return line.log().count("event=device_lost ")


def judged_there(line: Line, more_than: int | None = None) -> int:
    """Return how many images the other PC has judged, once there are `more_than` so many."""

    def count() -> int:
        return line.rows("SELECT count(*) FROM stages WHERE device = 'pc2-cpu'")[0][0]

    if more_than is not None:
        line.wait(lambda: count() > more_than, RAY_S)
    return count()


def images_for_two(line: Line) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield images of every component, so many at once that the other PC is needed."""
    board = {"type": "free", "serial": "S1"}
    while True:
        line.wait(lambda: line.status()["backlog"] < _BURST)
        for number in range(_BURST):
            yield a_jpeg(number), {"board": board, "component": "PVF"[number % 3]}


def each_was_judged_once(line: Line, sent: int) -> None:
    everything_is_whole(line)
    assert line.rows("SELECT count(*), count(DISTINCT image_id) FROM inspections") == [(sent, sent)]
    assert line.rows("SELECT count(*) FROM inspections WHERE verdict = 'unknown'") == [(0,)]
    unjudged = "SELECT count(*) FROM inspections i WHERE verdict = 'pass' AND NOT EXISTS"
    unjudged += " (SELECT 1 FROM stages s WHERE s.inspection_id = i.inspection_id)"
    assert line.rows(unjudged) == [(0,)]
