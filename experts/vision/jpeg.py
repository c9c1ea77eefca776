"""Check a JPEG's frame and the scans that carry its pixels. Decodes nothing, ignores thumbnails and trailing bytes."""

import re
from collections.abc import Iterator

from experts.errors import ImageHeaderError, LongWalkError

SIGNATURE = b"\xff\xd8\xff"
#: Progressive JPEGs have about ten scans. Each is a pass over the whole image, 0.14 s at 64 million pixels, however few
#: its bytes are: a file of 350 KB took 144 s.
_MAX_SCANS = 50
_COEFFICIENTS = 64
#: Start-of-frame markers carry the size; C4, C8 and CC are tables and extensions.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
#: Baseline, extended and progressive, with Huffman codes. Where arithmetic-coded data ends, libjpeg reads zeros without
#: a warning; no camera sends the others.
_HUFFMAN_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_SCAN, _END = 0xDA, 0xD9
#: Segments of a file of tables: quantization, Huffman, applications, comments.
_TABLES = frozenset({0xC4, 0xDB, *range(0xE0, 0xF0), 0xFE})
#: Markers without a length: TEM, RST0 to RST7, SOI.
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD9)})
#: The next marker: not a stuffed zero, not fill bytes, not the restarts within entropy-coded data.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


class Frame:
    """Size of a JPEG, and the low bits still missing after its scans so far, by component and coefficient.

    Decoders silently replace missing bits by zeros, as in a progressive JPEG cut between two scans. `layout` is the
    frame header without the height: frames of one layout differ in nothing else.
    """

    def __init__(self, marker: int, header: bytes) -> None:
        if marker not in _HUFFMAN_FRAMES or header[2:3] != b"\x08":
            raise ImageHeaderError(
                "this kind of JPEG is not read (arithmetic-coded, lossless, hierarchical or of more than 8 bits): "
                "save it as an ordinary JPEG"
            )
        if len(header) < 8 or len(header) != 8 + 3 * header[7]:
            raise ImageHeaderError("the JPEG has a frame header of an impossible length")
        self.height, self.width = int.from_bytes(header[3:5]), int.from_bytes(header[5:7])
        self.components = header[7]
        self.layout = header[5:]
        self.scans = 0
        self._missing = {component: bytearray(b"\xff" * _COEFFICIENTS) for component in header[8::3]}

    def note_scan(self, header: bytes) -> None:
        if len(header) < 6 or len(header) != 6 + 2 * header[2]:
            raise ImageHeaderError("a scan of the JPEG has a header of an impossible length")
        self.scans += 1
        if self.scans > _MAX_SCANS:
            raise ImageHeaderError(f"the JPEG has more than {_MAX_SCANS} scans: save it as an ordinary JPEG")
        first, last, bits = header[-3:]
        stop = min(last, _COEFFICIENTS - 1) + 1
        for component in header[3:-3:2]:
            if component in self._missing:
                self._missing[component][first:stop] = bytes([bits & 0x0F]) * max(0, stop - first)

    def is_complete(self) -> bool:
        return not any(any(bits) for bits in self._missing.values())


def read_frame(data: bytes, max_steps: int, *, to_end: bool) -> Frame:
    """Return the frame with all of its scans. Without `to_end` the decoder checks for the end marker.

    Raises ImageHeaderError, or LongWalkError for more than `max_steps` segments.
    """
    frame: Frame | None = None
    for marker, segment in _segments(data, max_steps):
        if marker in _FRAMES:
            if frame is not None:
                raise ImageHeaderError("the JPEG has two frame headers")
            frame = Frame(marker, segment)
        elif marker == _SCAN and frame is not None:
            frame.note_scan(segment)
            if not to_end and frame.is_complete():
                return frame
    if frame is None or frame.scans == 0:
        raise ImageHeaderError("the JPEG has no pixels: it ends before its image data")
    if not frame.is_complete():
        raise ImageHeaderError("the JPEG is incomplete: it ends before its last scan")
    return frame


def are_tables(data: bytes, max_steps: int) -> bool:
    """Return True if `data` holds tables only, so that it can precede the data of any frame."""
    return all(marker in _TABLES for marker, _ in _segments(data, max_steps))


def _segments(data: bytes, max_steps: int) -> Iterator[tuple[int, bytes]]:
    """Yield marker and segment, from its length on, up to the end marker."""
    at = 2
    for _ in range(max_steps):
        match = _MARKER.search(data, at)  # also steps over entropy-coded data and padding, as decoders do
        if match is None:
            raise ImageHeaderError("the JPEG has no end marker: it is cut off")
        marker, at = data[match.end() - 1], match.end()
        if marker == _END:
            return
        if marker in _STANDALONE:
            continue
        length = int.from_bytes(data[at : at + 2])
        if length < 2:
            raise ImageHeaderError("a segment of the JPEG has an impossible length")
        yield marker, data[at : at + length]
        at += length
    raise LongWalkError(f"the JPEG has more than {max_steps} segments")
