"""The web process alone, over a database that the test fills by SQL: for what needs no daemon and no network."""

import http.client
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

import yaml

from daemon.storage.database.store import open_store
from tests.waiting import PATIENCE_S
from tools.setup.service import free_port

AT = "2026-11-21T09:28:11.123Z"
_ESTABLISHED = "01"  # in /proc/net/tcp


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str


class Web:
    """`get` and `post` are raw: whatever header is given is what is sent."""

    def __init__(self, folder: Path, token: Path | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        self.config = folder / "coserve.yaml"
        self.database = folder / "inspection.db"
        (folder / "images").mkdir(parents=True)
        settings = {
            "endpoints": {
                "intake": ["ipc://run/intake.sock"],
                "results": "ipc://run/results.sock",
                "control": "ipc://run/control.sock",
                "http": f"http://{self.host}",
            },
            "rules": "rules.yaml",
            "catalog": "experts/catalog.yaml",
            "devices": {"cpu": {"expert_memory": "1MB"}},
        } | ({"security": {"http_token": str(token)}} if token else {})
        self.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        open_store(f"sqlite:///{self.database}").close()
        self.sql(
            "INSERT INTO rules_versions VALUES ('0123456789ab', 'aa', :at, 'boards: {}')",
            at=AT,
        )
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
            self._wait_until_it_answers()
            yield self
        finally:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(PATIENCE_S) == 0, self.log()

    def log(self) -> str:
        return (self.folder / "web.log").read_text(encoding="utf-8")

    def _wait_until_it_answers(self) -> None:
        assert self.process
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError(self.log())

    def get(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        """Header names with `_` for `-`. `Accept` is that of a browser unless it is given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            given = {"Host": self.host, "Accept": "text/html"} | {k.replace("_", "-"): v for k, v in headers.items()}
            if body is not None:
                given |= {"Content-Type": "application/x-www-form-urlencoded", "Content-Length": str(len(body))}
            for name, value in given.items():
                connection.putheader(name, value)
            connection.endheaders(body.encode() if body is not None else None)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, text)
        finally:
            connection.close()

    def post(self, path: str, body: str = "", **headers: str) -> Answer:
        return self.get(path, "POST", body, **headers)

    def sql(self, statement: str, **places: object) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.database)) as database, database:
            return database.execute(statement, places).fetchall()

    def add_board(self, board_id: int, serial: str | None = None, verdict: str | None = "fail", **more: object) -> None:
        row = {
            "board_id": board_id,
            "board_type": "mainboard-a",
            "serial": serial or f"A{board_id}",
            "attempt": 1,
            "lot": "L1",
            "station": "AOI-1",
            "first_seen_at": AT,
            "completed_at": AT if verdict else None,
            "expected": 2,
            "inspected": 2,
            "verdict": verdict,
            "reason": "complete" if verdict else None,
            "rules_version": "0123456789ab",
            "seq": 1_000_000_000 + board_id if verdict else None,
            **more,
        }
        self._add("boards", row)

    def add_image(self, inspection_id: int, board_id: int, verdict: str | None = "fail", **more: object) -> None:
        row = {
            "inspection_id": inspection_id,
            "source": "cam",
            "image_id": f"i{inspection_id}",
            "board_id": board_id,
            "component": "R0402",
            "designator": f"R{inspection_id}",
            "accepted_at": AT,
            "completed_at": AT if verdict else None,
            "image_bytes": 100,
            "status": "done" if verdict else "accepted",
            "verdict": verdict,
            "late": 0,
            "rules_version": "0123456789ab",
            "image_sha256": f"{inspection_id:064x}",
            "latency_ms": 12.5,
            "seq": inspection_id if verdict else None,
            **more,
        }
        self._add("inspections", row)

    def add_stage(self, inspection_id: int, step: int = 0, **more: object) -> None:
        row = {
            "inspection_id": inspection_id,
            "step": step,
            "expert": "R0402",
            "expert_version": "abcdefabcdef",
            "label": "ok",
            "confidence": 0.9,
            "device": "cpu",
            "executor": "cpu/0",
            "batch_id": 1,
            "batch_size": 4,
            "queued_ms": 1.0,
            "load_ms": 2.0,
            "infer_ms": 3.0,
            **more,
        }
        self._add("stages", row)

    def add_picture(self, image_path: str, data: bytes) -> None:
        file = self.folder / image_path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def _add(self, table: str, row: Mapping[str, object]) -> None:
        names, places = ", ".join(row), ", ".join(f":{name}" for name in row)
        self.sql(f"INSERT INTO {table} ({names}) VALUES ({places})", **row)  # noqa: S608 - our own names


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
        """The next event's fields; `data` is its lines."""
        found: dict[str, str] = {}
        while True:
            raw = self.file.readline()
            assert raw, "the server has ended the stream"
            line = raw.decode().rstrip("\r\n")
            if not line and "event" in found:
                return found
            name, colon, value = line.partition(": ")
            if colon and name in ("event", "id", "data"):
                found[name] = f"{found[name]}\n{value}" if name in found else value

    def is_held(self) -> bool:
        """Whether the server has its end still open, as the kernel says: nothing of what was sent is read for it."""
        ours, theirs = (f":{end[1]:04X}" for end in (self.socket.getsockname(), self.socket.getpeername()))
        rows = [row.split() for row in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()]
        return any(row[1].endswith(theirs) and row[2].endswith(ours) and row[3] == _ESTABLISHED for row in rows[1:])

    def is_ended(self) -> bool:
        """Whether the server has closed it, once everything that was sent is read."""
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
