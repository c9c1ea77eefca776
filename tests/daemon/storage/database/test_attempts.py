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


def test_a_board_opens_its_first_attempt_and_images_join_the_open_one():
    assert choose_attempt({}, None, "R0402", "a") == (1, "in time")
    assert choose_attempt({1: Images().attempt}, None, "R0402", "a") == (1, "in time")


def test_an_image_that_was_missing_comes_late_and_its_repeat_opens_the_next_attempt():
    attempt = Images().image("R0402", "a", "pass").image("QFP64", "U1", "pass").closed()
    assert choose_attempt({1: attempt}, None, "QFP64", "U2") == (1, "late")
    assert choose_attempt({1: attempt}, None, "QFP64", "U1") == (2, "in time")
    assert choose_attempt({1: attempt}, None, "R0402", "b") == (1, "late")
    attempt.count_image("QFP64", "U2")
    attempt.count_image("R0402", "b")
    assert choose_attempt({1: attempt}, None, "QFP64", "U2") == (2, "in time")
    assert choose_attempt({1: attempt}, None, "R0402", "c") == (2, "in time")


def test_an_image_that_is_still_pending_at_closing_leaves_no_gap_for_another():
    attempt = Images().image("QFP64", "U1").closed()
    assert choose_attempt({1: attempt}, None, "QFP64", "U1") == (2, "in time")


def test_extras_and_unlisted_designators_are_never_late():
    attempt = Images().closed()
    assert choose_attempt({1: attempt}, None, "LED", "D1") == (2, "in time")
    assert choose_attempt({1: attempt}, None, "QFP64", "U9") == (2, "in time")


def test_after_a_complete_attempt_every_image_opens_the_next():
    assert choose_attempt({1: Images().complete().closed()}, None, "R0402", "a") == (2, "in time")


def test_a_named_attempt_opens_if_it_is_newer_joins_if_it_is_open_and_takes_late_images_if_it_is_closed():
    gap, open_second = Images().closed(), Images(number=2).attempt
    assert choose_attempt({}, 3, "R0402", "a") == (3, "in time")
    assert choose_attempt({1: gap, 2: open_second}, 3, "R0402", "a") == (3, "in time")
    assert choose_attempt({1: gap, 2: open_second}, 2, "R0402", "a") == (2, "in time")
    assert choose_attempt({1: gap, 2: open_second}, 1, "R0402", "a") == (1, "late")


@pytest.mark.promise("Cameras", "A closed attempt that a camera names takes late images or refuses; it opens no other")
def test_a_closed_attempt_that_is_named_refuses_what_it_has_and_opens_no_other():
    closed, open_second = Images().complete().closed(), Images(number=2).attempt
    assert choose_attempt({1: closed}, 1, "R0402", "a") == (1, "refused")
    assert choose_attempt({1: closed, 2: open_second}, 1, "R0402", "a") == (1, "refused")


def test_a_closed_attempt_takes_a_picture_that_repeats_one_of_its_own_named_or_not():
    attempts = {1: Images().complete().closed(), 2: Images(number=2).complete().closed()}
    for named, number in ((None, 2), (2, 2), (1, 1)):
        chosen = choose_attempt(attempts, named, "R0402", "a", repeats=lambda _: True)
        assert chosen == (number, "repeats")


def test_after_the_last_number_there_is_an_attempt_still_finds_one():
    last = Images(number=MAX_ATTEMPT).complete().closed()
    assert choose_attempt({MAX_ATTEMPT: last}, None, "R0402", "c") == (1, "in time")
    both = {MAX_ATTEMPT: last, 1: Images().complete().closed()}
    assert choose_attempt(both, None, "R0402", "c", free=2) == (2, "in time")


def test_a_closed_verdict_never_changes():
    images = Images().image("R0402", "a", "pass")
    images.attempt.closed = True
    before = images.attempt.closing("time_limit")
    images.image("R0402", "b", "fail", "D1")
    assert images.attempt.closing("time_limit") == before
