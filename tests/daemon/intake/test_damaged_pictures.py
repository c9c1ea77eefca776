"""Damaged files of every format that cameras send, through intake's check and the decoder, as on the line."""

import random
import resource
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from daemon.intake.payload_scan import ImageHeaderError, check_image
from daemon.records import Pixels
from experts.errors import ImageError
from experts.vision import tiff
from experts.vision.preprocess import decode
from tests.experts.samples import a_picture, encoded

PICTURE = a_picture(160, 120)
COLOUR = Image.fromarray(PICTURE)
CUTS = 20


def pixels_of(payload: bytes, max_pixels: int = 64_000_000) -> np.ndarray | None:
    """(H, W, 3) as an expert would get them, None for a picture that is refused at intake or by the decoder."""
    try:
        check_image(payload, Pixels(), max_pixels)
        return decode(payload, "image", None, max_pixels)
    except (ImageHeaderError, ImageError):
        return None


JPEGS = {
    "4:2:0": encoded(COLOUR, "JPEG", quality=85),
    "4:4:4": encoded(COLOUR, "JPEG", quality=95, subsampling=0),
    "grey": encoded(COLOUR.convert("L"), "JPEG"),
    "progressive": encoded(COLOUR, "JPEG", progressive=True),
    "restart markers": encoded(COLOUR, "JPEG", restart_marker_rows=1),
    "CMYK": encoded(COLOUR.convert("CMYK"), "JPEG"),
}
TIFFS = {
    "uncompressed": encoded(COLOUR, "TIFF"),
    "strips": encoded(COLOUR, "TIFF", tiffinfo={278: 16}),
    "LZW": encoded(COLOUR, "TIFF", compression="tiff_lzw"),
    "deflate": encoded(COLOUR, "TIFF", compression="tiff_adobe_deflate"),
    "packbits": encoded(COLOUR, "TIFF", compression="packbits"),
    "JPEG": encoded(COLOUR, "TIFF", compression="jpeg"),
    "16 bits": encoded(Image.fromarray(PICTURE[..., 0].astype(np.uint16) * 257), "TIFF"),
    "BigTIFF": encoded(COLOUR, "TIFF", big_tiff=True),
}
BMPS = {"24 bits": encoded(COLOUR, "BMP"), "palette": encoded(COLOUR.quantize(64), "BMP")}
WHOLE = [*JPEGS.values(), *TIFFS.values(), *BMPS.values(), encoded(COLOUR), encoded(COLOUR.quantize(64))]


def cuts(first: int, size: int) -> Iterator[int]:
    """Yield places that leave out at least three bytes of `size`: the last ones may hold no pixels."""
    yield from np.linspace(first, size - 3, CUTS).astype(int).tolist()


def test_whole_pictures_are_taken():
    assert all(pixels_of(payload) is not None for payload in WHOLE)


@pytest.mark.parametrize("name", JPEGS)
def test_a_jpeg_that_was_cut_and_closed_again_is_refused(name: str):
    payload = JPEGS[name]
    data_at = payload.index(b"\xff\xda") + 14
    for at in cuts(data_at, len(payload) - 2):
        assert pixels_of(payload[:at] + b"\xff\xd9") is None, f"cut at {at} of {len(payload)}"
        assert pixels_of(payload[:at]) is None


def test_a_progressive_jpeg_without_its_last_scans_is_refused():
    payload = JPEGS["progressive"]
    scans = [at for at in range(len(payload)) if payload[at : at + 2] == b"\xff\xda"]
    assert len(scans) > 5
    for at in scans[1:]:
        assert pixels_of(payload[:at] + b"\xff\xd9") is None


def test_a_png_that_was_cut_and_closed_again_is_refused():
    payload = encoded(COLOUR)
    at = payload.index(b"IDAT")
    (size,) = struct.unpack_from(">I", payload, at - 4)
    for length in cuts(1, size):
        body = b"IDAT" + payload[at + 4 : at + 4 + length]
        closed = struct.pack(">I", length) + body + struct.pack(">I", zlib.crc32(body)) + payload[-12:]
        assert pixels_of(payload[: at - 4] + closed) is None, f"{length} of {size} bytes"


def values_at(payload: bytes, tag: int) -> tuple[str, int]:
    """Return the form and place of the values of a tag of a little-endian TIFF."""
    big = payload[2] == 43
    (at,) = struct.unpack_from("<Q" if big else "<I", payload, 8 if big else 4)
    at += 8 if big else 2
    while struct.unpack_from("<H", payload, at)[0] != tag:
        at += 20 if big else 12
    kind, count = struct.unpack_from("<HQ" if big else "<HI", payload, at + 2)
    form = {3: "H", 4: "I", 16: "Q"}[kind]
    at += 12 if big else 8
    if struct.calcsize(form) * count > (8 if big else 4):
        (at,) = struct.unpack_from("<Q" if big else "<I", payload, at)
    return form, at


