"""Checks of an image that intake makes without decoding it (PROTOCOL.md, inspect)."""

import struct
import time
from typing import Any

import cv2
import numpy as np
import pytest

from experts.errors import ImageHeaderError
from experts.vision.structure import check_structure
from tests.daemon.intake.test_damaged_pictures import strips, written_tiff
from tests.daemon.wire.wire_parts import a_png

MAX_PIXELS = 64_000_000


def a_picture(height: int = 30, width: int = 40, channels: int = 3, dtype: type = np.uint8) -> np.ndarray[Any, Any]:
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.random.default_rng(1).integers(0, np.iinfo(dtype).max, shape).astype(dtype)


def encoded(extension: str, picture: np.ndarray[Any, Any], *options: int) -> bytes:
    done, data = cv2.imencode(extension, picture, list(options))
    assert done
    return data.tobytes()


def size_of(payload: bytes) -> tuple[int, int]:
    return check_structure(payload, MAX_PIXELS)


def code_of(payload: bytes, raw_shape: tuple[int, int, int] | None = None) -> str:
    with pytest.raises(ImageHeaderError) as caught:
        check_structure(payload, MAX_PIXELS, raw_shape=raw_shape)
    return caught.value.code


JPEG = encoded(".jpg", a_picture())
PROGRESSIVE = encoded(".jpg", a_picture(), cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
RESTARTS = encoded(".jpg", a_picture(), cv2.IMWRITE_JPEG_RST_INTERVAL, 1)
PNG = encoded(".png", a_picture())
BMP = encoded(".bmp", a_picture())
TIFF = encoded(".tiff", a_picture())


@pytest.mark.promise(
    "Prepared files",
    "images | sizes that fill the memory, damaged data | kinds of files are an allow-list; sizes and "
    "headers are checked at intake and again before an image is decoded, which takes at most 15 "
    "bytes a pixel; an image that cannot be decoded completely is `unknown`",
)
@pytest.mark.parametrize(
    "payload",
    [
        JPEG,
        PROGRESSIVE,
        RESTARTS,
        encoded(".jpg", a_picture(channels=1)),
        PNG,
        encoded(".png", a_picture(channels=1)),
        encoded(".png", a_picture(channels=4)),
        encoded(".png", a_picture(dtype=np.uint16)),
        encoded(".png", a_picture(channels=1), cv2.IMWRITE_PNG_BILEVEL, 1),
        BMP,
        encoded(".bmp", a_picture(channels=1)),
        TIFF,
        encoded(".tiff", a_picture(dtype=np.uint16)),
        encoded(".tiff", a_picture(channels=1), cv2.IMWRITE_TIFF_COMPRESSION, 1),
    ],
)
def test_a_whole_image_has_the_size_in_its_header(payload: bytes) -> None:
    assert size_of(payload) == (40, 30)
    assert size_of(payload + b"bytes behind the end\xff\xd8\xff") == (40, 30)


@pytest.mark.parametrize("payload", [JPEG, PROGRESSIVE, RESTARTS, PNG], ids=["jpeg", "progressive", "restarts", "png"])
def test_a_jpeg_or_png_cut_anywhere_is_bad(payload: bytes) -> None:
    for length in range(len(payload)):
        assert code_of(payload[:length]) == "bad_image"


@pytest.mark.parametrize("payload", [BMP, TIFF], ids=["bmp", "tiff"])
def test_a_bmp_or_tiff_cut_before_its_last_rows_is_bad(payload: bytes) -> None:
    for length in range(0, len(payload) * 3 // 4, 7):
        assert code_of(payload[:length]) == "bad_image"


@pytest.mark.parametrize(
    "payload", [b"x", b"GIF89a" + bytes(100), b"RIFF\0\0\0\0WEBPVP8 " + bytes(50), b"\xff\xd8", bytes(1000)]
)
def test_another_format_is_bad(payload: bytes) -> None:
    assert code_of(payload) == "bad_image"


def test_a_png_of_60000_by_60000_is_refused_by_its_header() -> None:
    assert code_of(a_png(60_000, 60_000)) == "too_large"
    assert code_of(a_png(60_000, 60_000)[:33]) == "too_large"
    assert code_of(a_png(2**31 - 1, 2**31 - 1)) == "too_large"


def test_a_jpeg_that_declares_too_many_pixels_is_too_large() -> None:
    at = JPEG.index(b"\xff\xc0")
    assert code_of(JPEG[: at + 5] + struct.pack(">HH", 60_000, 60_000) + JPEG[at + 9 :]) == "too_large"


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0), (0, 60_000)])
def test_an_image_without_pixels_is_bad(size: tuple[int, int]) -> None:
    assert code_of(a_png(*size)) == "bad_image"
    at = JPEG.index(b"\xff\xc0")
    assert code_of(JPEG[: at + 5] + struct.pack(">HH", *size) + JPEG[at + 9 :]) == "bad_image"
    assert code_of(BMP[:18] + struct.pack("<ii", *size) + BMP[26:]) == "bad_image"
    assert code_of(b"", (*size, 1)) == "bad_image"


