"""`review` over the control socket: the decisions that it takes and refuses by name; an answer is durable."""

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from daemon.storage.decisions import Decision
from daemon.wire.control import ControlError
from tests.contract.client import Line, running
from tests.waiting import until

pytestmark = pytest.mark.not_fast("starts processes")

GOOD: dict[str, Any] = {"inspection_id": 1, "verdict": "fail", "reviewer": "Eva", "defect": "D1", "note": "a pad"}


def a_box(*corners: Any, label: Any = "void", **more: Any) -> dict[str, Any]:
    return {"label": label, "box": list(corners or (1, 2, 3, 4)), **more}


WRONG: dict[str, list[dict[str, Any]]] = {
    "inspection_id: is missing": [{"inspection_id": None}],
    "inspection_id: expected an integer from 1": [{"inspection_id": value} for value in ("1", 0, True, 2**63)],
    'verdict: expected one of pass, fail, unknown, review, got "good"': [{"verdict": "good"}],
    "verdict: expected one of": [{"verdict": value} for value in (None, ["pass"], {"a": 1})],
    "defect: only a fail has one": [{"verdict": "pass"}],
    "reviewer: is missing": [{"reviewer": None}, {"reviewer": "  "}],
    "reviewer: expected a string of 1 to 128": [{"reviewer": "E" * 129}],
    "defect: expected a string of 1 to 128": [{"defect": "D\n1"}, {"defect": ""}],
    "note: expected a string of 1 to 128": [{"note": value} for value in ("x\x1b[31m", "x" * 129, 7)],
    "note: these words mark what was undone": [
        {"note": f"{words}undo of review 3 by Eva"} for words in ("", "undecided again: ")
    ],
    'reviewer: "Daemon" is the line itself': [{"reviewer": "Daemon"}],
    "newest: expected an integer from 1": [{"newest": -1}],
    "undo: expected true or false": [{"undo": "yes"}],
    "verdict: undoing restores the decision before": [{"undo": True}],
    "boxes: expected a list of at most 300": [{"boxes": value} for value in ({}, "x", True, [a_box()] * 301)],
    'boxes[1]: expected {"label", "box": [x1, y1, x2, y2]}: a string of 1 to 128': [
        {"boxes": [a_box(), value]}
        for value in (
            *(None, 7, [1, 2, 3, 4], {}, {"label": "void"}, {"box": [1, 2, 3, 4]}, a_box(1, 2, 3), a_box(note="x")),
            *(a_box(label=label) for label in (None, 7, "", "x" * 129, "a\nb", "a\x00b")),
            *(a_box(*corners) for corners in ((3, 2, 1, 4), (1, 4, 3, 2), (1, 2, 1, 4), (1, 2, 3, 2), (-1, 2, 3, 4))),
            *(a_box(1, 2, 3, value) for value in (math.nan, math.inf, True, "4", None, 10**400)),
        )
    ],
    "boxes: are drawn on an image": [{"inspection_id": None, "board_id": 1, "boxes": [a_box()]}],
    "boxes: undoing restores": [{"undo": True, "verdict": None, "defect": None, "note": None, "boxes": []}],
    "at: expected one of": [{"at": "2020-01-01"}],
}


@pytest.mark.parametrize("text", WRONG)
def test_a_field_that_is_wrong_is_named(text: str) -> None:
    for changed in WRONG[text]:
        with pytest.raises(ControlError) as refused:
            Decision.from_fields(GOOD | changed)
        assert refused.value.code == "bad_field"
        assert text in refused.value.reason


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Iterator[Line]:
    with running(tmp_path_factory.mktemp("reviews") / "line", experts_folder) as line:
        yield line


def an_image(line: Line) -> int:
    """Return the inspection_id of an image with the verdict `review`."""
    image_id = line.send(component="V")
    assert line.result(image_id)["verdict"] == "review"
    ((inspection_id,),) = line.rows("SELECT inspection_id FROM inspections WHERE image_id = ?", image_id)
    return inspection_id


def decide(line: Line, **fields: Any) -> dict[str, Any]:
    """Return the answer; one that a busy disk gave is asked for again: a decision counts once."""

    def answered() -> dict[str, Any] | None:
        answer = line.control("review", **fields)
        return None if answer.get("code") in ("not_stored", "no_answer") else answer

    return until(answered)


def rows(line: Line, image: int) -> list[tuple[Any, ...]]:
    query = "SELECT verdict, defect, reviewer, note FROM reviews WHERE inspection_id = ? ORDER BY review_id"
    return line.rows(query, image)


@pytest.mark.promise(
    "Access, pages and reviews",
    "If two reviewers decide about one image, even at the same moment, one decision is written and the other "
    "reviewer is told who made it",
)
def test_of_many_who_decide_at_once_one_is_written_and_the_others_hear_who_it_was(line: Line) -> None:
    image = an_image(line)
    together = threading.Barrier(8)

    def one(number: int) -> dict[str, Any]:
        together.wait()
        return decide(line, inspection_id=image, verdict="fail", defect=f"D{number}", reviewer=f"R{number}")

    with ThreadPoolExecutor(8) as people:
        answers = list(people.map(one, range(8)))
    written = [answer for answer in answers if answer["type"] == "ok"]
    assert len(written) == 1
    ((verdict, defect, reviewer, _),) = rows(line, image)
    assert (verdict, defect, reviewer) == ("fail", written[0]["defect"], written[0]["reviewer"])
    for answer in answers:
        assert answer["type"] == "ok" or f"{reviewer} decided fail {defect}" in answer["reason"]


@pytest.mark.promise(
    "Access, pages and reviews",
    "A review decision is durable when it is answered, and counts once however often it is sent",
)
def test_a_decision_that_was_answered_survives_a_kill(tmp_path: Path, experts_folder: Path) -> None:
    line = Line(tmp_path / "line", experts_folder)
    service = line.service()
    service.start()
    try:
        image = an_image(line)
        answer = decide(line, inspection_id=image, verdict="pass", reviewer="Eva")
    finally:
        service.kill()
    assert answer["type"] == "ok"
    assert rows(line, image) == [("pass", None, "Eva", None)]
