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

from experts.errors import ImageError, ImageHeaderError
from experts.vision import tiff
from experts.vision.preprocess import decode
from experts.vision.structure import check_structure
from tests.experts.pictures import a_chunk, a_picture, a_png, encoded

pytestmark = pytest.mark.not_fast("starts processes")

PICTURE = a_picture(160, 120)
COLOUR = Image.fromarray(PICTURE)
CUTS = 20


def pixels_of(payload: bytes, max_pixels: int = 64_000_000) -> np.ndarray | None:
    """(H, W, 3) as an expert would get them, None for a picture that is refused at intake or by the decoder."""
    try:
        check_structure(payload, max_pixels)
        return decode(payload, "image", None, max_pixels)
    except ImageError:  # ImageHeaderError is one
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


def refused(payload: bytes, match: str) -> None:
    """Neither intake's check nor the decoder takes it."""
    for refuse in (lambda: check_structure(payload, 64_000_000), lambda: decode(payload, "image")):
        with pytest.raises(ImageError, match=match):
            refuse()


def cuts(first: int, size: int) -> Iterator[int]:
    """Yield places that leave out at least three bytes of `size`: the last ones may hold no pixels."""
    yield from np.linspace(first, size - 3, CUTS).astype(int).tolist()


@pytest.mark.promise(
    "Containment",
    "A damaged image whose pixels are not all there is never judged: it is refused or `unknown`, whatever its format",
)
def test_whole_pictures_are_taken():
    assert all(pixels_of(payload) is not None for payload in WHOLE)


@pytest.mark.parametrize("name", JPEGS)
def test_a_jpeg_that_was_cut_and_closed_again_is_refused(name: str):
    payload = JPEGS[name]
    data_at = payload.index(b"\xff\xda") + 14
    for at in cuts(data_at, len(payload) - 2):
        assert pixels_of(payload[:at] + b"\xff\xd9") is None, f"cut at {at} of {len(payload)}"
        assert pixels_of(payload[:at]) is None


def test_a_png_that_was_cut_and_closed_again_is_refused():
    payload = encoded(COLOUR)
    at = payload.index(b"IDAT")
    (size,) = struct.unpack_from(">I", payload, at - 4)
    for length in cuts(1, size):
        closed = a_chunk(b"IDAT", payload[at + 4 : at + 4 + length]) + payload[-12:]
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
    refused(payload, "run-length")


def test_flipped_bits_end_in_a_picture_of_the_claimed_size_or_in_a_refusal():
    chance = random.Random(0)
    for payload in WHOLE:
        for _ in range(60):
            changed = bytearray(payload)
            for _ in range(chance.choice((1, 3))):
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
            image = pixels_of(bytes(changed))
            if image is not None:
                width, height = check_structure(bytes(changed), 64_000_000)
                assert image.shape == (height, width, 3)


# Kinds of files that a decoder fills where pixels are missing, without a warning


def an_animated_png(frame: tuple[int, int], share: float = 0.5, *, counted: bool = True) -> bytes:
    """A still image of 160 × 120 of which `share` is there, and one frame of another size."""
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in PICTURE))
    control = a_chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, *frame, 0, 0, 1, 10, 0, 0))
    count = a_chunk(b"acTL", struct.pack(">II", 2, 0)) if counted else b""
    still = a_chunk(b"IDAT", rows[: int(len(rows) * share)])
    return a_png(160, 120, 2, count, still, control, a_chunk(b"fdAT", bytes(4) + rows))


@pytest.mark.parametrize(
    "payload",
    [
        an_animated_png((1, 1)),
        an_animated_png((160, 60)),
        an_animated_png((80, 59)),
        an_animated_png((9, 9), 1),
        an_animated_png((9, 9), 1, counted=False),
        encoded(COLOUR, save_all=True, append_images=[COLOUR.rotate(90)]),
    ],
)
def test_an_animated_png_is_refused_before_its_decoder_dies_or_shows_black(payload: bytes):
    refused(payload, "animated")