def test_headers_without_image_data_are_bad() -> None:
    assert code_of(b"\xff\xd8\xff\xd9") == "bad_image"
    assert code_of(JPEG[: JPEG.index(b"\xff\xda")] + b"\xff\xd9") == "bad_image"
    without_idat = PNG[:33] + PNG[-12:]
    assert code_of(without_idat) == "bad_image"


def test_the_end_marker_of_a_thumbnail_does_not_end_the_jpeg() -> None:
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2 + len(JPEG)) + JPEG
    with_thumbnail = JPEG[:2] + thumbnail + JPEG[2:]
    assert size_of(with_thumbnail) == (40, 30)
    assert code_of(with_thumbnail[:-2]) == "bad_image"


def test_a_bmp_may_run_from_the_top_down_and_lack_its_last_padding() -> None:
    assert size_of(BMP[:22] + struct.pack("<i", -30) + BMP[26:]) == (40, 30)
    old = b"BM" + struct.pack("<IHHI", 0, 0, 0, 26) + struct.pack("<IHHHH", 12, 3, 2, 1, 24) + bytes(12 + 9)
    assert size_of(old) == (3, 2)
    assert code_of(old[:-1]) == "bad_image"


@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])
def test_tiffs_of_both_byte_orders_and_sizes_are_read(order: str, big: bool) -> None:
    parts = [strip.tobytes() for strip in strips()]
    assert size_of(written_tiff(parts, order, big=big)) == (160, 120)
    assert code_of(written_tiff(parts, order, big=big)[:-1]) == "bad_image"
    assert code_of(written_tiff([*parts[:-1], b""], order, big=big)) == "bad_image"
    assert code_of(written_tiff(parts, order, big=big, t256=0)) == "bad_image"


def test_raw_pixels_must_fit_their_shape() -> None:
    assert check_structure(bytes(24), 8, raw_shape=(2, 4, 3)) == (4, 2)
    assert code_of(bytes(23), (2, 4, 3)) == "bad_image"
    assert code_of(bytes(25), (2, 4, 3)) == "bad_image"
    assert code_of(bytes(24), (60_000, 60_000, 1)) == "too_large"


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff\xd8" + b"\xff" * 8_000_000,
        b"\xff\xd8" + b"\xff\x00" * 4_000_000,
        b"\xff\xd8\xff" + b"\xe0\x00\x02\xff" * 2_000_000,
        b"\xff\xd8" + b"\xff\xd0" * 4_000_000,
        a_png(8, 8)[:33] + b"\0\0\0\0tEXt\0\0\0\0" * 600_000,
        b"II\x2a\0\x08\0\0\0" + b"\xff\xff" + bytes(8_000_000),
    ],
    ids=["fill", "stuffing", "segments", "restarts", "chunks", "tags"],
)
def test_hostile_bytes_cost_little(payload: bytes) -> None:
    began = time.process_time()
    assert code_of(payload) == "bad_image"
    assert time.process_time() - began < 2.0  # linear work takes some hundredths; quadratic would take hours
