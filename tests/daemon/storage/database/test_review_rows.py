"""Decisions of people, as rows: appended, checked against what the reviewer saw, undone by one more row."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import create_engine

from daemon.storage.database.reviews import (
    Review,
    ReviewRefusedError,
    WaitingFilter,
    count_of,
    counting_boxes,
    history,
    waiting,
)
from daemon.storage.decisions import Decision, DrawnBox
from daemon.storage.writer import Writer
from daemon.wire.control import ControlError
from tests.daemon.storage.database.store_parts import Line, a_stage, a_verdict, an_image


class Kit:
    """A line, and people who look at its images."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.engine = create_engine(line.url)

    def image(self, verdict="fail", defect=None, *, component="R0402", expert="r50", **board) -> int:
        self.line.images += 1
        image = an_image(f"image-{self.line.images}", component, **{"serial": "S1"} | board)
        (image,) = self.line.accept(image)
        if verdict:
            self.line.judge(a_verdict(image, verdict, defect, stages=[a_stage(expert)]))
        return image.inspection_id

    def decide(
        self, image: int, verdict: str | None, defect=None, note=None, *, after=None, reviewer="Eva", boxes=()
    ) -> Review:
        self.line.clock.pass_s(1)
        return self.line.store.review(Decision(image, reviewer, after, verdict, defect, note, boxes=boxes))

    def boxes(self, *images: int) -> list[tuple[int, DrawnBox, str]]:
        with self.engine.connect() as connection:
            rows = connection.execute(counting_boxes(images)).all()
        return [(row.inspection_id, (row.label, row.x1, row.y1, row.x2, row.y2), row.reviewer) for row in rows]

    def waits(self, newest_first=False, **which) -> list[int]:
        with self.engine.connect() as connection:
            query = waiting(WaitingFilter(**which), newest_first=newest_first)
            return [row.inspection_id for row in connection.execute(query)]

    def history(self, image: int) -> list[Review]:
        with self.engine.connect() as connection:
            return history(connection, image)

    def final(self, image: int) -> tuple[object, ...]:
        query = "SELECT verdict, defect, decided_by FROM final_verdicts WHERE inspection_id = ?"
        return self.line.rows(query, image)[0]


@pytest.fixture
def kit(line):
    kit = Kit(line)
    yield kit
    kit.engine.dispose()


def test_nobody_overrules_what_they_have_not_seen(kit):
    image = kit.image()
    first = kit.decide(image, "pass")
    with pytest.raises(ReviewRefusedError, match=rf"Eva decided pass at .* \(review {first.review_id}\)") as refused:
        kit.decide(image, "fail", "D1", reviewer="Ben")
    assert refused.value.code == "conflict"
    assert kit.history(image) == [first]
    second = kit.decide(image, "fail", "D1", reviewer="Ben", after=first.review_id)
    assert kit.final(image) == ("fail", "D1", "Ben")
    with pytest.raises(ReviewRefusedError, match="Ben decided fail D1"):
        kit.decide(image, "pass", after=first.review_id)
    assert kit.history(image) == [first, second]


def test_a_decision_whose_answer_was_lost_counts_once_however_often_it_is_sent(kit):
    image = kit.image()
    first = kit.decide(image, "pass", note="x")
    assert kit.decide(image, "pass", note="x") == first
    second = kit.decide(image, "fail", "D1", after=first.review_id)
    assert kit.decide(image, "fail", "D1", after=first.review_id) == second
    undone = kit.decide(image, None, after=second.review_id)
    assert kit.decide(image, None, after=second.review_id) == undone
    assert kit.history(image) == [first, second, undone]
    for changed in ({"verdict": "fail", "defect": "D2"}, {"verdict": "fail", "defect": "D1", "note": "other"}):
        with pytest.raises(ReviewRefusedError, match="Eva undid"):
            kit.decide(image, **changed, after=first.review_id)


VOID, BRIDGE = ("void", 1.5, 2, 30, 40.25), ("bridge", 0, 0, 5, 5)


def test_the_boxes_that_count_are_those_of_the_newest_decision_that_was_not_undone(kit):
    image, other = kit.image("fail"), kit.image("fail")
    first = kit.decide(image, "fail", "D1", boxes=(VOID, BRIDGE))
    kit.decide(other, "pass", boxes=(BRIDGE,))
    eva = [(image, VOID, "Eva"), (image, BRIDGE, "Eva")]
    assert kit.boxes(image, other) == [*eva, (other, BRIDGE, "Eva")]
    assert kit.boxes(image) == eva
    second = kit.decide(image, "fail", "D1", after=first.review_id, reviewer="Ben", boxes=(BRIDGE,))
    assert kit.boxes(image) == [(image, BRIDGE, "Ben")]
    third = kit.decide(image, "pass", after=second.review_id, reviewer="Ute")
    assert kit.boxes(image) == [], "Ute saw nothing to mark"
    undone = kit.decide(image, None, after=third.review_id, reviewer="Ute")
    assert kit.boxes(image) == [(image, BRIDGE, "Ben")]
    undone = kit.decide(image, None, after=undone.review_id, reviewer="Ute")
    assert kit.boxes(image) == eva
    kit.decide(image, None, after=undone.review_id)
    assert kit.boxes(image) == []
    assert kit.boxes(other) == [(other, BRIDGE, "Eva")]


@pytest.mark.parametrize(("image", "code"), [(99, "unknown_inspection"), (1, "not_finished")])
def test_what_is_not_there_or_not_judged_takes_no_decision(kit, image, code):
    kit.image(verdict=None)
    for verdict in ("pass", None):
        with pytest.raises(ReviewRefusedError) as refused:
            kit.decide(image, verdict)
        assert refused.value.code == code
    assert kit.history(image) == []


