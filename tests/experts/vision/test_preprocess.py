import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experts.vision.frameworks import ultralytics
from experts.vision.preprocess import place, to_square
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


@settings(max_examples=60, deadline=None)
@given(width=SIDES, height=SIDES, size=st.sampled_from([32, 96, 160]), seed=st.integers(0, 1000))
def test_boxes_go_back_to_stored_pixels_as_ultralytics_does(width: int, height: int, size: int, seed: int):
    ultralytics()
    from ultralytics.utils.ops import scale_boxes

    box = torch.rand(1, 4, generator=torch.Generator().manual_seed(seed)) * size
    expected = scale_boxes((size, size), box.clone(), (height, width))[0].numpy()
    stored_box = place(width, height, "detect", size).to_stored(tuple(box[0].tolist()))
    np.testing.assert_allclose(stored_box, expected, atol=0.01, rtol=1e-4)


def test_a_classifier_image_fills_the_square_and_shrinks_by_averaging():
    stripes = np.zeros((100, 100, 3), dtype=np.uint8)
    stripes[:, ::2] = 200
    square = to_square(stripes, "classify", 50)
    assert square.shape == (50, 50, 3)
    assert np.ptp(square) <= 1
    assert to_square(a_picture(20, 200), "classify", 64).shape == (64, 64, 3)
