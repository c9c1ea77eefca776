"""Raw pixels in a file that viewers open: written and read in one place."""

import io

import pytest
from PIL import Image

from daemon.storage.image_archive import as_sent, raw_header


@pytest.mark.parametrize(("shape", "suffix"), [((2, 3, 1), ".pgm"), ((2, 3, 3), ".ppm")])
def test_what_a_camera_sent_comes_out_again_and_a_viewer_shows_it(shape: tuple[int, int, int], suffix: str) -> None:
    payload = bytes(range(10, 10 + shape[0] * shape[1] * shape[2]))  # a line end and white space among the pixels
    header, name = raw_header(shape)
    assert name == suffix
    assert as_sent(header + payload, suffix) == (payload, shape)
    with Image.open(io.BytesIO(header + payload)) as picture:
        assert picture.tobytes() == payload
        assert picture.size == (shape[1], shape[0])


def test_other_files_are_what_was_sent() -> None:
    assert as_sent(b"P5\n1 1\n255\nx", ".jpg") == (b"P5\n1 1\n255\nx", None)


@pytest.mark.parametrize("content", [b"", b"P5\n", b"P5\nx y\n255\n", b"P5\n3\n255\n123"])
def test_a_damaged_header_is_an_error_and_no_picture(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it is that cannot be read
        as_sent(content, ".pgm")
