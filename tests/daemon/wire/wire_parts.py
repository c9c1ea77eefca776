"""Real parts of the wire for the tests of intake, with a writer that keeps images in memory."""

import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zmq

from daemon.config.settings import Limits
from daemon.intake.admission import Admission, Stored
from daemon.intake.backlog import Backlog, BacklogLimits
from daemon.intake.intake import Intake
from daemon.line.serving import Serving
from daemon.records import Duplicate, Image, JournalKey, WriteFailed
from daemon.storage.quarantine import Quarantine
from daemon.wire.endpoints import CurveKeys, Gate
from routing_rules.compile import compile_rules
from routing_rules.load import read_yaml_text
from tests.editions import a_serving
from tests.experts import pictures

RULES = """
boards:
  mainboard-a:
    components: {R0402: 4, QFP64: [U1]}
  open-board:
    components: {R0402: 1}
    extras: allow
classifiers:
  "*": {expert: "{component}", pass: [ok]}
"""


@dataclass
class MemoryWriter:
    """Answers from its own thread, in order, while `going` is set; with `fail_with`, where there is one."""

    fail_with: Duplicate | WriteFailed | None = None
    images: list[Image] = field(default_factory=list)
    on_stored: Callable[[Image], None] = lambda _: None

    def __post_init__(self) -> None:
        self._jobs: queue.Queue[tuple[Image, Callable[[Stored], None]] | None] = queue.Queue()
        self.going = threading.Event()
        self.going.set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def store_image(self, image: Image, payload: bytes, connection: bytes, reply: Callable[[Stored], None]) -> None:
        self._jobs.put((replace(image, key=JournalKey(0, 0, len(payload))), reply))

    def stop(self) -> None:
        self.going.set()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.going.wait()
            image, reply = job
            if self.fail_with is not None:
                reply(self.fail_with)
                continue
            self.images.append(image)
            reply(replace(image, inspection_id=len(self.images), attempt=1, edition=1))
            self.on_stored(image)


class MemoryReader:
    """Finds what a MemoryWriter has stored; pages of results are those given, while `going` is set."""

    def __init__(self, writer: MemoryWriter, items: list[dict[str, Any]] | None = None) -> None:
        self._writer = writer
        self.items = items or []
        self.open_edition_number: int | None = None
        self.going = threading.Event()
        self.going.set()

    def find(self, source: str, image_id: str) -> str | None:
        for image in self._writer.images:
            if (image.source, image.image_id) == (source, image_id):
                return image.sha256
        return None

    def open_edition(self, board_type: str, serial: str, attempt: int | None) -> int | None:
        return self.open_edition_number

    def find_text(self, source: str, request_id: str) -> None:
        return None

    def last_seq(self) -> int:
        return self.items[-1]["seq"] if self.items else 0

    def results_since(self, seq: int, limit: int) -> dict[str, Any]:
        self.going.wait()
        newer = [item for item in self.items if item["seq"] > seq]
        page = newer[:limit]
        last = page[-1]["seq"] if page else seq
        oldest = self.items[0]["seq"] if self.items else None
        return {"items": page, "last_seq": last, "more": len(newer) > limit, "oldest_seq": oldest}


def some_serving(text: str = RULES) -> Serving:
    return a_serving(compile_rules(read_yaml_text(text, "rules.yaml"), "rules.yaml", None))


def a_png(width: int = 2, height: int = 2) -> bytes:
    """A whole grey PNG; the declared size may be a lie."""
    rows = zlib.compress(b"".join(b"\0" + bytes(min(width, 64)) for _ in range(min(height, 64))))
    return pictures.a_png(width, height, 0, pictures.a_chunk(b"IDAT", rows))


def an_inspect(image_id: object = "i1", **fields: Any) -> dict[str, Any]:
    """The header of a message that is accepted; a field given as None is left out."""
    header = {
        "type": "inspect",
        "id": image_id,
        "source": "cam-1",
        "board": {"type": "mainboard-a", "serial": "S1"},
        "component": "R0402",
        **fields,
    }
    return {name: value for name, value in header.items() if value is not None}


@dataclass
class Line:
    context: zmq.Context[Any]
    gate: Gate | None
    intake: Intake
    admission: Admission
    writer: MemoryWriter
    reader: MemoryReader
    backlog: Backlog
    quarantine: Path
    endpoints: list[str]
    counts: list[str]
    serving: Serving

    @property
    def ipc(self) -> str:
        return self.endpoints[0]

    @property
    def tcp(self) -> str:
        return self.endpoints[1]


@contextmanager
def a_line(
    folder: Path,
    *,
    credit: int = 64,
    max_payload_bytes: int = 1_000_000,
    backlog: BacklogLimits | None = None,
    items: list[dict[str, Any]] | None = None,
    in_memory_bytes: int = 10**8,
    curve: CurveKeys | None = None,
    max_connections: int = 256,
) -> Iterator[Line]:
    """Start an intake, which `curve` opens to other machines.

    Images leave the backlog as soon as they are stored, unless the test replaces `writer.on_stored`.
    """
    context: zmq.Context[Any] = zmq.Context()
    counts: list[str] = []
    load = Backlog(backlog or BacklogLimits(1000, 10**8, 1000, 10**8))
    writer = MemoryWriter(on_stored=lambda image: load.leave(image.source, image.key.length))
    reader = MemoryReader(writer, items)
    serving = some_serving()
    admission = Admission(
        Limits(credit=credit, max_payload_bytes=max_payload_bytes, in_memory=in_memory_bytes),
        serving,
        reader,
        writer,
        load,
        Quarantine(folder / "quarantine", 1_000_000),
    )
    gate = Gate(context, curve) if curve else None
    intake = Intake(
        context,
        [f"ipc://{folder}/intake.sock", "tcp://0.0.0.0:*" if gate else "tcp://127.0.0.1:*"],
        admission,
        reader.results_since,
        gate.keys if gate else None,
        on_answers=lambda answers: counts.extend(answer.kind for answer in answers),
        is_allowed=gate.is_allowed if gate else None,
        max_connections=max_connections,
    )
    try:
        if gate:
            gate.start()
        endpoints = [endpoint.replace("0.0.0.0", "127.0.0.1") for endpoint in intake.start()]  # noqa: S104
        parts = (intake, admission, writer, reader, load, folder / "quarantine")
        yield Line(context, gate, *parts, endpoints, counts, serving)
    finally:
        writer.going.set()
        reader.going.set()
        intake.stop()
        writer.stop()
        if gate:
            gate.stop()
        context.term()
