"""Late images and decisions on whole attempts: a release counts for what existed when a person gave it."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy.exc import SQLAlchemyError

from daemon.line.serving import Serving
from daemon.monitor.alarms import Alarms
from daemon.storage.database import inspections
from tests.daemon.storage.database.store_parts import a_verdict, an_image
from tests.daemon.storage.database.test_review_messages import Reviewed, kit

__all__ = ["kit"]


def late(kit: Reviewed, verdict: Any, designator: str = "U2") -> list[dict[str, Any]]:
    """Judge the image that was missing, and return the messages of that transaction."""
    return [message.body for message in kit.line.inspect("QFP64", designator, verdict, type="mainboard-a", serial="S1")]


def released(kit: Reviewed) -> int:
    """Close a board whose images U1 and U2 are missing, and have a person release it."""
    board = kit.board("pass", "pass")
    kit.decide("pass", board=board, note="measured by hand")
    assert kit.final(board) == ("pass", "Eva", "unknown")
    return board


def waiting_boards(kit: Reviewed) -> list[tuple[object, ...]]:
    query = "SELECT board_id FROM reviews WHERE verdict = 'review' AND reviewer = 'daemon'"
    return kit.line.rows(query)


@pytest.mark.promise(
    "Access, pages and reviews",
    "A late image that does not pass takes back the release of its board: the board waits for a person again, as "
    "`final_boards`, the page Review and an alarm say",
)
@pytest.mark.parametrize(("verdict", "final"), [("fail", "fail"), ("unknown", "unknown"), ("review", "unknown")])
def test_a_late_image_that_is_no_pass_reopens_a_board_that_a_person_released(kit, verdict, final):
    board = released(kit)
    image, told = late(kit, verdict)
    assert (image["late"], told["seq"]) == (True, image["seq"] + 1)
    note = f"image {image['inspection_id']} (cam1 image-3) at U2 came late and is {verdict}"
    names = ("inspection_id", "designator", "reviewer", "verdict", "undo_of", "note", "board_verdict", "epoch")
    expected = (None, None, "daemon", "review", 1, note, final, kit.line.store.epoch)
    assert tuple(told[name] for name in names) == expected
    assert kit.final(board) == (final, "daemon", "unknown")
    assert kit.stream()[-1] == {"topic": "review/mainboard-a/S1/", **told}
    with closing(kit.line.reader()) as reader:
        (waits,) = reader.withdrawn_releases(10)
    assert (waits["designator"], waits["verdict"], waits["note"]) == ("U2", verdict, note)


def test_a_release_given_after_the_late_image_stands_until_the_next_one(kit):
    board = released(kit)
    late(kit, "fail", "U1")
    code, reason = kit.refusal("pass", board=board, after=1)
    assert (code, "daemon withdrew review 1 (image 3 (cam1 image-3) at U1 came late" in reason) == ("conflict", True)
    assert kit.refusal(None, board=board, after=2)[0] == "no_decision", "what was withdrawn cannot be undone"
    again = kit.decide("pass", board=board, after=2, by="Ben")
    assert kit.final(board) == ("pass", "Ben", "unknown")
    assert len(late(kit, "review")) == 2
    assert waiting_boards(kit) == [(board,), (board,)]
    assert kit.line.rows("SELECT undo_of FROM reviews WHERE review_id = 4") == [(again.review_id,)]


def test_late_images_of_one_transaction_withdraw_a_release_once(kit):
    released(kit)
    images = kit.line.accept(
        *(an_image(one, "QFP64", one.upper(), type="mainboard-a", serial="S1") for one in ("u1", "u2"))
    )
    messages = kit.line.judge(*(a_verdict(image, "fail") for image in images))
    assert [message.topic.partition("/")[0] for message in messages] == ["inspection", "inspection", "review"]
    assert [message.seq for message in messages] == list(range(messages[0].seq, messages[0].seq + 3))


def test_a_late_pass_a_scrapped_board_and_one_without_a_decision_are_told_nothing(kit):
    board = released(kit)
    assert len(late(kit, "pass", "U1")) == 1
    scrapped = kit.decide("fail", board=board, after=1, defect="D9")
    assert len(late(kit, "fail")) == 1
    assert kit.final(board) == ("fail", "Eva", "unknown")
    assert kit.line.rows("SELECT max(review_id) FROM reviews") == [(scrapped.review_id,)]
    other = kit.board("pass", "pass", serial="S2")
    assert len(kit.line.inspect("QFP64", "U1", "fail", type="mainboard-a", serial="S2")) == 1
    assert kit.final(other)[0] == "fail"
    assert waiting_boards(kit) == []


def test_the_late_verdict_and_the_withdrawn_release_are_stored_together_or_not_at_all(kit, monkeypatch):
    board = released(kit)
    (image,) = kit.line.accept(an_image("u1", "QFP64", "U1", type="mainboard-a", serial="S1"))

    def killed(*_: object) -> None:
        raise SQLAlchemyError("the process ended here")

    with monkeypatch.context() as patch:
        patch.setattr(inspections, "withdraw_release", killed)
        with pytest.raises(SQLAlchemyError):
            kit.line.judge(a_verdict(image, "fail"))
    kit.line.reopen()
    assert kit.line.rows("SELECT status FROM inspections WHERE image_id = 'u1'") == [("accepted",)]
    (again,) = kit.line.store.recover().pending
    kit.line.judge(a_verdict(again, "fail"))
    assert (kit.final(board)[0], waiting_boards(kit)) == ("fail", [(board,)])


@pytest.mark.parametrize("whole", [True, False])
def test_a_withdrawn_release_is_an_alarm_until_a_person_looked_also_after_a_restart(kit, tmp_path: Path, whole):
    board = released(kit)
    image = late(kit, "fail")[0]["inspection_id"]
    serving = cast("Serving", SimpleNamespace(current=SimpleNamespace(routes=SimpleNamespace(alarms=()))))
    with closing(kit.line.reader()) as reader:
        alarms = Alarms(serving, reader, None)  # as a restart makes it
        alarms._poll()
        (row,) = alarms.rows
        assert row["text"].startswith("mainboard-a S1 was released and waits again: image 3 ")
        assert (row["count"], row["images"][0]["board"]["serial"]) == (1, "S1")
        assert alarms.counts == {"release-withdrawn": 1}
        kit.decide("fail", **({"board": board, "after": 2} if whole else {"image": image}))
        alarms.published(kit.published[-1:])
        alarms._poll()
        assert (alarms.rows, alarms.counts) == ([], {})
