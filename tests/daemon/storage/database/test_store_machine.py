"""A store against a simple model: after restarts and failures too, each result is right and published once."""

import itertools
import sqlite3
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy.exc import DatabaseError

from daemon import records
from tests.daemon.storage.database.store_parts import RULES, a_line, a_verdict, an_image, some_rules

# mainboard-a of store_parts.RULES, once more and by hand.
EXPECTED: dict[str, Any] = {"R0402": 2, "QFP64": ["U1", "U2"]}
TIME_LIMIT_S = 20.0
WORST = ["fail", "unknown", "review", "pass"]
WHOLE = [("R0402", "R1"), ("R0402", "R2"), ("QFP64", "U1"), ("QFP64", "U2")]
IMAGES = [*WHOLE, ("R0402", "R3"), ("QFP64", "U3"), ("LED", "D1")]


@dataclass
class Image:
    accepted: records.Image
    component: str
    designator: str
    late: bool = False
    verdict: str | None = None


@dataclass
class Try:
    """One attempt, as the protocol's text says it."""

    opened_s: float
    images: list[Image] = field(default_factory=list)
    message: dict[str, Any] | None = None

    def filled(self, component: str, images: list[Image]) -> list[str]:
        designators = {image.designator for image in images if image.component == component}
        expected = EXPECTED.get(component, 0)
        if isinstance(expected, int):
            return sorted(designators)[:expected]
        return [name for name in expected if name in designators]

    def takes_late(self, component: str, designator: str) -> bool:
        if component not in EXPECTED:
            return False
        expected, designators = EXPECTED[component], {i.designator for i in self.images if i.component == component}
        if isinstance(expected, int):
            return designator not in designators and len(designators) < expected
        return designator in expected and designator not in designators

    def close(self, now_s: float) -> None:
        """Close if that is due, and remember what the board's message must say."""
        judged = [image for image in self.images if image.verdict is not None]
        count = {c: len(self.filled(c, judged)) for c in EXPECTED}
        whole = {c: n if isinstance(n, int) else len(n) for c, n in EXPECTED.items()}
        pending = len(judged) < len(self.images)
        reason = "complete" if count == whole and not pending else "time_limit"
        if reason == "time_limit" and now_s < self.opened_s + TIME_LIMIT_S:
            return
        verdicts = [image.verdict for image in judged] + (["unknown"] if pending or count != whole else [])
        missing = []
        for component, expected in EXPECTED.items():
            if count[component] < whole[component]:
                entry = {"component": component, "count": whole[component] - count[component]}
                if not isinstance(expected, int):
                    designators = self.filled(component, judged)
                    entry["designators"] = [name for name in expected if name not in designators]
                missing.append(entry)
        self.message = {
            "verdict": min(verdicts, key=WORST.index),
            "expected": 4,
            "inspected": sum(count.values()),
            "missing": missing,
            "failed": {(i.component, i.designator) for i in judged if i.verdict == "fail"},
            "reason": reason,
        }


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.line = a_line(Path(self.temporary.name), some_rules(RULES.replace("20s\n", "20s\n    extras: allow\n")))
        self.reader = self.line.reader()
        self.tries: dict[tuple[str, int], Try] = {}
        self.published: list[Any] = []
        self.images = 0

    def pending(self) -> list[tuple[tuple[str, int], Image]]:
        return [(key, i) for key, attempt in self.tries.items() for i in attempt.images if i.verdict is None]

    def write(self, *outcomes: Any) -> None:
        self.published += self.line.judge(*outcomes)

    def close_due(self) -> None:
        for attempt in self.tries.values():
            if attempt.message is None:
                attempt.close(self.line.clock.now_s)

    def place(self, serial: str, named: int | None, component: str, designator: str) -> tuple[int, bool] | None:
        """Return the attempt that takes the image and True if it is late, None if a closed one was named."""
        numbers = [number for board, number in self.tries if board == serial]
        if named is not None and named not in numbers:
            self.tries[serial, named] = Try(self.line.clock.now_s)
            return named, False
        number = named or max(numbers, default=0)
        attempt = self.tries.get((serial, number))
        if attempt is not None and attempt.message is None:
            return number, False
        if attempt is not None and attempt.takes_late(component, designator):
            return number, True
        if named is not None:
            return None
        new = max(numbers, default=0) + 1
        self.tries[serial, new] = Try(self.line.clock.now_s)
        return new, False

    @rule(
        serial=st.sampled_from(["S1", "S1", "S2"]),
        named=st.sampled_from([None, None, None, None, 1, 2, 4]),
        images=st.lists(st.sampled_from(IMAGES), min_size=1, max_size=6),
    )
    def accept(self, serial: str, named: int | None, images: list[tuple[str, str]]) -> None:
        self.write()  # the writer closes what is due before it takes arrivals
        self.close_due()
        sent = []
        for component, designator in images:
            self.images += 1
            sent.append(an_image(f"i{self.images}", component, designator, serial=serial, attempt=named))
        for one, answer in zip(sent, self.line.ask(*sent), strict=True):
            place = self.place(serial, named, one.component, one.designator)
            if place is None:
                assert isinstance(answer, records.Refused)
                assert answer.code == "attempt_closed"
                continue
            assert isinstance(answer, records.Image)
            accepted, (number, late) = answer, place
            image = Image(accepted, one.component, one.designator, late)
            self.tries[serial, number].images.append(image)

    @rule(without=st.sampled_from([None, None, *WHOLE]), verdict=st.sampled_from(WORST))
    def inspect_a_board(self, without: tuple[str, str] | None, verdict: str) -> None:
        """Accept all images of a board, or all but one, at once."""
        self.accept("S1", None, [image for image in WHOLE if image != without])
        self.judge_images(self.pending(), [verdict, "pass"])

    @precondition(lambda self: self.pending())
    @rule(data=st.data())
    def judge_some(self, data: st.DataObject) -> None:
        waiting = self.pending()
        indexes = data.draw(st.lists(st.sampled_from(range(len(waiting))), min_size=1, max_size=5, unique=True))
        self.judge_images(
            [waiting[index] for index in indexes], data.draw(st.lists(st.sampled_from(WORST), min_size=1))
        )

    @precondition(lambda self: self.pending())
    @rule(verdict=st.sampled_from(WORST))
    def judge_all(self, verdict: str) -> None:
        self.judge_images(self.pending(), ["pass", "pass", verdict])

    def judge_images(self, images: list[tuple[tuple[str, int], Image]], verdicts: list[str]) -> None:
        outcomes = []
        for (key, image), verdict in zip(images, itertools.cycle(verdicts), strict=False):
            image.verdict = verdict
            outcomes.append(a_verdict(image.accepted, verdict))
            image.late = image.late or self.tries[key].message is not None
            if self.tries[key].message is None and self.is_complete(self.tries[key]):
                self.tries[key].close(self.line.clock.now_s)
        self.write(*outcomes, *outcomes[:1])  # an outcome that comes twice is written once
        self.close_due()

    def is_complete(self, attempt: Try) -> bool:
        probe = Try(attempt.opened_s, attempt.images)
        probe.close(now_s=attempt.opened_s)
        return probe.message is not None

    @rule(seconds=st.sampled_from([1.0, 8.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.line.clock.pass_s(seconds)
        self.write()
        self.close_due()

    @rule(down_s=st.sampled_from([0.0, 5.0, 30.0]))
    def crash(self, down_s: float) -> None:
        self.line.reopen(down_s)
        recovered = {image.inspection_id for image in self.line.store.recover().pending}
        assert recovered == {image.accepted.inspection_id for _, image in self.pending()}
        self.write()
        self.close_due()

    @precondition(lambda self: self.pending())
    @rule()
    def fail_to_commit(self) -> None:
        """The disk refuses at the last moment: nothing is known to anybody, and trying again is right."""
        _, image = self.pending()[0]
        driver = self.line.store._sql

        def refuse(action: int, text: str | None, *_: str | None) -> int:
            is_commit = action == sqlite3.SQLITE_TRANSACTION and text == "COMMIT"
            return sqlite3.SQLITE_DENY if is_commit else sqlite3.SQLITE_OK

        driver.set_authorizer(refuse)
        with pytest.raises(DatabaseError, match="not authorized"):
            self.line.judge(a_verdict(image.accepted, "fail"))
        driver.set_authorizer(None)

    @invariant()
    def everything_published_is_kept_in_order_and_read_again_identically(self) -> None:
        assert [message.seq for message in self.published] == list(range(1, len(self.published) + 1))
        items = self.reader.results_since(0, 1000)["items"]
        assert items == [{"topic": message.topic, **message.body} for message in self.published]

    @invariant()
    def boards_say_what_the_model_says(self) -> None:
        boards = {
            (m.body["board"]["serial"], m.body["board"]["attempt"]): dict(m.body)
            for m in self.published
            if m.topic.startswith("board/")
        }
        expected = {key: attempt.message for key, attempt in self.tries.items() if attempt.message is not None}
        for body in boards.values():
            body["failed"] = {(entry["component"], entry["designator"]) for entry in body["failed"]}
        assert {key: {name: body[name] for name in expected[key]} for key, body in boards.items()} == expected

    @invariant()
    def every_judged_image_is_published_once_with_its_attempt(self) -> None:
        images = [m.body for m in self.published if m.topic.startswith("inspection/")]
        assert len({body["id"] for body in images}) == len(images)
        published = sorted(
            (b["board"]["serial"], b["board"]["attempt"], b["designator"], b["verdict"], b["late"]) for b in images
        )
        assert published == sorted(
            (serial, number, image.designator, image.verdict, image.late)
            for (serial, number), attempt in self.tries.items()
            for image in attempt.images
            if image.verdict is not None
        )

    def teardown(self) -> None:
        self.reader.close()
        self.line.store.close()
        self.temporary.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
