"""A client of PROTOCOL.md and RESULTS.md: stock pyzmq and sqlite3; of ours, what starts a daemon, and a camera."""

import hashlib
import itertools
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

import yaml
import zmq

from coserve_client import PublishAccount, Publisher
from tests.contract.peer import Peer
from tests.lines import a_jpeg, a_line
from tests.simulated import DAEMON
from tests.waiting import PATIENCE_S
from tools.setup.service import Service

ANY = "[ok, odd, bad]"
#: Verdicts that need no trained weights: every label passes, nothing is sure enough, or what is required is not there.
RULES = f"""\
boards:
  free: {{extras: allow, components: {{P: 1000}}}}
  pair: {{components: {{P: 2}}}}
  named: {{components: {{P: [P1, P2], F: [F1]}}}}
  quick: {{time_limit: 1500ms, components: {{P: [P1, P2]}}}}
  timed: {{time_limit: 2s, components: {{P: 2}}}}
  "Ünï/~ x": {{components: {{P: 1}}}}
classifiers:
  P: {{expert: R0402, pass: {ANY}, review_below: 0.0}}
  V: {{expert: C0603, pass: {ANY}, review_below: 1.0}}
  F: {{expert: QFP64, pass: {ANY}, review_below: 0.0, then: solder}}
detectors:
  solder: {{expert: yolo-solder, require: {{void: {{min: 64}}}}}}
defects: {{void: D301}}
"""


def sha256(payload: bytes | bytearray) -> str:
    return hashlib.sha256(payload).hexdigest()


