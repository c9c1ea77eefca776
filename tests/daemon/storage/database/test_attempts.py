"""Attempts at boards, decided without a database (PROTOCOL.md, Boards)."""

import pytest

from daemon.storage.database.boards import MAX_ATTEMPT, Attempt, choose_attempt
from routing_rules.routes import Position, Recipe

RECIPE = Recipe("board", {"R0402": Position(2), "QFP64": Position(2, ("U1", "U2"))}, time_limit_s=20.0)


class Images:
    """Images of one attempt: each is taken and, if a verdict is given, judged."""

    def __init__(self, number: int = 1) -> None:
        self.attempt = Attempt(board_id=number, number=number, recipe=RECIPE)
        self.count = 0

    def image(self, component, designator, verdict=None, defect=None, reason=None):
        self.count += 1
        self.attempt.count_image(component, designator)
        if verdict is not None:
            self.attempt.judge(self.count, component, designator, verdict, defect, reason)
        return self

    def complete(self, verdict="pass"):
        for component, designator in (("R0402", "a"), ("R0402", "b"), ("QFP64", "U1"), ("QFP64", "U2")):
            self.image(component, designator, verdict)
        return self

    def closed(self):
        self.attempt.closed = True
        return self.attempt


def test_an_attempt_is_complete_when_every_position_has_a_verdict_and_nothing_is_pending():
    images = Images().image("R0402", "a", "pass").image("R0402", "b", "pass").image("QFP64", "U1", "pass")
    assert not images.attempt.is_complete
    images.image("QFP64", "U2")
    assert not images.attempt.is_complete
    images.attempt.judge(4, "QFP64", "U2", "pass", None)
    assert images.attempt.is_complete
    images.image("R0402", "c")
    assert not images.attempt.is_complete


def test_a_complete_board_of_passes_passes():
    closing = Images().complete().attempt.closing("complete")
    assert (closing["verdict"], closing["inspected"], closing["failed"], closing["missing"]) == ("pass", 4, [], [])


def test_the_worst_verdict_wins_and_missing_counts_as_unknown():
    assert Images().complete().image("R0402", "a", "review").attempt.closing("complete")["verdict"] == "review"
    assert Images().complete("review").image("X", "x", "unknown").attempt.closing("complete")["verdict"] == "unknown"
    assert Images().complete("unknown").image("R0402", "b", "fail").attempt.closing("complete")["verdict"] == "fail"
    assert Images().image("R0402", "a", "pass").attempt.closing("time_limit")["verdict"] == "unknown"
    assert Images().image("R0402", "a", "review").attempt.closing("time_limit")["verdict"] == "unknown"
    assert Images().image("R0402", "a", "fail").attempt.closing("time_limit")["verdict"] == "fail"


def test_missing_names_what_lacks_in_the_recipes_order_with_designators_where_it_lists_them():
    closing = Images().image("QFP64", "U2", "pass").image("R0402", "a", "pass").attempt.closing("time_limit")
    assert closing["missing"] == [
        {"component": "R0402", "count": 1},
        {"component": "QFP64", "count": 1, "designators": ["U1"]},
    ]
    assert closing["inspected"] == 2


def test_unknown_is_inspected_but_extras_and_repeats_are_no_positions():
    images = Images().image("R0402", "a", "unknown").image("R0402", "a", "pass").image("LED", "D1", "pass")
    images.image("QFP64", "U9", "pass")  # not among the listed designators
    assert images.attempt.closing("time_limit")["inspected"] == 1


def test_images_beyond_the_quantity_count_toward_the_verdict_only():
    images = Images().complete().image("R0402", "c", "fail", "D101")
    closing = images.attempt.closing("complete")
    assert (closing["verdict"], closing["inspected"]) == ("fail", 4)
    assert closing["failed"] == [{"designator": "c", "component": "R0402", "defect": "D101"}]


def test_a_designator_that_fails_twice_is_one_failure_with_the_first_images_defect():
    images = Images().image("R0402", "a").image("R0402", "a", "fail", "second")
    images.attempt.judge(1, "R0402", "a", "fail", "first")
    assert images.attempt.closing("time_limit")["failed"] == [
        {"designator": "a", "component": "R0402", "defect": "first"}
    ]


