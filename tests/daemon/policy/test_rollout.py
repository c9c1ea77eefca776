"""Roll-outs: one step at a time, none after a failed condition, and an end with all lines new or all old."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.policy.rollout import (
    STEP_S,
    Conditions,
    Figures,
    LineReport,
    NoPlanError,
    Plan,
    Progress,
    Share,
    decide,
    must_compare,
    plan_rollout,
    wanted_numbers,
)

LINES = ("a", "b", "c", "d", "e")
PLAN = Plan(7, (("a",), ("b", "c"), ("d", "e")), dict.fromkeys(LINES, 5), Conditions(100, p95_ratio=1.5))
GOOD = LineReport(7, now=Figures(Share(2, 100), p95_ms=50.0), before=Figures(Share(20, 1000), p95_ms=50.0))
OLD = LineReport(5)


def reports(**of: LineReport) -> dict[str, LineReport]:
    return {**dict.fromkeys(LINES, OLD), **of}


def test_the_canary_alone_has_it_until_its_conditions_hold():
    start = Progress(0, 0.0)
    assert wanted_numbers(PLAN, start) == {"a": 7, "b": 5, "c": 5, "d": 5, "e": 5}
    assert decide(PLAN, start, reports(), 1.0) == replace(start, waits="for a to take it")
    few = replace(GOOD, now=Figures(Share(1, 99)))
    assert decide(PLAN, start, reports(a=few), 1.0).waits == "for a to judge 100 images (99 so far)"
    assert decide(PLAN, replace(start, waits="for a"), reports(a=GOOD), 9.0) == Progress(1, 9.0)


def test_the_last_step_ends_it_and_a_line_that_comes_back_late_is_waited_for():
    last = Progress(2, 0.0)
    done = dict.fromkeys(LINES, GOOD)
    assert decide(PLAN, last, done, 1.0) == replace(last, state="all_new")
    assert decide(PLAN, last, {**done, "e": OLD}, 1.0).waits == "for e to take it"
    back = decide(PLAN, last, {**done, "e": OLD}, STEP_S + 1)
    assert back == last.back("step 3 took longer than 7 days: it waited for e to take it", STEP_S + 1)
    assert wanted_numbers(PLAN, back) == PLAN.before
    assert decide(PLAN, back, {**dict.fromkeys(LINES, OLD), "c": GOOD}, 1e9).waits == "for c to go back"
    assert decide(PLAN, back, dict.fromkeys(LINES, OLD), 1e9) == replace(back, state="all_old")


def test_it_ends_all_old_only_after_lines_that_may_still_be_taking_it_have_reported_again():
    back = Progress(1, 0.0).back("stopped by anna", 1.0)
    taking = replace(OLD, may_be_taking=True)
    assert decide(PLAN, back, reports(b=taking), 2.0).waits == "for b to go back"
    assert decide(PLAN, back, reports(b=replace(GOOD, may_be_taking=True)), 2.0).waits == "for b to go back"
    assert decide(PLAN, back, reports(d=taking), 2.0).state == "all_old"  # it was never to take it
    assert decide(PLAN, back, reports(), 2.0).state == "all_old"


@pytest.mark.parametrize(
    ("conditions", "figures", "reason"),
    [
        ({"p95_ratio": 1.5}, Figures(Share(2, 100), p95_ms=76.0), "95 % of its images take up to 76 ms, before 50 ms"),
        ({"fail_change": 0.0}, Figures(Share(30, 100)), "21.9% to 39.6% of its images fail, before 1.3% to 3.1%"),
        ({"fail_change": 0.0}, Figures(Share(0, 4000)), "0.0% to 0.1% of its images fail, before 1.3% to 3.1%"),
        ({"escapes": 0.01}, Figures(Share(2, 100), escapes=Share(9, 100)), "9 escapes in 100 reviewed"),
        ({"false_calls": 0.1}, Figures(Share(2, 100), false_calls=Share(60, 90)), "60 false calls in 90 reviewed"),
        ({"agreement": 0.9}, Figures(Share(2, 9), agreed=Share(2, 9)), "2 of 9 answers are as before, less than 0.9"),
    ],
)
def test_a_condition_that_certainly_fails_rolls_back(conditions: dict[str, float], figures: Figures, reason: str):
    plan = replace(PLAN, conditions=Conditions(100, **conditions))
    after = decide(plan, Progress(0, 0.0), reports(a=replace(GOOD, now=figures)), 1.0)
    assert after.direction == "back"
    assert reason in (after.reason or "")


def test_too_few_reviews_are_waited_for_and_enough_of_them_let_it_go_on():
    plan = replace(PLAN, conditions=Conditions(100, escapes=0.01))
    few = replace(GOOD, now=Figures(Share(2, 100), escapes=Share(0, 50)))
    assert (decide(plan, Progress(0, 0.0), reports(a=few), 1.0).waits or "").startswith("for reviews at a")
    many = replace(GOOD, now=Figures(Share(2, 100), escapes=Share(0, 400)))
    assert decide(plan, Progress(0, 0.0), reports(a=many), 1.0) == Progress(1, 1.0)


def test_it_waits_until_enough_answers_of_the_versions_before_agree():
    plan = replace(PLAN, conditions=Conditions(100, agreement=0.9))
    few = replace(GOOD, now=Figures(Share(2, 100), agreed=Share(0, 0)))
    reason = "for more answers of the versions before at a: 0 of 0 are the same"
    assert decide(plan, Progress(0, 0.0), reports(a=few), 1.0).waits == reason
    for agreed in (Share(99, 100), None):  # None: no expert changed
        many = replace(GOOD, now=Figures(Share(2, 100), agreed=agreed))
        assert decide(plan, Progress(0, 0.0), reports(a=many), 1.0) == Progress(1, 1.0)


@pytest.mark.parametrize("asked", [{"p95_ratio": 1.5}, {"fail_change": 0.1}])
def test_a_line_that_judged_nothing_before_has_nothing_to_compare_with_and_is_no_pass(asked: dict[str, float]):
    plan = replace(PLAN, conditions=Conditions(100, **asked))
    new = reports(a=replace(GOOD, before=Figures()))
    reason = "for images of the 30 days before at a to compare with: none"
    assert decide(plan, Progress(0, 0.0), new, 1.0).waits == reason
    late = decide(plan, Progress(0, 0.0), new, STEP_S + 1)
    assert (late.direction, late.reason) == ("back", f"step 1 took longer than 7 days: it waited {reason}")
    assert decide(replace(PLAN, conditions=Conditions(100)), Progress(0, 0.0), new, 1.0) == Progress(1, 1.0)


def test_only_lines_that_have_the_release_compare_answers_and_only_where_a_person_asked():
    asking = replace(PLAN, conditions=Conditions(100, agreement=0.9))
    start = Progress(0, 0.0)
    assert [must_compare(asking, start, line, 7) for line in ("a", "b", "f")] == [True, False, False]
    assert not must_compare(asking, start, "a", 5)  # it has not taken it yet
    assert not must_compare(asking, replace(start, direction="back"), "a", 7)
    assert not must_compare(PLAN, start, "a", 7)


def test_a_line_that_refuses_it_rolls_all_back():
    refusing = LineReport(5, problem="memory is too small")
    after = decide(PLAN, Progress(1, 0.0), reports(a=GOOD, b=refusing), 1.0)
    assert after == Progress(1, 1.0, "back", "b refused it: memory is too small")


_FIGURES = st.builds(
    lambda failed, of, p95: Figures(Share(min(failed, of), of), p95_ms=p95),
    st.integers(0, 60),
    st.integers(0, 200),
    st.floats(10.0, 100.0),
)


@given(st.data())
def test_any_course_goes_step_by_step_never_on_after_a_failure_and_ends(data: st.DataObject):
    """Lines answer late, not at all for a while, refuse, or judge badly, in any order; in the end they answer."""
    progress, now = Progress(0, 0.0), 0.0
    numbers, figures, problems = dict(PLAN.before), dict.fromkeys(LINES, Figures()), dict[str, str]()
    silent: frozenset[str] = frozenset()
    known: dict[str, LineReport] = {}
    for turn in range(60):
        targets = wanted_numbers(PLAN, progress)
        allowed = {line for step in PLAN.steps[: progress.step + 1] for line in step}
        assert {line for line, number in targets.items() if number == 7} <= allowed
        if turn < 40:
            silent = data.draw(st.frozensets(st.sampled_from(LINES)))
            if data.draw(st.integers(0, 30)) == 0:
                problems[data.draw(st.sampled_from(LINES))] = "no room"
            figures[data.draw(st.sampled_from(LINES))] = data.draw(_FIGURES)
        else:
            silent, figures = frozenset(), dict.fromkeys(LINES, Figures(Share(5, 200), p95_ms=40.0))
        for line in LINES:  # a line that is cut off keeps what it has, whatever is wanted_numbers
            if line not in silent:
                if line not in problems or targets[line] == PLAN.before[line]:
                    numbers[line] = targets[line]
                problem = problems.get(line) if numbers[line] != targets[line] else None
                known[line] = LineReport(numbers[line], problem, figures[line], GOOD.before)
        assert set(numbers.values()) <= {5, 7}
        now += data.draw(st.floats(0.0, STEP_S / 2)) if turn < 40 else 10.0
        after = decide(PLAN, progress, known, now)
        if after.step != progress.step:
            assert after.direction == progress.direction == "forward"
            assert after.step == progress.step + 1
            for line in allowed:
                assert known[line].number == 7
                assert known[line].now.failed.of >= 100
        if after.state != "running":
            assert set(numbers.values()) == {7 if after.state == "all_new" else 5}
            return
        assert (progress.direction, after.direction) != ("back", "forward")
        progress = after
    raise AssertionError(f"it did not end: {progress}, {known}")


def test_the_canary_comes_first_then_two_lines_at_a_time_without_those_that_have_it():
    plan = plan_rollout(7, 5, "c", {"a": 5, "b": 6, "c": 5, "d": 7, "e": 5}, Conditions(100))
    assert plan.steps == (("c",), ("a", "b"), ("e",))
    assert plan.before == {"a": 5, "b": 6, "c": 5, "e": 5}


@pytest.mark.parametrize(
    ("back_to", "canary", "reason"),
    [
        (5, "f", "f has no release of this name, so there is none to go back to; lines that have one: a, b"),
        (5, "b", "b has number 7 already: name another canary"),
        (6, "a", "number 7 allows going back to 6, and a has 5: pull 6 there first"),
        (None, "a", "number 7 is the first of its name and allows no way back"),
    ],
)
def test_a_roll_out_that_could_not_go_back_does_not_begin(back_to: int | None, canary: str, reason: str):
    with pytest.raises(NoPlanError, match=reason):
        plan_rollout(7, back_to, canary, {"a": 5, "b": 7}, Conditions(100))
