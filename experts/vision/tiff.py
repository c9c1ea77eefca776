"""Check the first page of a TIFF: its size, and that its strips or tiles hold every row.

Decoders disagree about pages with repeated tags or unusual types, and fill missing rows. Such pages are errors here, so
that the decoder sees exactly the page that was checked. No torch, no OpenCV.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from experts.errors import ImageHeaderError, LongWalkError
from experts.vision import jpeg

SIGNATURES = (b"II\x2a\x00", b"MM\x00\x2a", b"II\x2b\x00", b"MM\x00\x2b")

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION, _SAMPLES = 256, 257, 258, 259, 262, 274, 277
_ROWS_PER_STRIP, _PLANES, _TILE_WIDTH, _TILE_HEIGHT, _SAMPLE_FORMAT, _JPEG_TABLES = 278, 284, 322, 323, 339, 347
_STRIPS, _TILES = (273, 279), (324, 325)
_TAGS = frozenset(
    {_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION, _SAMPLES, _ROWS_PER_STRIP, _PLANES}
    | {_TILE_WIDTH, _TILE_HEIGHT, _SAMPLE_FORMAT, _JPEG_TABLES, *_STRIPS, *_TILES}
)
#: BYTE, SHORT, LONG and LONG8, their signed kinds, and bytes without a meaning (tables of a JPEG).
_BYTES = 7
_INTEGERS = {1: "B", 3: "H", 4: "I", 6: "b", 7: "B", 8: "h", 9: "i", 16: "Q", 17: "q"}
_UNCOMPRESSED, _JPEG = 1, 7
_SEPARATE_PLANES = 2
#: None, LZW, JPEG, deflate (two numbers) and PackBits. Decoders of the others (fax) fill missing rows.
_COMPRESSIONS = frozenset({_UNCOMPRESSED, 5, _JPEG, 8, 32946, 32773})
_RGB, _YCBCR = 2, 6
#: Samples of a pixel and the bits that each may have, by photometric interpretation: grey with white or black at 0,
#: RGB, palette, CMYK, YCbCr. Decoders fill missing rows of others, or misread them (12 bits; 16 bits with white at 0).
_KINDS: Mapping[int, tuple[int, frozenset[int]]] = {
    0: (1, frozenset({1, 2, 4, 8})),
    1: (1, frozenset({1, 2, 4, 8, 16})),
    _RGB: (3, frozenset({8, 16})),
    3: (1, frozenset({1, 2, 4, 8})),
    5: (4, frozenset({8, 16})),
    _YCBCR: (3, frozenset({8})),
}
_MAX_ENTRIES = 4096
#: Strips or tiles of a page.
_MAX_VALUES = 200_000
#: A tile may reach beyond the page, but needs memory, up to 8 bytes a pixel: at most a quarter more pixels than the
#: page has, or these.
_MAX_TILE_PIXELS = 1024 * 1024
#: Bytes of the tables of a JPEG that its strips share: four of each kind need less.
_MAX_TABLES_BYTES = 4096
_MAX_SEGMENTS = 50_000


@dataclass(frozen=True, slots=True)
class Page:
    """Size in pixels, and the integers of each tag used here."""

    width: int
    height: int
    order: str
    tags: Mapping[int, tuple[int, ...]]
    orientation_at: int | None

    def first(self, tag: int, default: int) -> int:
        return self.tags.get(tag, (default,))[0]


def first_page(data: bytes, max_values: int = _MAX_VALUES) -> Page:
    """Return the first page. Raises ImageHeaderError, or LongWalkError if a tag has more than `max_values` values."""
    if data.startswith(b"MM\x00\x2b"):
        kind = "BigTIFF with the most significant byte first"
        raise ImageHeaderError(f"this kind of TIFF is not read: {kind}; save it as TIFF or PNG")
    order = "<" if data[:1] == b"I" else ">"
    try:
        places = _places(data, order)
        if any(place.count > max_values for place in places.values()):
            raise LongWalkError(f"the TIFF has more than {max_values} strips or tiles")
        tags = {tag: struct.unpack_from(f"{order}{p.count}{p.form}", data, p.at) for tag, p in places.items()}
    except struct.error:
        raise ImageHeaderError("the TIFF is cut off: it ends inside its directory") from None
    orientation = places.get(_ORIENTATION)
    (width, *_), (height, *_) = tags.get(_WIDTH, (0,)), tags.get(_HEIGHT, (0,))
    if width <= 0 or height <= 0:
        raise ImageHeaderError(f"the TIFF has no pixels ({width} × {height})")
    return Page(width, height, order, tags, orientation.at if orientation is not None else None)


def parts(data: bytes, page: Page) -> list[tuple[int, int]]:
    """Return the offset and bytes of each strip or tile. Raises ImageHeaderError if the page is not whole."""
    _check_kind(page)
    compression, samples = page.first(_COMPRESSION, 1), page.first(_SAMPLES, 1)
    planes = samples if page.first(_PLANES, 1) == _SEPARATE_PLANES else 1
    tiled = _TILES[0] in page.tags
    width, height = _part_size(page, tiled=tiled)
    down = -(-page.height // height)
    needed = -(-page.width // width) * down * planes
    offsets_tag, sizes_tag = _TILES if tiled else _STRIPS
    offsets, sizes = page.tags.get(offsets_tag, ()), page.tags.get(sizes_tag)
    if not offsets:
        raise ImageHeaderError("the TIFF has no pixels: its first page names no strips or tiles")
    if len(offsets) < needed or (sizes is not None and len(sizes) != len(offsets)):
        raise ImageHeaderError(f"the TIFF is incomplete: {len(offsets)} strips or tiles of {needed}")
    row_bytes = (width * page.first(_BITS, 1) * (samples // planes) + 7) // 8
    places: list[tuple[int, int]] = []
    for number, offset in enumerate(offsets[:needed]):
        rows = height if tiled or (number + 1) % down else page.height - (down - 1) * height
        min_bytes = rows * row_bytes if compression == _UNCOMPRESSED else 1
        size = sizes[number] if sizes is not None else min_bytes  # old writers leave out a single strip's length
        if size < min_bytes:
            reason = f"the TIFF is incomplete: strip or tile {number + 1} has {size} of {min_bytes} bytes"
            raise ImageHeaderError(reason)
        if offset < 0 or offset + size > len(data):
            raise ImageHeaderError("the TIFF is cut off: its strips lie behind the end of the file")
        places.append((offset, size))
    if sum(size for _, size in places) > len(data):
        raise ImageHeaderError("the TIFF's strips or tiles overlap: together they are longer than the file")
    return places


def _check_kind(page: Page) -> None:
    """Raise ImageHeaderError unless the page is of a kind whose decoder notices every missing row."""
    photometric, compression = page.first(_PHOTOMETRIC, 0), page.first(_COMPRESSION, 1)
    samples = page.first(_SAMPLES, 1)
    bits, formats = set(page.tags.get(_BITS, (1,))), set(page.tags.get(_SAMPLE_FORMAT, (1,)))
    needed, depths = _KINDS.get(photometric, (0, frozenset[int]()))
    is_known = compression in _COMPRESSIONS and len(bits) == 1 and bits <= depths and formats == {1}
    if compression == _JPEG or photometric == _YCBCR:  # decoders fill missing rows of YCbCr in other compressions
        is_known = is_known and compression == _JPEG and bits == {8}
    if bits == {16} and compression == _UNCOMPRESSED and page.first(_PLANES, 1) == _SEPARATE_PLANES:
        raise ImageHeaderError("this kind of TIFF is not read: 16 bits in separate planes; save them interleaved")
    has_alpha = samples - needed == 1 and (bits == {8} or photometric == _RGB)
    if not is_known or not (samples == needed or has_alpha):
        raise ImageHeaderError(
            f"this kind of TIFF is not read: compression {compression}, photometric interpretation {photometric}, "
            f"{samples} samples of {max(bits)} bits in format {max(formats)}; send 8 or 16 bits, grey, RGB, palette or "
            "CMYK, without compression or with LZW, deflate, PackBits or JPEG"
        )
    if page.tags.keys() & {_TILE_WIDTH, _TILE_HEIGHT, *_TILES} and page.tags.keys() & {*_STRIPS}:
        raise ImageHeaderError("the TIFF has both strips and tiles")


def _part_size(page: Page, *, tiled: bool) -> tuple[int, int]:
    if not tiled:
        rows = page.first(_ROWS_PER_STRIP, page.height)
        return page.width, min(rows, page.height) if rows > 0 else page.height
    width, height = page.first(_TILE_WIDTH, 0), page.first(_TILE_HEIGHT, 0)
    pixels = page.width * page.height
    if width <= 0 or height <= 0 or width * height > max(pixels * 5 // 4, _MAX_TILE_PIXELS):
        raise ImageHeaderError(f"the TIFF's tiles have {width} × {height} pixels")
    if -(-page.width // width) * -(-page.height // height) * width * height > 4 * max(pixels, _MAX_TILE_PIXELS):
        raise ImageHeaderError(f"the TIFF's tiles of {width} × {height} pixels reach far beyond its page")
    return width, height


def upright(data: bytes, page: Page) -> bytes:
    """Set the file's orientation tag to 1: decoders would turn the pixels by it."""
    if page.orientation_at is None:
        return data
    changed = bytearray(data)
    struct.pack_into(page.order + "H", changed, page.orientation_at, 1)
    return bytes(changed)