def test_a_position_is_in_the_list_of_its_worst_verdict_only():
    images = Images().image("R0402", "a", "review").image("R0402", "a", "fail", "D1").image("R0402", "a", "unknown")
    images.image("R0402", "b", "unknown", None, "deadline").image("R0402", "b", "review").image("QFP64", "U1", "review")
    images.image("QFP64", "U1", "pass").image("QFP64", "U2", "unknown", None, "bad_image")
    images.image("QFP64", "U2", "unknown", None, "expert_failed")
    closing = images.attempt.closing("complete")
    assert closing["failed"] == [{"designator": "a", "component": "R0402", "defect": "D1"}]
    assert closing["unknown"] == [
        {"designator": "b", "component": "R0402", "reason": "deadline"},
        {"designator": "U2", "component": "QFP64", "reason": "bad_image"},
    ]
    assert closing["review"] == [{"designator": "U1", "component": "QFP64"}]
    assert images.attempt.surplus == 4  # neither the better answers of a position nor the later ones of the same kind


def test_a_repeat_that_is_pending_at_the_time_limit_makes_no_pass():
    images = Images().complete().image("R0402", "a")
    closing = images.attempt.closing("time_limit")
    assert (closing["verdict"], closing["missing"], closing["inspected"]) == ("unknown", [], 4)


LAST = Images(number=MAX_ATTEMPT).complete().closed()
OPEN, WHOLE, EMPTY = Images(number=2).attempt, Images().complete().closed(), Images().closed()
GAPS = Images().image("R0402", "a", "pass").image("QFP64", "U1").closed()
FILLED = Images().image("R0402", "a", "pass").image("QFP64", "U1").closed()
FILLED.count_image("QFP64", "U2")
FILLED.count_image("R0402", "b")


@pytest.mark.promise("Cameras", "A closed attempt that a camera names takes late images or refuses; it opens no other")
@pytest.mark.parametrize(
    ("attempts", "named", "place", "chosen"),
    [
        ([], None, ("R0402", "a"), (1, "in time")),
        ([OPEN], None, ("R0402", "a"), (2, "in time")),
        ([GAPS], None, ("QFP64", "U2"), (1, "late")),
        ([GAPS], None, ("R0402", "b"), (1, "late")),
        ([GAPS], None, ("QFP64", "U1"), (2, "in time")),  # pending at closing: it leaves no gap
        ([GAPS], None, ("QFP64", "U9"), (2, "in time")),  # not listed
        ([GAPS], None, ("LED", "D1"), (2, "in time")),
        ([FILLED], None, ("QFP64", "U2"), (2, "in time")),
        ([FILLED], None, ("R0402", "c"), (2, "in time")),
        ([WHOLE], None, ("R0402", "a"), (2, "in time")),
        ([], 3, ("R0402", "a"), (3, "in time")),
        ([EMPTY, OPEN], 3, ("R0402", "a"), (3, "in time")),
        ([EMPTY, OPEN], 2, ("R0402", "a"), (2, "in time")),
        ([EMPTY, OPEN], 1, ("R0402", "a"), (1, "late")),
        ([WHOLE], 1, ("R0402", "a"), (1, "refused")),
        ([LAST], None, ("R0402", "a"), (MAX_ATTEMPT, "refused")),  # no number is left
        ([LAST], 1, ("R0402", "a"), (1, "in time")),
        ([WHOLE, OPEN], 1, ("R0402", "a"), (1, "refused")),
    ],
)
def test_an_image_joins_an_open_attempt_fills_a_gap_of_a_closed_one_or_opens_the_next(attempts, named, place, chosen):
    assert choose_attempt({one.number: one for one in attempts}, named, *place) == chosen


def test_a_closed_attempt_takes_a_picture_that_repeats_one_of_its_own_named_or_not():
    attempts = {1: WHOLE, 2: Images(number=2).complete().closed()}
    for named, number in ((None, 2), (2, 2), (1, 1)):
        chosen = choose_attempt(attempts, named, "R0402", "a", repeats=lambda _: True)
        assert chosen == (number, "repeats")


def test_a_closed_verdict_never_changes():
    images = Images().image("R0402", "a", "pass")
    images.attempt.closed = True
    before = images.attempt.closing("time_limit")
    images.image("R0402", "b", "fail", "D1")
    assert images.attempt.closing("time_limit") == before
