"""Drift: another distribution is told from chance, and another mix of labels from another camera."""

import numpy as np
import pytest

from experts.drift import BINS, compare, drift, grade, histogram, histograms

SURE, LESS = (30.0, 1.0), (9.0, 3.0)


def confidences(seed: int, count: int, shape: tuple[float, float] = SURE) -> list[float]:
    return np.random.default_rng(seed).beta(*shape, count).tolist()


def test_the_index_of_a_distribution_with_itself_is_zero_and_grows_with_the_distance():
    baseline = histogram(confidences(0, 1000))
    values = [drift(baseline, histogram(confidences(1, 1000, shape))) for shape in (SURE, (20.0, 1.5), LESS)]
    assert drift(baseline, baseline) == pytest.approx(0.0)
    assert [grade(value) for value in values[::2]] == ["stable", "drifted"]
    assert values == sorted(values)


def test_more_defects_than_in_training_are_no_drift():
    training = histograms([("ok", c) for c in confidences(0, 900)] + [("bad", c) for c in confidences(1, 400, LESS)])
    recent = histograms([("ok", c) for c in confidences(2, 300)] + [("bad", c) for c in confidences(3, 700, LESS)])
    drift_now = compare(training, recent)
    assert (drift_now.grade, drift_now.answers, drift_now.held_out) == ("stable", 1000, 1300)
    assert (
        grade(drift([*map(sum, zip(*training.values(), strict=True))], [*map(sum, zip(*recent.values(), strict=True))]))
        != "stable"
    )


def test_another_light_is_drift():
    training = histograms(("ok", c) for c in confidences(0, 500))
    assert compare(training, histograms(("ok", c) for c in confidences(1, 1000, LESS))).grade == "drifted"


@pytest.mark.parametrize(("held_out", "answers"), [(20, 1000), (1000, 20), (0, 1000), (1000, 0), (0, 5)])
def test_too_few_answers_are_said_and_never_an_alarm(held_out: int, answers: int):
    training = histograms(("ok", c) for c in confidences(0, held_out, LESS))
    for seed in range(20):
        drift_now = compare(training, histograms(("ok", c) for c in confidences(seed, answers, LESS)))
        assert drift_now.grade == "too few"
        assert drift_now.lacks == ("images held out" if answers == 1000 else "answers")


def test_chance_alone_is_hardly_ever_called_drift():
    grades = []
    for seed in range(100):
        training = histograms(("ok", c) for c in confidences(seed, 300, LESS))
        grades.append(compare(training, histograms(("ok", c) for c in confidences(1000 + seed, 1000, LESS))).grade)
    assert grades.count("drifted") == 0
    assert grades.count("stable") > 90


def test_a_line_of_many_experts_that_saw_few_parts_has_none_that_drifts_by_chance():
    """Three of 34 less sure answers in training and none of 30 now: an index of 0.16, and nothing has changed."""
    training, recent = [0] * BINS, [0] * BINS
    training[18:], recent[18:] = [3, 31], [0, 30]
    drift_now = compare({"ok": training}, {"ok": recent})
    assert drift_now.value > 0.1
    assert (drift_now.grade, drift_now.value < drift_now.chance) == ("stable", True)
    random = np.random.default_rng(5)
    grades = []
    for _ in range(2000):
        less = random.binomial([36, 60], random.choice([0.03, 0.1, 0.3]))
        training[18:], recent[18:] = [less[0], 36 - less[0]], [less[1], 60 - less[1]]
        grades.append(compare({"ok": training}, {"ok": recent}).grade)
    assert sum(grade not in ("stable", "too few") for grade in grades) <= 5
