"""Precision, recall and average precision of boxes on labelled images."""

import numpy as np

from tools.training.held_out import ImageBoxes, match_boxes

BOXES = np.array([[0, 0, 10, 10], [1, 0, 11, 10], [50, 50, 60, 60]], np.float32)


def an_answer() -> ImageBoxes:
    """Two boxes of one place, the second one surer, and one elsewhere."""
    return ImageBoxes(BOXES, np.array([0, 1, 0]), np.array([0.6, 0.8, 0.3], np.float32))


def test_of_boxes_at_one_place_the_surest_stays() -> None:
    kept = an_answer().one_per_place(0.33)
    assert kept.classes.tolist() == [1, 0]
    assert kept.boxes.tolist() == BOXES[[1, 2]].tolist()
    assert kept.confidences.tolist() == np.array([0.8, 0.3], np.float32).tolist()
    assert len(an_answer().one_per_place(0.9).classes) == 3
    nothing = ImageBoxes(BOXES[:0], np.zeros(0, np.int64), np.zeros(0, np.float32))
    assert len(nothing.one_per_place(0.33).classes) == 0


def test_a_class_is_counted_alone() -> None:
    truth = np.array([[0, 0, 10, 10, 1], [50, 50, 60, 60, 0], [80, 80, 90, 90, 0]], np.float32)
    matched = match_boxes([an_answer()], [truth], 0.33)
    first, second = (matched.of_class(kind).counts(0.25) for kind in (0, 1))
    assert (first.hits, first.false, first.missed) == (1, 1, 1)
    assert (second.hits, second.false, second.missed) == (1, 0, 0)