@pytest.mark.parametrize("name", TIFFS)
def test_a_tiff_whose_strip_was_cut_is_refused_or_whole(name: str):
    payload = TIFFS[name]
    whole = pixels_of(payload)
    offset, size = tiff.parts(payload, tiff.first_page(payload))[0]
    form, at = values_at(payload, 279)
    for length in cuts(1, size):
        cut = bytearray(payload)
        cut[offset + length : offset + size] = bytes(size - length)
        struct.pack_into("<" + form, cut, at, length)
        image = pixels_of(bytes(cut))
        assert image is None or np.array_equal(image, whole), f"{length} of {size} bytes"
        assert image is None or length > size * 0.98  # all pixels are there; what is missing is a checksum


@pytest.mark.parametrize("name", [*TIFFS, *BMPS])
def test_a_picture_that_claims_more_rows_than_it_has_is_refused(name: str):
    payload = (TIFFS | BMPS)[name]
    form, at = ("i", 22) if name in BMPS else values_at(payload, 257)
    for rows in (121, 128, 240, 4000):
        taller = bytearray(payload)
        struct.pack_into("<" + form, taller, at, rows)
        assert pixels_of(bytes(taller)) is None, f"{rows} rows"


def test_a_run_length_encoded_bmp_is_refused_since_its_rows_may_be_missing():
    header = struct.pack("<IiiHHIIiiII", 40, 16, 16, 1, 8, 1, 2, 0, 0, 256, 0) + bytes(1024)
    payload = b"BM" + struct.pack("<IHHI", 14 + len(header) + 2, 0, 0, 14 + len(header)) + header + b"\0\1"
    with pytest.raises(ImageHeaderError, match="run-length"):
        check_image(payload, Pixels(), 1000)
    with pytest.raises(ImageError, match="run-length"):
        decode(payload, "image")


def test_flipped_bits_end_in_a_picture_of_the_claimed_size_or_in_a_refusal():
    chance = random.Random(0)
    for payload in WHOLE:
        for _ in range(60):
            changed = bytearray(payload)
            for _ in range(chance.choice((1, 3))):
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
            image = pixels_of(bytes(changed))
            if image is not None:
                facts = check_image(bytes(changed), Pixels(), 64_000_000)
                assert image.shape == (facts.height, facts.width, 3)


def test_a_fax_tiff_is_refused_since_its_rows_may_be_missing():
    payload = encoded(COLOUR.convert("1"), "TIFF", compression="group4")
    with pytest.raises(ImageHeaderError, match="compression 4"):
        check_image(payload, Pixels(), 64_000_000)


def test_a_tiff_whose_size_is_of_a_signed_type_is_measured_as_decoders_do():
    payload = bytearray(TIFFS["LZW"])
    for tag in (256, 257):
        _, at = values_at(bytes(payload), tag)
        struct.pack_into("<HII", payload, at - 6, 9, 1, 30_000)
    with pytest.raises(ImageHeaderError) as refused:
        check_image(bytes(payload), Pixels(), 64_000_000)
    assert refused.value.code == "too_large"
    with pytest.raises(ImageError, match="more than 64000000"):
        decode(bytes(payload), "image", max_pixels=64_000_000)


def test_a_tiff_that_says_its_size_twice_is_refused():
    payload = bytearray(TIFFS["LZW"])
    _, at = values_at(bytes(payload), 262)
    struct.pack_into("<HHII", payload, at - 8, 257, 4, 1, 60_000)
    with pytest.raises(ImageHeaderError, match="twice"):
        check_image(bytes(payload), Pixels(), 64_000_000)


FUZZ = """
import random, resource, sys
from tests.daemon.intake.test_damaged_pictures import BMPS, TIFFS, encoded, COLOUR, pixels_of
chance = random.Random(int(sys.argv[1]))
whole = [*TIFFS.values(), *BMPS.values(), encoded(COLOUR), encoded(COLOUR, "JPEG")]
for payload in whole:
    pixels_of(payload, 20_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
taken = 0
for number in range(6000):
    payload = bytearray(chance.choice(whole))
    end = len(payload) if payload[:2] in (b"II", b"MM") and chance.random() < 0.7 else 100
    start = max(0, end - 300) if end > 100 else 0
    for _ in range(chance.choice((1, 2, 4))):
        payload[chance.randrange(start, end)] = chance.choice((0, 1, 9, 16, 17, 127, 128, 255, chance.randrange(256)))
    taken += pixels_of(bytes(payload), 20_000) is not None
print(taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_no_header_makes_a_decoder_take_more_memory_than_the_largest_picture_needs():
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0
    run = subprocess.run([sys.executable, "-c", FUZZ, "1"], capture_output=True, text=True, check=True, timeout=300)
    taken, grown_kib = map(int, run.stdout.split())
    assert taken > 500  # headers that change nothing that matters
    assert grown_kib < 64 * 1024  # 20,000 pixels are 60 KB
