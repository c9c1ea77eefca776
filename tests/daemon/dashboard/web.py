"""The web process alone, over a database that the test fills by SQL, and the parts that tests of it share.

A test that needs a daemon's answers replaces its control socket by `answering_control`.
"""

import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml
import zmq
from PIL import Image

from daemon.storage.database.store import Store
from daemon.wire.control import ControlServer
from tests.experts.pictures import encoded
from tests.ports import free_port
from tests.waiting import PATIENCE_S, until

AT = "2026-11-21T09:28:11.123Z"
RULES_VERSION = "0123456789ab"
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}%00\u202e\xa0\u3164"
#: Values that would change a question if they were put into its text.
SQL = (
    *("'; DROP TABLE boards; --", "' OR '1'='1", "1 OR 1=1", "x' UNION SELECT sql FROM sqlite_master --"),
    *("%", "_", "-1", "9" * 30, "1e3", "\x00", "NaN", "\\", "<script>"),
)
STATUS: Mapping[str, Any] = {
    "version": "0.1.0", "uptime_s": 7300.0, "state": "ready", "policy": "coserve-plus", "last_error": None,
    "accepted": 10, "completed": 10, "backlog": 3, "images_per_s": 1.5, "expert_switches": 0, "last_seq": 10,
    "rules_version": RULES_VERSION, "executors": [], "pools": [], "children": [], "consumers": [],
}  # fmt: skip
#: Pages cache control's answers for half a second.
_CACHED_S = 0.6
_ESTABLISHED = "01"  # in /proc/net/tcp
_BOARD = {
    "board_type": "mainboard-a", "attempt": 1, "lot": "L1", "station": "AOI-1", "first_seen_at": AT,
    "expected": 2, "inspected": 2, "rules_version": RULES_VERSION, "edition": 1,
}  # fmt: skip
_IMAGE = {
    "source": "cam", "component": "R0402", "accepted_at": AT, "image_bytes": 100, "late": 0, "latency_ms": 12.5,
    "rules_version": RULES_VERSION, "edition": 1,
}  # fmt: skip
_STAGE = {
    "expert": "R0402", "expert_version": "abcdefabcdef", "label": "ok", "confidence": 0.9,
    "device": "cpu", "executor": "cpu/0", "batch_id": 1, "batch_size": 4,
    "queued_ms": 1.0, "load_ms": 2.0, "infer_ms": 3.0,
}  # fmt: skip
_VERSION = {
    "expert_version": "abcdefabcdef", "sha256": "aa", "architecture": "resnet18", "classes": "[]", "bytes": 1,
    "dtype": "f", "origin": "", "first_used_at": AT,
}  # fmt: skip


