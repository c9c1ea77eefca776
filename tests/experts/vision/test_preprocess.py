import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experts.vision.frameworks import ultralytics
from experts.vision.preprocess import to_square
from tests.experts.pictures import a_picture

SIDES = st.integers(1, 300)


@settings(max_examples=60, deadline=None)
@given(width=SIDES, height=SIDES, size=st.sampled_from([32, 96, 160]))
@example(width=3000, height=1, size=64)
@example(width=160, height=160, size=160)
def test_a_letterbox_is_that_of_ultralytics_to_the_last_pixel(width: int, height: int, size: int):
    ultralytics()
    from ultralytics.data.augment import LetterBox

    picture = a_picture(width, height)
    expected = LetterBox(size, auto=False, scaleup=True, center=True)(image=picture)
    np.testing.assert_array_equal(to_square(picture, "detect", size), expected)


def test_a_classifier_image_fills_the_square_and_shrinks_by_averaging():
    stripes = np.zeros((100, 100, 3), dtype=np.uint8)
    stripes[:, ::2] = 200
    square = to_square(stripes, "classify", 50)
    assert square.shape == (50, 50, 3)
    assert np.ptp(square) <= 1
    assert to_square(a_picture(20, 200), "classify", 64).shape == (64, 64, 3)