def test_undoing_appends_a_row_that_restores_what_was_before(kit):
    image = kit.image("fail", "D207")
    first = kit.decide(image, "pass")
    second = kit.decide(image, "fail", "D301", after=first.review_id, reviewer="Ben")
    undone = kit.decide(image, None, after=second.review_id, reviewer="Ben")
    assert (undone.verdict, undone.defect, undone.undo_of) == ("pass", None, second.review_id)
    assert (undone.reviewer, undone.writer) == ("Eva", "Ben")
    assert kit.final(image) == ("pass", None, "Eva")
    assert kit.waits() == []
    again = kit.decide(image, None, after=undone.review_id)
    assert (again.verdict, again.defect, again.undo_of) == ("fail", "D207", first.review_id)
    assert again.is_open
    assert kit.waits() == [image]
    assert (again.reviewer, again.writer) == ("daemon", "Eva")
    assert kit.final(image) == ("fail", "D207", "daemon")
    assert kit.history(image) == [first, second, undone, again]
    with pytest.raises(ReviewRefusedError, match="nothing to undo") as refused:
        kit.decide(image, None, after=again.review_id)
    assert refused.value.code == "no_decision"
    third = kit.decide(image, "unknown", after=again.review_id)
    assert kit.waits() == []
    assert kit.decide(image, None, after=third.review_id).undo_of == third.review_id


def test_what_is_review_fail_or_unknown_waits_until_somebody_decides(kit):
    images = [kit.image(verdict) for verdict in ("pass", "fail", "review", "unknown", None)]
    assert kit.waits() == images[1:4]
    kit.decide(images[1], "fail")
    kit.decide(images[2], "unknown")
    assert kit.waits() == [images[3]]


def test_an_image_that_somebody_wants_looked_at_again_waits_whatever_the_line_said(kit):
    image = kit.image("pass")
    request = kit.decide(image, "review", note="is this a bridge?")
    assert kit.waits() == kit.waits(verdict="pass") == [image]
    kit.decide(image, "pass", after=request.review_id, reviewer="Ben")
    assert kit.waits() == []


def test_images_of_a_board_that_somebody_decided_as_a_whole_wait_for_nobody_until_it_is_undone(kit):
    image, other = kit.image("fail", serial="A"), kit.image("fail", serial="B")
    ((board,),) = kit.line.rows("UPDATE boards SET verdict = 'fail' WHERE serial = 'A' RETURNING board_id")
    released = kit.line.store.review(Decision(None, "Eva", None, "pass", board_id=board))
    assert kit.waits() == [other]
    asked = kit.decide(image, "review")
    assert kit.waits() == [image, other], "somebody wants to look at it nevertheless"
    kit.decide(image, None, after=asked.review_id)
    assert kit.waits() == [other]
    kit.line.store.review(Decision(None, "Ben", released.review_id, None, board_id=board))
    assert kit.waits() == [image, other]
    undone = kit.line.store.review(Decision(None, "Ben", released.review_id + 3, "review", board_id=board))
    assert kit.waits() == [image, other], undone


def test_what_waits_comes_board_after_board_and_can_be_chosen(kit):
    first_image = kit.image("fail", "D1", serial="A", lot="L1", station="st1")
    second_image = kit.image("unknown", serial="B", lot="L2", component="R0402")
    third_image = kit.image("review", serial="A", lot="L1", expert="x'); DROP TABLE reviews; --")
    assert kit.waits() == [first_image, third_image, second_image]
    assert kit.waits(newest_first=True) == [second_image, first_image, third_image]
    assert kit.waits(lot="L1") == [first_image, third_image]
    assert kit.waits(station="st1") == [first_image, third_image]
    assert kit.waits(verdict="unknown") == [second_image]
    assert kit.waits(defect="D1") == [first_image]
    assert kit.waits(expert="x'); DROP TABLE reviews; --") == [third_image]
    assert kit.waits(lot="' OR '1'='1") == kit.waits(component="%") == []
    with kit.engine.connect() as connection:
        assert connection.execute(count_of(waiting(), 2)).scalar() == 2


@pytest.mark.promise("Access, pages and reviews", "A decision that cannot be stored stays in the page and is retried")
def test_a_full_disk_is_said_and_the_same_decision_is_stored_once_there_is_room(kit):
    def run(task) -> Future:
        done: Future = Future()
        try:
            done.set_result(task(kit.line.store))
        except Exception as error:  # noqa: BLE001 - as the writer hands it on
            done.set_exception(error)
        return done

    def pages(most: int) -> None:
        with kit.line.store.engine.connect() as connection:
            connection.exec_driver_sql(f"PRAGMA max_page_count = {most}")

    request = {"inspection_id": kit.image(), "verdict": "pass", "reviewer": "E" * 128, "note": "n" * 128}
    writer: Any = SimpleNamespace(run=run, publish=list)
    pages(1)  # SQLite takes it for the pages there are

    def fill() -> None:
        for _ in range(200):
            newest = Writer.write_decision(writer, Decision.from_fields(request)).review_id
            request.update(newest=newest, verdict="unknown" if request["verdict"] == "pass" else "pass")

    with pytest.raises(ControlError, match="full: try again") as refused:
        fill()
    assert refused.value.code == "not_stored"
    before = kit.history(request["inspection_id"])
    pages(100_000)
    written = Writer.write_decision(writer, Decision.from_fields(request))
    assert Writer.write_decision(writer, Decision.from_fields(request)) == written
    assert [review.review_id for review in kit.history(request["inspection_id"])[len(before) :]] == [written.review_id]