def jpegs(data: bytes, page: Page, places: list[tuple[int, int]]) -> Iterator[bytes]:
    """Yield each strip or tile of a JPEG-compressed page as a JPEG of its own; nothing for other pages.

    Raises ImageHeaderError if one is not exactly as large as its place on the page, or of another kind than the others:
    libtiff leaves out what is missing, and a whole part of another kind.
    """
    if page.first(_COMPRESSION, 1) != _JPEG:
        return
    tables = bytes(page.tags.get(_JPEG_TABLES, ()))
    if len(tables) > _MAX_TABLES_BYTES or (tables and not jpeg.are_tables(tables, _MAX_SEGMENTS)):
        raise ImageHeaderError("the TIFF's JPEG tables are not tables")
    tiled, samples = _TILES[0] in page.tags, page.first(_SAMPLES, 1)
    width, height = _part_size(page, tiled=tiled)
    components = 1 if page.first(_PLANES, 1) == _SEPARATE_PLANES else samples
    down = -(-page.height // height)
    layouts: set[bytes] = set()
    for number, (offset, size) in enumerate(places, 1):
        part = tables[:-2] + data[offset + 2 * bool(tables) : offset + size]
        frame = jpeg.read_frame(part, _MAX_SEGMENTS, to_end=False)
        layouts.add(frame.layout)
        heights = {height} if tiled or number % down else {height, page.height - (down - 1) * height}
        if frame.width != width or frame.height not in heights or frame.components != components or len(layouts) > 1:
            raise ImageHeaderError(
                f"the TIFF is incomplete: the JPEG of strip or tile {number} has {frame.width} × {frame.height} pixels "
                f"of {frame.components} components, the page needs {width} × {height} of {components}"
            )
        yield part


@dataclass(frozen=True, slots=True)
class _Place:
    form: str
    count: int
    at: int


def _places(data: bytes, order: str) -> dict[int, _Place]:
    big = struct.unpack_from(order + "H", data, 2)[0] == 43
    first, count_form, entry_form, offset_form, inline_bytes = (
        (8, "Q", "HHQ", "Q", 8) if big else (4, "H", "HHI", "I", 4)
    )
    directory = _inside(data, struct.unpack_from(order + offset_form, data, first)[0])
    (entries,) = struct.unpack_from(order + count_form, data, directory)
    if not 0 < entries <= _MAX_ENTRIES:
        raise ImageHeaderError(f"the TIFF's first page has {entries} tags")
    at = directory + struct.calcsize(order + count_form)
    places: dict[int, _Place] = {}
    for _ in range(entries):
        tag, kind, count = struct.unpack_from(order + entry_form, data, at)
        at += struct.calcsize(order + entry_form)
        if tag in _TAGS:
            if tag in places:
                raise ImageHeaderError(f"the TIFF's first page has tag {tag} twice")
            if kind not in _INTEGERS or (kind == _BYTES) != (tag == _JPEG_TABLES) or not 0 < count <= _MAX_VALUES:
                raise ImageHeaderError(f"the TIFF's tag {tag} has {count} values of type {kind}, not whole numbers")
            form, place = _INTEGERS[kind], at
            if struct.calcsize("=" + form) * count > inline_bytes:
                place = _inside(data, struct.unpack_from(order + offset_form, data, at)[0])
            places[tag] = _Place(form, count, place)
        at += inline_bytes
    return places


def _inside(data: bytes, offset: int) -> int:
    """Return `offset` if it lies in the file: struct takes no number beyond a C integer."""
    if offset >= len(data):
        raise ImageHeaderError("the TIFF is cut off: an offset lies behind the end of the file")
    return offset