@pytest.mark.parametrize("marker", [0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)])
def test_an_arithmetic_lossless_or_hierarchical_jpeg_is_refused(marker: int):
    refused(JPEGS["4:2:0"].replace(b"\xff\xc0", bytes([0xFF, marker]), 1), "arithmetic-coded")


def test_a_jpeg_of_twelve_bits_is_refused():
    at = JPEGS["grey"].index(b"\xff\xc0") + 4
    refused(JPEGS["grey"][:at] + b"\x0c" + JPEGS["grey"][at + 1 :], "8 bits")


def written_tiff(parts: list[bytes], order: str = "<", *, big: bool = False, **tags: int | list[int]) -> bytes:
    """A TIFF of 160 × 120 by hand: strips of 16 rows, or tiles; `t262=6` sets a tag."""
    tiled = "t322" in tags
    values = {256: 160, 257: 120, 258: 8, 259: 1, 262: 2, 277: 3} | ({} if tiled else {278: 16})
    values |= {int(name[1:]): value for name, value in tags.items()}
    values |= {324 if tiled else 273: [0] * len(parts), 325 if tiled else 279: [len(part) for part in parts]}
    head, inline = 16 if big else 8, 8 if big else 4
    entries_at = head + (8 if big else 2)
    lists_at = entries_at + len(values) * (20 if big else 12) + inline
    pixels_at = lists_at + sum(4 * len(value) for value in values.values() if isinstance(value, list))
    values[324 if tiled else 273] = [pixels_at + sum(map(len, parts[:number])) for number in range(len(parts))]
    entries = lists = b""
    for tag, value in sorted(values.items()):
        numbers = value if isinstance(value, list) else [value]
        packed = struct.pack(f"{order}{len(numbers)}I", *numbers)
        if len(packed) > inline:
            place, lists = struct.pack(order + ("Q" if big else "I"), lists_at + len(lists)), lists + packed
        else:
            place, lists = packed.ljust(inline, b"\0"), lists + (packed if isinstance(value, list) else b"")
        entries += struct.pack(order + ("HHQ" if big else "HHI"), tag, 4, len(numbers)) + place
    mark = b"II" if order == "<" else b"MM"
    start = struct.pack(order + "HHHQ", 43, 8, 0, 16) if big else struct.pack(order + "HI", 42, 8)
    count = struct.pack(order + ("Q" if big else "H"), len(values))
    return mark + start + count + entries + bytes(inline) + lists + b"".join(parts)


def strips(pixels: np.ndarray = PICTURE) -> list[np.ndarray]:
    return [pixels[top : top + 16] for top in range(0, 120, 16)]