@dataclass(frozen=True)
class WebAnswer:
    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class Web:
    """`get` and `post` send exactly the headers that are given."""

    def __init__(self, folder: Path, token: Path | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        self.origin = f"http://{self.host}"
        self.config = folder / "coserve.yaml"
        self.database = folder / "inspection.db"
        (folder / "images").mkdir(parents=True)
        settings = {
            "endpoints": {
                "intake": ["ipc://run/intake.sock"],
                "results": "ipc://run/results.sock",
                "control": "ipc://run/control.sock",
                "http": self.origin,
            },
            "rules": "rules.yaml",
            "catalog": "experts/catalog.yaml",
            "devices": {"cpu": {"expert_memory": "1MB"}},
        } | ({"security": {"http_token": str(token)}} if token else {})
        self.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        Store(f"sqlite:///{self.database}").close()
        self.sql("INSERT INTO rules_versions VALUES (:version, 'aa', :at, 'boards: {}')", version=RULES_VERSION, at=AT)
        self.process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def running(self, **environ: str) -> Iterator["Web"]:
        with (self.folder / "web.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "daemon.dashboard", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | environ,
            )
        try:
            until(self._answers_or_ended, self.log)
            assert self.process.poll() is None, self.log()
            yield self
        finally:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(PATIENCE_S) == 0, self.log()

    def log(self) -> str:
        return (self.folder / "web.log").read_text(encoding="utf-8")

    def _answers_or_ended(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S).close()
        except OSError:
            return self.process is None or self.process.poll() is not None
        return True

    def get(
        self,
        path: str,
        method: str = "GET",
        body: str | None = None,
        query: Mapping[str, Any] | None = None,
        **headers: str,
    ) -> WebAnswer:
        """Header names with `_` for `-`. `Accept` is that of a browser unless it is given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            target = f"{path}?{urlencode(query)}" if query else path
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            sent = {"Host": self.host, "Accept": "text/html"} | {k.replace("_", "-"): v for k, v in headers.items()}
            if body is not None:
                sent |= {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": str(len(body))}
            for name, value in sent.items():
                connection.putheader(name, value)
            connection.endheaders(body.encode() if body is not None else None)
            answer = connection.getresponse()
            return WebAnswer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def post(self, path: str, body: str = "", **headers: str) -> WebAnswer:
        return self.get(path, "POST", body, None, **headers)

    def sql(self, statement: str, **values: object) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.database)) as database, database:
            return database.execute(statement, values).fetchall()

    def add(self, table: str, **row: object) -> None:
        names, places = ", ".join(row), ", ".join(f":{name}" for name in row)
        self.sql(f"INSERT INTO {table} ({names}) VALUES ({places})", **row)  # noqa: S608 - our own names

    def add_board(self, board_id: int, serial: str | None = None, verdict: str | None = "fail", **more: object) -> None:
        closed = {"completed_at": AT, "reason": "complete", "seq": 1_000_000_000 + board_id} if verdict else {}
        row = {"board_id": board_id, "serial": serial or f"A{board_id}", "verdict": verdict}
        self.add("boards", **_BOARD | row | closed | more)

    def add_image(self, inspection_id: int, board_id: int, verdict: str | None = "fail", **more: object) -> None:
        row = {"inspection_id": inspection_id, "board_id": board_id, "verdict": verdict}
        names = {"image_id": f"i{inspection_id}", "designator": f"R{inspection_id}"}
        judged = {"status": "done", "completed_at": AT, "seq": inspection_id} if verdict else {"status": "accepted"}
        self.add("inspections", **_IMAGE | row | names | judged | {"image_sha256": f"{inspection_id:064x}"} | more)

    def add_stage(self, inspection_id: int, step: int = 0, **more: object) -> None:
        self.add("stages", **_STAGE | {"inspection_id": inspection_id, "step": step} | more)

    def add_review(self, inspection_id: int, verdict: str, reviewer: str = "Eva", **more: object) -> None:
        self.add(
            "reviews", **{"inspection_id": inspection_id, "at": AT, "reviewer": reviewer, "verdict": verdict} | more
        )

    def add_version(self, expert: str, **more: object) -> None:
        self.add("expert_versions", **_VERSION | {"expert": expert} | more)

    def add_box(self, inspection_id: int, step: int, label: str, confidence: float, *corners: float) -> None:
        box = dict(zip(("x1", "y1", "x2", "y2"), corners, strict=True))
        self.add("detections", inspection_id=inspection_id, step=step, label=label, confidence=confidence, **box)

    def add_picture(self, image_path: str, data: bytes) -> None:
        file = self.folder / image_path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


def a_picture(kind: str = "PNG", size: tuple[int, int] = (160, 120), **more: object) -> bytes:
    return encoded(Image.new("RGB", size, (20, 120, 60)), kind, **more)


def a_token(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "token"
    file.touch(0o600)
    file.write_text(text + "\n", encoding="utf-8")
    return file


@contextmanager
def answering_control(web: Web, **answers: Any) -> Iterator[None]:
    """Serve a daemon's control socket for `web` with fixed answers or handlers, for what no test can bring about."""
    (web.folder / "run").mkdir(exist_ok=True)
    context: zmq.Context[Any] = zmq.Context()
    fixed = {"status": STATUS, "experts": {"experts": []}, "memory": {"pools": []}, "queues": {"running": []}} | answers
    handlers = {
        kind: answer if callable(answer) else lambda _fields, answer=answer: answer for kind, answer in fixed.items()
    }
    server = ControlServer(context, f"ipc://{web.folder}/run/control.sock", handlers)
    server.start()
    time.sleep(_CACHED_S)
    try:
        yield
    finally:
        server.stop()
        context.destroy(linger=0)


def an_expert(name: str, **more: Any) -> dict[str, Any]:
    row = {
        "expert": name,
        "version": "abcdefabcdef",
        "settings": "0" * 12,
        "architecture": "resnet18",
        "task": "classify",
    }
    places: dict[str, Any] = {"resident": [], "loading": [], "pinned": []}
    return {**row, "bytes": 44_720_128, "usage": 0.1, **places, "queued": 0, "failed": None, **more}


class Stream:
    """One listener to `/events`, which reads only when it is asked to."""

    def __init__(self, host: str, query: str = "topic=line", **headers: str) -> None:
        address, port = host.rsplit(":", 1)
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect((address, int(port)))
        lines = [f"GET /events?{query} HTTP/1.1", f"Host: {host}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.socket.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        self.file = self.socket.makefile("rb")
        self.status = int(self.file.readline().split()[1])

    def event(self) -> dict[str, str]:
        """Return the next event's fields; `data` is its lines."""
        fields: dict[str, str] = {}
        while True:
            raw = self.file.readline()
            assert raw, "the server has ended the stream"
            line = raw.decode().rstrip("\r\n")
            if not line and "event" in fields:
                return fields
            name, colon, value = line.partition(": ")
            if colon and name in ("event", "id", "data"):
                fields[name] = f"{fields[name]}\n{value}" if name in fields else value

    def is_held(self) -> bool:
        """Return True while the server's end is open, as the kernel says: nothing that was sent is read for it."""
        ours, theirs = (f":{end[1]:04X}" for end in (self.socket.getsockname(), self.socket.getpeername()))
        rows = [row.split() for row in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()]
        return any(row[1].endswith(theirs) and row[2].endswith(ours) and row[3] == _ESTABLISHED for row in rows[1:])

    def is_ended(self) -> bool:
        """Return True if the server has closed it, once everything that was sent is read."""
        until_s = time.monotonic() + PATIENCE_S
        try:
            while self.socket.recv(65536):
                if time.monotonic() > until_s:
                    return False
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.file.close()
        self.socket.close()
