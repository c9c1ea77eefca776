"""Which text begins: eMoE's Algorithm 1 by slack."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.moe.policy.schedule import BatchLimits, SloSlack, StepCosts, TextRequest

#: A prefill of n tokens takes n/100 s, a step 1 s; a short text has 4 tokens, a long one 20.
LENGTHS = {"short": 4, "long": 20}


def a_text(
    name: str = "a", task: str | None = "short", tokens: int = 100, arrived_s: float = 0.0, new: int = 0, **more: Any
) -> TextRequest:
    return TextRequest(name, (0,) * tokens, 40, task, arrived_s, new=[0] * new, **more)


def by_slack(rows: int = 4, tokens: int = 10_000, **options: float) -> SloSlack:
    scheduler = SloSlack(BatchLimits(rows, tokens), StepCosts(0.01, 1.0), **options)
    for task, length in LENGTHS.items():
        scheduler.profiles.record_length(a_text(task=task, new=length))
    return scheduler


def first(scheduler: SloSlack, waiting: list[TextRequest], running: list[TextRequest], now: float) -> str | None:
    text = scheduler.next_text(waiting, running, now)
    return text and text.request


def test_room_is_what_texts_may_come_to_hold_each_row_as_long_as_the_longest():
    limits = BatchLimits(rows=2, tokens=200)
    assert limits.fits([a_text(tokens=60)], a_text(tokens=60))
    assert not limits.fits([a_text(tokens=60)], a_text(tokens=61))
    assert not limits.fits([a_text(tokens=61)], a_text(tokens=1))
    assert not limits.fits([a_text(tokens=1), a_text(tokens=1)], a_text(tokens=1))


def test_the_least_slack_goes_first_whoever_came_first():
    waiting = [a_text("early", "long", slo_s=900.0), a_text("urgent", arrived_s=5.0, slo_s=12.0)]
    assert first(by_slack(), waiting, [], 5.0) == "urgent"


@pytest.mark.parametrize(("slo_s", "takes_s"), [(None, 5), (30.0, 5), (300.0, 100)])
def test_a_long_one_gets_its_turn_although_short_ones_come_for_ever(slo_s: float | None, takes_s: int):
    """Its tokens fit alone only; short ones take five steps or longer than patience, and there are always some more."""
    scheduler = by_slack(tokens=400, patience_s=60.0)
    large = a_text("large", tokens=300, slo_s=slo_s)
    waiting = [large]
    until = {a_text(f"first-{end}", tokens=10, first_s=0.0): end * takes_s // 5 for end in (2, 3, 4, 5)}
    now = 0
    while large in waiting:
        now += 1
        until = {text: end for text, end in until.items() if now < end}
        waiting += [a_text(f"{now}-{number}", tokens=10, arrived_s=float(now), slo_s=slo_s) for number in range(2)]
        while (text := scheduler.next_text(waiting, list(until), float(now))) is not None:
            waiting.remove(text)
            text.first_s = float(now)
            until[text] = now + takes_s
        assert now < 100 + 2 * takes_s
    assert now > 60


def test_nobody_begins_who_would_cost_a_running_text_its_slo():
    # Alone: 2 steps of 1 s. With the other's prefill of 4 s it would be late.
    running = [a_text("running", new=2, slo_s=4.0)]
    waiting = [a_text("other", tokens=400, slo_s=100.0)]
    assert first(by_slack(), waiting, running, 0.0) is None
    assert first(by_slack(), waiting, [], 0.0) == "other"


def test_loading_experts_of_a_task_that_is_not_running_counts():
    scheduler = by_slack()
    scheduler.profiles.record_loading("long", 50.0)
    running = [a_text("running", new=2, slo_s=30.0)]
    waiting = [a_text("other", "long", tokens=1, slo_s=500.0)]
    assert first(scheduler, waiting, running, 0.0) is None
    assert first(scheduler, waiting, [*running, a_text("same", "long", new=1)], 0.0) == "other"


def test_those_whose_slo_is_lost_wait_behind_those_who_can_make_theirs():
    waiting = [a_text("lost", slo_s=1.0), a_text("hopeful", slo_s=30.0)]
    assert first(by_slack(rows=1), waiting, [], 5.0) == "hopeful"


def test_who_waited_beyond_patience_goes_first_within_a_quarter_of_the_rows():
    scheduler = by_slack(rows=8, patience_s=60.0)
    waiting = [a_text(f"old{number}", slo_s=1.0, arrived_s=float(number)) for number in range(3)]
    waiting += [a_text(f"new{number}", arrived_s=100.0, slo_s=300.0) for number in range(6)]
    running: list[TextRequest] = []
    for expected in ("old0", "old1", "new0"):
        text = scheduler.next_text(waiting, running, 100.0)
        assert text is not None
        assert text.request == expected
        waiting.remove(text)
        text.first_s = 100.0
        running.append(text)


TEXTS = st.builds(
    a_text,
    task=st.sampled_from(["short", "long", None]),
    tokens=st.integers(1, 300),
    arrived_s=st.floats(0, 100),
    slo_s=st.none() | st.floats(0.1, 200),
)
RUNNING = st.builds(
    a_text, task=st.sampled_from(["short", None]), tokens=st.just(20), new=st.just(1), slo_s=st.none() | st.floats(1, 9)
)


@given(waiting=st.lists(TEXTS, max_size=30), running=st.lists(RUNNING, max_size=4))
def test_limits_hold_and_an_idle_engine_always_gets_somebody(waiting: list[TextRequest], running: list[TextRequest]):
    scheduler = by_slack(tokens=600)
    text = scheduler.next_text(waiting, running, 100.0)
    if text is None:
        assert running or not waiting
        return
    batch = [*running, text]
    assert text in waiting
    assert len(batch) <= 4
    assert max(each.held_tokens for each in batch) * len(batch) <= 600
    assert scheduler.next_text(waiting, running, 100.0) is text