def tiles(side: int = 64) -> list[np.ndarray]:
    padded = np.zeros((-(-120 // side) * side, -(-160 // side) * side, 3), np.uint8)
    padded[:120, :160] = PICTURE
    return [padded[y : y + side, x : x + side] for y in range(0, 120, side) for x in range(0, 160, side)]


@pytest.mark.parametrize("photometric", [2, 6])
@pytest.mark.parametrize("tags", [{}, {"t322": 64, "t323": 64}], ids=["strips", "tiles"])
def test_a_jpeg_smaller_than_its_strip_or_tile_is_refused(tags: dict[str, int], photometric: int):
    arrays = tiles() if tags else strips()
    tags = {**tags, "t259": 7, "t262": photometric}
    parts = [encoded(np.ascontiguousarray(array), "JPEG", subsampling=0) for array in arrays]
    assert pixels_of(written_tiff(parts, **tags)) is not None
    others = {
        "rows": encoded(np.ascontiguousarray(arrays[1][:8]), "JPEG", subsampling=0),
        "columns": encoded(np.ascontiguousarray(arrays[1][:, :32]), "JPEG", subsampling=0),
        "grey": encoded(Image.fromarray(arrays[1]).convert("L"), "JPEG"),
        "other sampling": encoded(np.ascontiguousarray(arrays[1]), "JPEG", subsampling=2),
        "larger": encoded(Image.fromarray(arrays[1]).resize((160, 200)), "JPEG", subsampling=0),
        "lost scans": encoded(Image.fromarray(arrays[1]), "JPEG", subsampling=0, progressive=True),
    }
    others["lost scans"] = others["lost scans"][: others["lost scans"].rindex(b"\xff\xda")] + b"\xff\xd9"
    for name, other in others.items():
        assert pixels_of(written_tiff([parts[0], other, *parts[2:]], **tags)) is None, name


DEEP_ALPHA = np.dstack([PICTURE[..., 0], PICTURE[..., 1]]).astype(np.uint16) * 257


@pytest.mark.parametrize(
    ("arrays", "order", "tags"),
    [
        (strips(), ">", {"big": True}),
        (strips(DEEP_ALPHA), "<", {"t258": [16, 16], "t262": 1, "t277": 2, "t338": 2}),
        (strips(), "<", {"t262": 6}),
        (strips(), "<", {"t262": 8}),
        (strips(DEEP_ALPHA[..., :1]), "<", {"t258": 16, "t262": 0, "t277": 1}),
        (strips(PICTURE[:, :, 0].repeat(3, axis=1)[:, :240]), "<", {"t258": 12, "t262": 1, "t277": 1}),
        (strips(), "<", {"t324": 8, "t325": 100}),
    ],
    ids=[
        "big-endian BigTIFF",
        "16-bit grey and alpha",
        "raw YCbCr",
        "Lab",
        "white at 0",
        "12 bits",
        "strips and tiles",
    ],
)
def test_a_kind_of_tiff_whose_decoder_fills_missing_rows_is_refused_by_name(arrays, order: str, tags: dict):
    parts = [zlib.compress(array.tobytes()) for array in arrays]
    parts[3] = zlib.compress(arrays[3][:4].tobytes())
    says = r"this kind of TIFF is not read|both strips and tiles"
    refused(written_tiff(parts, order, **{"t259": 8, **tags}), says)


def a_tiled_tiff(width: int, height: int, tile: tuple[int, int], bits: int = 8) -> bytes:
    part = zlib.compress(bytes(tile[0] * tile[1] * 3 * bits // 8))
    count = -(-width // tile[0]) * -(-height // tile[1])
    tags: dict[str, int | list[int]] = {"t256": width, "t257": height, "t258": [bits] * 3, "t259": 8}
    return written_tiff([part] * count, **tags, t322=tile[0], t323=tile[1])


def test_tiles_take_no_more_memory_than_the_page_and_a_quarter():
    for width, height, tile in ((160, 120, (256, 256)), (1, 1, (1024, 1024)), (1100, 1100, (1104, 1104))):
        pixels = pixels_of(a_tiled_tiff(width, height, tile))
        assert pixels is not None
        assert pixels.shape == (height, width, 3)
    for width, height, tile in (
        (1, 1, (4096, 4096)),  # once taken: 51 MiB for a pixel
        (1500, 1500, (3000, 3000)),
        (4_000_000, 1, (100_000, 50)),
        (60_000, 1, (512, 2048)),
    ):
        with pytest.raises(ImageHeaderError, match="tiles"):
            check_structure(a_tiled_tiff(width, height, tile), 64_000_000)


def test_strips_that_share_their_bytes_are_refused():
    payload = bytearray(TIFFS["strips"])
    offset, size = tiff.parts(bytes(payload), tiff.first_page(bytes(payload)))[0]
    form, at = values_at(bytes(payload), 273)
    struct.pack_into(f"<8{form}", payload, at, *[offset] * 8)
    assert pixels_of(bytes(payload)) is not None  # as long as the file: every strip is read once
    form, at = values_at(bytes(payload), 279)
    struct.pack_into(f"<8{form}", payload, at, *[size * 2] * 8)
    with pytest.raises(ImageHeaderError, match="overlap"):
        check_structure(bytes(payload), 64_000_000)


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
