"""The first page of a TIFF: its size, and whether its strips or tiles hold every row.

Decoders differ in what they make of a page that says a thing twice or in an unusual type, and fill rows that are
missing. Here such a page is an error, so that what was checked is what is decoded. No torch, no OpenCV.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

SIGNATURES = (b"II\x2a\x00", b"MM\x00\x2a", b"II\x2b\x00", b"MM\x00\x2b")

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _ORIENTATION, _SAMPLES = 256, 257, 258, 259, 274, 277
_ROWS_PER_STRIP, _PLANES, _TILE_WIDTH, _TILE_HEIGHT, _JPEG_TABLES = 278, 284, 322, 323, 347
_STRIPS, _TILES = (273, 279), (324, 325)
_TAGS = frozenset(
    {_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _ORIENTATION, _SAMPLES, _ROWS_PER_STRIP, _PLANES, _TILE_WIDTH, _TILE_HEIGHT}
    | {_JPEG_TABLES, *_STRIPS, *_TILES}
)
#: BYTE, SHORT, LONG and LONG8, their signed kinds, and bytes without a meaning (tables of a JPEG).
_BYTES = 7
_INTEGERS = {1: "B", 3: "H", 4: "I", 6: "b", 7: "B", 8: "h", 9: "i", 16: "Q", 17: "q"}
_UNCOMPRESSED, _JPEG = 1, 7
_SEPARATE_PLANES = 2
#: None, LZW, JPEG, deflate (two numbers) and PackBits. Decoders of the others (fax) fill missing rows.
_COMPRESSIONS = frozenset({_UNCOMPRESSED, 5, _JPEG, 8, 32946, 32773})
_MAX_ENTRIES = 4096
#: Strips or tiles of a page.
_MAX_VALUES = 200_000
_MAX_SAMPLES, _MAX_BITS = 8, 64
#: A tile may reach beyond the page, but needs memory: at most twice the page, or this many pixels a side.
_MAX_TILE_SIDE = 4096


class TiffError(ValueError):
    """The page cannot be decoded completely; the text begins with "the TIFF" and says why."""


class ManyPartsError(Exception):
    """The page has more strips or tags than the caller allows at once; it may still be sound."""


@dataclass(frozen=True, slots=True)
class Page:
    """Size in pixels, and the integers of each tag that is used here."""

    width: int
    height: int
    order: str
    tags: Mapping[int, tuple[int, ...]]
    orientation_at: int | None

    def first(self, tag: int, default: int) -> int:
        return self.tags.get(tag, (default,))[0]


def first_page(data: bytes, max_values: int = _MAX_VALUES) -> Page:
    """Return the first page. Raises TiffError, or ManyPartsError if a tag has more than `max_values` values."""
    order = "<" if data[:1] == b"I" else ">"
    try:
        places = _places(data, order)
        if any(place.count > max_values for place in places.values()):
            raise ManyPartsError("the TIFF has too many strips or tiles")
        tags = {tag: struct.unpack_from(f"{order}{p.count}{p.form}", data, p.at) for tag, p in places.items()}
    except struct.error:
        raise TiffError("the TIFF is cut off: it ends inside its directory") from None
    orientation = places.get(_ORIENTATION)
    page = Page(0, 0, order, tags, orientation.at if orientation is not None else None)
    page = replace(page, width=page.first(_WIDTH, 0), height=page.first(_HEIGHT, 0))
    if page.width <= 0 or page.height <= 0:
        raise TiffError(f"the TIFF has no pixels ({page.width} × {page.height})")
    return page


def parts(data: bytes, page: Page) -> list[tuple[int, int]]:
    """Return the offset and bytes of each strip or tile. Raises TiffError if the page needs more than the file has."""
    compression, samples, bits = page.first(_COMPRESSION, 1), page.first(_SAMPLES, 1), max(page.tags.get(_BITS, (1,)))
    if compression not in _COMPRESSIONS:
        raise TiffError(f"the TIFF's compression {compression} is not supported: use none, LZW, deflate or PackBits")
    if not 0 < samples <= _MAX_SAMPLES or not 0 < bits <= _MAX_BITS:
        raise TiffError(f"the TIFF has {samples} samples of {bits} bits a pixel")
    planes = samples if page.first(_PLANES, 1) == _SEPARATE_PLANES else 1
    tiled = _TILES[0] in page.tags
    width, height = _part_size(page, tiled=tiled)
    down = -(-page.height // height)
    needed = -(-page.width // width) * down * planes
    offsets_tag, sizes_tag = _TILES if tiled else _STRIPS
    offsets, sizes = page.tags.get(offsets_tag, ()), page.tags.get(sizes_tag)
    if not offsets:
        raise TiffError("the TIFF has no pixels: its first page names no strips or tiles")
    if len(offsets) < needed or (sizes is not None and len(sizes) != len(offsets)):
        raise TiffError(f"the TIFF is incomplete: {len(offsets)} strips or tiles of {needed}")
    row_bytes = (width * bits * (samples // planes) + 7) // 8
    places: list[tuple[int, int]] = []
    for number, offset in enumerate(offsets[:needed]):
        rows = height if tiled or (number + 1) % down else page.height - (down - 1) * height
        min_bytes = rows * row_bytes if compression == _UNCOMPRESSED else 1
        size = sizes[number] if sizes is not None else min_bytes  # old writers leave out a single strip's length
        if size < min_bytes:
            raise TiffError(f"the TIFF is incomplete: strip or tile {number + 1} has {size} of {min_bytes} bytes")
        if offset < 0 or offset + size > len(data):
            raise TiffError("the TIFF is cut off: its strips lie behind the end of the file")
        places.append((offset, size))
    return places


def _part_size(page: Page, *, tiled: bool) -> tuple[int, int]:
    """Return the width and height of a strip or tile in pixels."""
    if not tiled:
        rows = page.first(_ROWS_PER_STRIP, page.height)
        return page.width, min(rows, page.height) if rows > 0 else page.height
    width, height = page.first(_TILE_WIDTH, 0), page.first(_TILE_HEIGHT, 0)
    max_width, max_height = max(2 * page.width, _MAX_TILE_SIDE), max(2 * page.height, _MAX_TILE_SIDE)
    if not (0 < width <= max_width and 0 < height <= max_height):
        raise TiffError(f"the TIFF's tiles have {width} × {height} pixels")
    return width, height


def upright(data: bytes, page: Page) -> bytes:
    """Return the file with its orientation tag set to 1: decoders would turn the pixels by it."""
    if page.orientation_at is None:
        return data
    changed = bytearray(data)
    struct.pack_into(page.order + "H", changed, page.orientation_at, 1)
    return bytes(changed)


def jpegs(data: bytes, page: Page) -> Iterator[bytes]:
    """Yield each strip or tile of a JPEG-compressed page as a JPEG of its own; nothing for other pages."""
    if page.first(_COMPRESSION, 1) == _JPEG:
        tables = bytes(page.tags.get(_JPEG_TABLES, ()))
        for offset, size in parts(data, page):
            yield tables[:-2] + data[offset + 2 * bool(tables) : offset + size]


@dataclass(frozen=True, slots=True)
class _Place:
    form: str
    count: int
    at: int


def _places(data: bytes, order: str) -> dict[int, _Place]:
    """Return the places of the tags that are used here."""
    big = struct.unpack_from(order + "H", data, 2)[0] == 43
    first, count_form, entry_form, offset_form, inline_bytes = (
        (8, "Q", "HHQ", "Q", 8) if big else (4, "H", "HHI", "I", 4)
    )
    directory = _inside(data, struct.unpack_from(order + offset_form, data, first)[0])
    (entries,) = struct.unpack_from(order + count_form, data, directory)
    if not 0 < entries <= _MAX_ENTRIES:
        raise TiffError(f"the TIFF's first page has {entries} tags")
    at = directory + struct.calcsize(order + count_form)
    places: dict[int, _Place] = {}
    for _ in range(entries):
        tag, kind, count = struct.unpack_from(order + entry_form, data, at)
        at += struct.calcsize(order + entry_form)
        if tag in _TAGS:
            if tag in places:
                raise TiffError(f"the TIFF's first page has tag {tag} twice")
            if kind not in _INTEGERS or (kind == _BYTES) != (tag == _JPEG_TABLES) or not 0 < count <= _MAX_VALUES:
                raise TiffError(f"the TIFF's tag {tag} has {count} values of type {kind}, not whole numbers")
            form, place = _INTEGERS[kind], at
            if struct.calcsize("=" + form) * count > inline_bytes:
                place = _inside(data, struct.unpack_from(order + offset_form, data, at)[0])
            places[tag] = _Place(form, count, place)
        at += inline_bytes
    return places


def _inside(data: bytes, offset: int) -> int:
    """Return `offset` if it lies in the file: struct takes no number beyond a C integer."""
    if offset >= len(data):
        raise TiffError("the TIFF is cut off: an offset lies behind the end of the file")
    return offset
