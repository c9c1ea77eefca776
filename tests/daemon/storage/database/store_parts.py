"""Small lines for the tests of the store: rules, images, verdicts, a clock that a test moves."""

import hashlib
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from daemon.line.serving import Serving
from daemon.records import BoardRef, Image, JournalKey, Message, Pixels, Refused, Stage, Verdict, WriteFailed
from daemon.storage.database.reader import ResultsReader
from daemon.storage.database.store import Store
from daemon.storage.database.transaction import Clock
from experts.spec import Detection, digest_of
from routing_rules.compile import compile_rules
from routing_rules.routes import Routes, VerdictName
from tests.editions import a_serving

START_S = 1_795_252_091.123  # 2026-11-21T09:08:11.123Z

RULES = """
boards:
  mainboard-a:
    time_limit: 20s
    components: {R0402: 2, QFP64: [U1, U2]}
  tiny:
    components: {R0402: 1}
  loose:
    time_limit: 5s
    extras: allow
    components: {R0402: 1}
classifiers:
  "*": {expert: "{component}", pass: [ok]}
"""


SETTINGS = '{"architecture":"resnet50","classes":["ok","bad"],"temperature":1.3}'


def some_rules(text: str = RULES) -> Routes:
    return compile_rules(text, "rules.yaml", None)


class MovingClock:
    """Wall and monotonic time that only a test moves."""

    def __init__(self, wall_s: float = START_S) -> None:
        self.now_s = 100.0
        self.set_s = wall_s - self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now_s + self.set_s, lambda: self.now_s)


PAYLOAD = b"\xff\xd8\xffimage"


def an_image(
    image_id: str = "i1",
    component: str = "R0402",
    designator: str | None = None,
    *,
    source: str = "cam1",
    type: str = "mainboard-a",  # noqa: A002
    serial: str = "S1",
    attempt: int | None = None,
    lot: str | None = None,
    station: str | None = None,
    payload: bytes = PAYLOAD,
    pixels: Pixels | None = None,
    deadline_ms: int | None = None,
    attributes: dict[str, str] | None = None,
) -> Image:
    return Image(
        source=source,
        image_id=image_id,
        board=BoardRef(type, serial, lot, station, attempt, tuple(sorted((attributes or {}).items()))),
        component=component,
        designator=designator or image_id,
        captured_at=None,
        deadline_ms=deadline_ms,
        pixels=pixels or Pixels(),
        sha256=hashlib.sha256(payload).hexdigest(),
    )


def sent(image_id: str = "i1", *, payload: bytes = PAYLOAD, **fields: Any) -> tuple[Image, bytes, bytes]:
    """Return an image with its payload and connection, as the writer takes them."""
    image = an_image(image_id, payload=payload, **fields)
    return image, payload, image.source.encode()


def a_stage(expert: str = "r50", batch_id: int = 1, **fields: Any) -> Stage:
    values: dict[str, Any] = {
        "expert": expert,
        "expert_version": "0123456789ab",
        "label": "ok",
        "confidence": 0.97,
        "detections": (),
        "device": "cpu",
        "executor": "cpu-0",
        "batch_id": batch_id,
        "batch_size": 4,
        "queued_ms": 1.5,
        "load_ms": 12.25,
        "infer_ms": 30,
        "expert_settings": digest_of(SETTINGS),
        "settings": SETTINGS,
    }
    return Stage(**(values | fields))


def a_box(label: str = "bridge", confidence: float = 0.8) -> Detection:
    return Detection(label, confidence, (1.0, 2.0, 30.5, 40.25))


def a_verdict(
    image: Image,
    verdict: VerdictName = "pass",
    defect: str | None = None,
    reason: str | None = None,
    stages: Sequence[Stage] | None = None,
) -> Verdict:
    return Verdict(image, verdict, defect, reason, tuple(stages if stages is not None else (a_stage(),)))


@dataclass
class Line:
    """A store with a clock, driven without threads: what the writer does, one call at a time."""

    folder: Path
    clock: MovingClock
    serving: Serving
    store: Store
    images: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def ask(self, *images: Image) -> list[Image | Refused | WriteFailed]:
        pairs = [(image, JournalKey(1, 16 + n, len(PAYLOAD))) for n, image in enumerate(images)]
        return self.store.accept(pairs, self.serving)

    def accept(self, *images: Image) -> list[Image]:
        """Accept images that their boards can take."""
        answers = self.ask(*images)
        accepted = [answer for answer in answers if isinstance(answer, Image)]
        assert len(accepted) == len(answers), answers
        return accepted

    def judge(self, *verdicts: Verdict) -> list[Message]:
        return self.store.write_results(verdicts).published

    def inspect(self, component: str, designator: str, verdict: VerdictName = "pass", **fields: Any) -> list[Message]:
        """Accept one image and judge it."""
        self.images += 1
        (image,) = self.accept(an_image(f"image-{self.images}", component, designator, **fields))
        return self.judge(a_verdict(image, verdict))

    def reopen(self, down_s: float = 0.0) -> None:
        """Stop without saying goodbye, and start again `down_s` later."""
        self.store.close()
        self.clock.pass_s(down_s)
        self.store = Store(self.url, clock=self.clock.clock, **self.options)

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Ask, or change, the database as another program does."""
        with closing(sqlite3.connect(self.folder / "inspection.db", isolation_level=None)) as connection:
            return connection.execute(query, values).fetchall()

    def review(self, inspection_id: int, verdict: VerdictName) -> None:
        query = "INSERT INTO reviews (inspection_id, at, reviewer, verdict) VALUES (?, '2026-11-21', 'Eva', ?)"
        self.rows(query, inspection_id, verdict)

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder}/inspection.db"

    def reader(self) -> ResultsReader:
        return ResultsReader(self.url)


def a_line(folder: Path, rules: Routes | None = None, **options: Any) -> Line:
    clock = MovingClock()
    store = Store(f"sqlite:///{folder}/inspection.db", clock=clock.clock, **options)
    return Line(folder, clock, a_serving(rules or some_rules()), store, options=options)
