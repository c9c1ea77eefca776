"""Reviews in the results stream, and decisions on whole attempts, from a database as the daemon writes it."""

from contextlib import closing

import pytest

from daemon.records import Message
from daemon.storage.database.changes import ChangeNotes
from daemon.storage.database.prune import AgeLimit
from daemon.storage.database.reviews import Review, ReviewRefusedError
from daemon.storage.database.upkeep import check_database
from daemon.storage.decisions import Decision
from tests.daemon.storage.database.store_parts import Line, a_verdict, an_image

HOSTILE = "'); DROP TABLE reviews; -- <script>alert(1)</script> \U0001f4a5"


class Reviewed:
    """A line whose reviews publish."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.published: list[Message] = []

    def board(self, *verdicts: str, serial: str = "S1", **board: object) -> int:
        """Judge one image of each verdict of a `tiny` board, or of a `mainboard-a` that its time limit closes."""
        kind = "tiny" if len(verdicts) == 1 else "mainboard-a"
        for place, verdict in zip(("R1", "R2", "U1", "U2"), verdicts, strict=False):
            component = "QFP64" if place.startswith("U") else "R0402"
            self.line.inspect(component, place, verdict, type=kind, serial=serial, **board)
        self.line.clock.pass_s(21.0)
        self.line.judge()
        return self.line.rows("SELECT max(board_id) FROM boards")[0][0]

    def decide(self, verdict: str | None, *, after=None, by="Eva", image=None, board=None, **more: object) -> Review:
        decision = Decision(image, by, after, verdict, board_id=board, **more)
        return self.line.store.review(decision, self.published.extend)

    def refusal(self, *arguments: object, **named: object) -> tuple[str, str]:
        before = self.line.rows("SELECT count(*), max(seq) FROM reviews")
        with pytest.raises(ReviewRefusedError) as refused:
            self.decide(*arguments, **named)
        assert self.line.rows("SELECT count(*), max(seq) FROM reviews") == before
        return refused.value.code, refused.value.reason

    def final(self, board: int) -> tuple[object, ...]:
        query = "SELECT verdict, decided_by, verdict_by_line FROM final_boards WHERE board_id = ?"
        return self.line.rows(query, board)[0]

    def stream(self) -> list[dict[str, object]]:
        with closing(self.line.reader()) as reader:
            return reader.results_since(0, 1000)["items"]


@pytest.fixture
def kit(line):
    line.store.note_changes(ChangeNotes(version="0"))
    return Reviewed(line)


@pytest.mark.promise(
    "Access, pages and reviews",
    "A review is published once it is durable, and repeated identically after later reviews; one that was "
    "stored before a kill comes after the restart",
)
def test_a_review_is_published_with_the_next_seq_and_repeated_identically_after_later_ones(kit):
    board = kit.board("fail", lot="L1", station="ST1")
    first = kit.decide("pass", image=1, note=HOSTILE)
    kit.decide("fail", image=1, after=first.review_id, by="Ben", defect="D1")
    kit.decide(None, image=1, after=2, by="Ben")
    assert [message.topic for message in kit.published] == ["review/tiny/S1/"] * 3
    assert kit.published[0].body == {
        "seq": 3,
        "at": first.at,
        "review_id": 1,
        "inspection_id": 1,
        "board": {"type": "tiny", "serial": "S1", "lot": "L1", "station": "ST1", "attempt": 1},
        "component": "R0402",
        "designator": "R1",
        "verdict": "pass",
        "defect": None,
        "reviewer": "Eva",
        "note": HOSTILE,
        "undo_of": None,
        "board_verdict": "pass",
        "epoch": kit.line.store.epoch,
    }
    assert [(m.body["board_verdict"], m.body["undo_of"]) for m in kit.published[1:]] == [("fail", None), ("pass", 2)]
    assert kit.stream()[2:] == [{"topic": message.topic, **message.body} for message in kit.published]
    assert [item["seq"] for item in kit.stream()] == [1, 2, 3, 4, 5]
    assert kit.line.rows("SELECT kind, key FROM stream WHERE seq > 2") == [("review", 1), ("review", 2), ("review", 3)]
    assert kit.final(board) == ("pass", "Eva", "fail")


def test_a_review_of_an_open_attempt_has_no_verdict_of_its_board_and_a_repeated_request_no_second_message(kit):
    (image,) = kit.line.accept(an_image("i1", "R0402", "R1", type="mainboard-a", serial="S1"))
    kit.line.judge(a_verdict(image, "review"))
    for _ in range(2):
        kit.decide("pass", image=1)
    assert [message.body["board_verdict"] for message in kit.published] == [None]
    kit.line.clock.pass_s(21.0)
    kit.line.judge()
    assert [item["topic"] for item in kit.stream()][1:] == ["review/mainboard-a/S1/", "board/mainboard-a/S1/"]
    assert kit.stream()[1]["board_verdict"] is None


def test_a_board_with_a_missing_image_is_released_and_that_is_undone(kit):
    board = kit.board("pass", "pass", "unknown")
    assert kit.final(board) == ("unknown", "daemon", "unknown")
    released = kit.decide("pass", board=board, note="U2 measured by hand")
    body = kit.published[-1].body
    assert (body["inspection_id"], body["component"], body["designator"]) == (None, None, None)
    assert (body["verdict"], body["board_verdict"], body["board"]["serial"]) == ("pass", "pass", "S1")
    assert kit.final(board) == ("pass", "Eva", "unknown")
    scrapped = kit.decide("fail", board=board, after=released.review_id, by="Ben", defect="D9")
    assert kit.final(board) == ("fail", "Ben", "unknown")
    back = kit.decide(None, board=board, after=scrapped.review_id, by="Ben")
    assert (back.reviewer, back.undo_of, kit.final(board)) == ("Eva", 2, ("pass", "Eva", "unknown"))
    again = kit.decide(None, board=board, after=back.review_id)
    assert (again.reviewer, again.verdict, again.undo_of) == ("daemon", "unknown", 1)
    assert str(again).startswith("Eva undid review 1, so its images count again at ")
    assert kit.final(board) == ("unknown", "daemon", "unknown")
    assert kit.refusal(None, board=board, after=again.review_id)[0] == "no_decision"
    assert kit.stream()[-4:] == [{"topic": message.topic, **message.body} for message in kit.published]


@pytest.mark.promise(
    "Access, pages and reviews",
    "Of two people who decide on one board one wins, and the newest row counts however the clock was set",
)
def test_of_two_people_at_one_board_one_wins_and_the_other_is_told(kit):
    board = kit.board("fail")
    kit.decide("pass", board=board)
    code, reason = kit.refusal("fail", board=board, by="Ben")
    assert code == "conflict"
    assert reason.startswith("Eva decided pass at ")
    assert reason.endswith(f"(review 1): look at board {board} again, then decide")
    # A decision about one of its images is another subject, and the one about the whole stands above it.
    kit.decide("fail", image=1, by="Ben")
    assert (kit.published[-1].body["board_verdict"], kit.final(board)) == ("pass", ("pass", "Eva", "fail"))


def test_only_a_closed_attempt_that_is_there_takes_a_decision(kit):
    kit.line.accept(an_image("i1", "R0402", "R1", type="mainboard-a", serial="S1"))
    assert kit.refusal("pass", board=1)[0] == "not_finished"
    assert kit.refusal(None, board=1)[0] == "not_finished"
    assert kit.refusal("pass", board=77) == ("unknown_board", "there is no board 77: it never existed, or was pruned")


def test_the_verdict_of_a_board_is_by_the_newest_decision_that_stands(kit):
    board = kit.board("fail", "fail")
    kit.decide("pass", image=1)
    undone = kit.decide("pass", image=2, by="Ben")
    assert kit.final(board) == ("unknown", "Ben", "fail")  # two more positions are missing
    kit.decide(None, image=2, after=undone.review_id, by="Ben")
    assert kit.final(board) == ("fail", "Eva", "fail")


def test_a_decided_board_is_kept_and_one_that_was_pruned_takes_no_decision(kit, tmp_path):
    kept, gone = kit.board("pass"), kit.board("pass", serial="S2")
    kit.decide("fail", board=kept)
    old = AgeLimit("2999-01-01")
    assert kit.line.store.forget_boards([kept, gone], old).boards == 1
    assert kit.refusal("pass", board=gone)[0] == "unknown_board"
    assert kit.refusal("pass", image=2)[0] == "unknown_inspection"
    assert kit.line.rows("SELECT board_id FROM boards") == [(kept,)]
    assert kit.line.rows("SELECT last_seq, pruned FROM stream_position") == [(5, 2)]
    assert [item["seq"] for item in kit.stream()] == [1, 2, 5]
    assert check_database(kit.line.url, tmp_path / "images", tmp_path / "journal") == []