class Listener:
    """A SUB that collects what is published."""

    def __init__(self, endpoint: str, *topics: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.rcvtimeo, self.socket.rcvhwm = int(PATIENCE_S * 1000), 0
        for topic in topics:
            self.socket.subscribe(topic.encode())
        self.socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def take(self) -> tuple[str, dict[str, Any]]:
        topic, body = self.socket.recv_multipart()
        return topic.decode("ascii"), json.loads(body)

    def until_heartbeat(self) -> None:
        """A heartbeat that was heard proves that the subscription stands."""
        while self.take()[0] != "heartbeat/":
            pass


class Line:
    """A folder with a daemon's files, and the ways in. Its daemon has simulated devices unless `command` is another."""

    def __init__(
        self, folder: Path, experts: Path, rules: str = RULES, command: Sequence[str] = DAEMON, **settings: Any
    ) -> None:
        self._open(a_line(folder, experts, **settings), command)
        self.write_rules(rules)

    @classmethod
    def at(cls, config: Path, command: Sequence[str] = DAEMON) -> Self:
        """Return a line whose files are there already."""
        line = cls.__new__(cls)
        line._open(config, command)
        return line

    def _open(self, config: Path, command: Sequence[str]) -> None:
        self.config, self.folder, self.command = config, config.parent, command
        self.endpoints = yaml.safe_load(config.read_text(encoding="utf-8"))["endpoints"]
        self.count = 0

    @property
    def catalog(self) -> Path:
        return self.folder / "experts" / "catalog.yaml"

    def weights(self, expert: str) -> Path:
        """The file that the daemon reads for the catalog's entry; a link to one that all tests share."""
        digest = yaml.safe_load(self.catalog.read_text(encoding="utf-8"))["experts"][expert]["sha256"]
        return self.catalog.parent / "weights" / digest[:2] / f"{digest}.safetensors"

    def write_rules(self, text: str) -> None:
        (self.folder / "rules.yaml").write_text(text, encoding="utf-8")

    def change_entry(self, expert: str, **fields: Any) -> None:
        """Edit an expert's entry in the working catalog."""
        document = yaml.safe_load(self.catalog.read_text(encoding="utf-8"))
        document["experts"][expert] |= fields
        self.catalog.write_text(yaml.safe_dump(document), encoding="utf-8")

    def forget(self, component: str, expert: str) -> None:
        """Let the working files know neither this component nor its expert."""
        rules = (self.folder / "rules.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
        self.write_rules("".join(row for row in rules if expert not in row and f"{component}:" not in row))
        document = yaml.safe_load(self.catalog.read_text(encoding="utf-8"))
        del document["experts"][expert]
        self.catalog.write_text(yaml.safe_dump(document), encoding="utf-8")

    def service(self, environ: Mapping[str, str] | None = None) -> Service:
        return Service(self.config, self.folder / "daemon.log", environ, command=self.command)

    def log(self) -> str:
        return (self.folder / "daemon.log").read_text(encoding="utf-8")

    @property
    def intake(self) -> str:
        return f"ipc://{self.folder}/run/intake.sock"

    @property
    def results(self) -> str:
        return f"ipc://{self.folder}/run/results.sock"

    def peer(self) -> Peer:
        return Peer(self.intake)

    def listener(self, *topics: str) -> Listener:
        return Listener(self.results, *topics)

    def control(self, kind: str, **fields: Any) -> dict[str, Any]:
        with Peer(f"ipc://{self.folder}/run/control.sock") as peer:
            return peer.ask({"type": kind, **fields})

    def review(self, **fields: Any) -> dict[str, Any]:
        """Decide, again where a busy disk says to try again: it counts once."""
        answers = (self.control("review", **fields) for _ in itertools.count())
        return next(answer for answer in answers if answer.get("code") not in {"not_stored", "no_answer"})

    def status(self) -> dict[str, Any]:
        return self.control("status")

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        file = f"file:{self.folder}/inspection.db?mode=ro"
        with closing(sqlite3.connect(file, uri=True, timeout=PATIENCE_S)) as database:
            return database.execute(sql, values).fetchall()

    def inspect(self, **fields: Any) -> dict[str, Any]:
        """The header of an image that is judged, `pass`, on a board without limits; a new `id`."""
        self.count += 1
        header = {
            "type": "inspect",
            "id": f"image-{self.count}",
            "source": "cam-1",
            "board": {"type": "free", "serial": "S1"},
            "component": "P",
        }
        return header | fields

    def send(self, payload: bytes | None = None, **fields: Any) -> str:
        """Send one image, which must be accepted; its id."""
        header = self.inspect(**fields)
        with self.peer() as peer:
            answer = peer.ask(header, a_jpeg(self.count) if payload is None else payload)
        assert answer["type"] == "accepted", answer
        return header["id"]

    @contextmanager
    def camera(self, images: Iterable[tuple[bytes, dict[str, Any]]], pause_s: float = 0.01) -> Iterator[PublishAccount]:
        """Send images, each a payload and fields of `inspect`, until the body ends; the line must take each of them.

        Their ids are `0`, `1` and so on.
        """
        over = threading.Event()
        with Publisher(self.intake, "camera", patience_s=PATIENCE_S) as publisher:

            def send() -> None:
                for number, (payload, fields) in enumerate(images):
                    publisher.send(str(number), payload, **fields)
                    if over.wait(pause_s):
                        break
                publisher.finish()

            thread = threading.Thread(target=send)
            thread.start()
            try:
                yield publisher.account
            finally:
                over.set()
                thread.join()
        assert publisher.account.complete, publisher.account.as_dict()

    def result(self, image_id: str) -> dict[str, Any]:
        """The published message of an image, by `results_since`, once there is one."""
        return self.wait(lambda: next((m for m in self.stream() if m.get("id") == image_id), None))

    def stream(self, since: int = 0) -> list[dict[str, Any]]:
        """Every message after `since`, page by page."""
        items: list[dict[str, Any]] = []
        with self.peer() as peer:
            more = True
            while more:
                page = peer.ask({"type": "results_since", "seq": since, "limit": 1000})
                items += page["items"]
                since, more = page["last_seq"], page["more"]
        return items

    def boards(self, serial: str, count: int = 1) -> list[dict[str, Any]]:
        """The `board` messages of one serial, once there are `count`."""

        def closed() -> list[dict[str, Any]] | None:
            messages = [m for m in self.stream() if m["topic"].startswith("board/") and m["board"]["serial"] == serial]
            return messages if len(messages) >= count else None

        messages = self.wait(closed)
        assert len(messages) == count
        return messages

    def begun_in_time(self, board_type: str, serial: str, **fields: Any) -> str:
        """The serial of a board with a time limit, one image of which was judged before that was over."""
        board = {"type": board_type, "serial": serial}
        while self.result(self.send(board=board, **fields))["late"]:
            board["serial"] += "'"
        return board["serial"]

    @contextmanager
    def held(self, expert: str) -> Iterator[None]:
        """The images of `expert` have no verdict before the body ends: its file does not answer, as on a dead disk."""
        file = self.weights(expert)
        assert self.control("unload", expert=expert)["type"] == "ok"
        self.wait(lambda: all(expert not in executor["resident"] for executor in self.status()["executors"]))
        aside = file.rename(file.with_suffix(".aside"))
        os.mkfifo(file)
        try:
            yield
        finally:
            writer = os.open(file, os.O_RDWR)  # a reader that waits for its bytes finds its end
            aside.replace(file)
            os.close(writer)

    def idle(self) -> None:
        self.wait(lambda: self.status()["backlog"] == 0)

    def wait(self, happened: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
        until_s = time.monotonic() + timeout_s
        while not (result := happened()):
            assert time.monotonic() < until_s, f"it did not happen within {timeout_s} s"
            time.sleep(0.05)
        return result


def everything_is_whole(line: Line) -> None:
    """Every image has one verdict, `seq` has no gap, and SQLite finds nothing wrong."""
    seqs = [seq for (seq,) in line.rows("SELECT seq FROM stream ORDER BY seq")]
    assert seqs == list(range(1, len(seqs) + 1))
    assert line.rows("SELECT count(*) FROM inspections WHERE verdict IS NULL") == [(0,)]
    assert line.rows("PRAGMA integrity_check") == [("ok",)]


@contextmanager
def running(folder: Path, experts: Path, **settings: Any) -> Iterator[Line]:
    """A line whose daemon runs."""
    line = Line(folder, experts, **settings)
    with line.service():
        yield line
