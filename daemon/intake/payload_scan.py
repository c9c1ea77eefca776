"""Scan a payload before it is accepted: format, size in pixels, whole structure, sha256; nothing is decoded.

Cost is bounded whatever the bytes are: every walk has a limit on its steps, every search is linear. Damage inside
the compressed data is for the decoder to find. Large payloads are scanned in a thread of their own, source by source
in turn: one of 64 MB takes some 50 ms to hash, and no other publisher's image waits for that.
"""

import hashlib
import re
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from daemon.policy.fair_queue import Turns
from daemon.records import Pixels
from experts.vision import tiff

#: Segments of a JPEG and chunks of a PNG that are walked; real files have tens, a 64 MB PNG some thousands.
MAX_STEPS = 50_000
#: Scans of a JPEG; progressive ones have about ten. Each is a pass over the whole image, 0.14 s at 64 million pixels,
#: whatever its few bytes say: a file of 350 KB took 144 s.
_MAX_SCANS = 50
#: Compressed chunks of a PNG beside its pixels. Each may unfold to 8 MB: 1000 of them took 23 s.
_MAX_PACKED_CHUNKS = 16
_PACKED_CHUNKS = frozenset({b"iCCP", b"zTXt", b"iTXt"})
#: Channels of a PNG by its colour type.
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
#: Compressed pixels are never much larger than the pixels; a decoder unfolds all that is there, needed or not.
_SPARE_PIXEL_BYTES = 64 * 1024

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
#: Start-of-frame markers carry the size; C4, C8 and CC are tables and extensions.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_COEFFICIENTS = 64
_JPEG_SCAN, _JPEG_END = 0xDA, 0xD9
#: Markers without a length: TEM, RST0 to RST7, SOI.
_JPEG_STANDALONE = frozenset({0x01, *range(0xD0, 0xD9)})
#: The next marker: not a stuffed zero, not fill bytes, not the restarts within entropy-coded data.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Format and size in pixels, as the image's own header says."""

    format: Literal["jpeg", "png", "bmp", "tiff", "raw"]
    width: int
    height: int


class ImageHeaderError(Exception):
    """An image that is refused: `code` is bad_image or too_large, `reason` what is wrong with it."""

    def __init__(self, reason: str, code: Literal["bad_image", "too_large"] = "bad_image") -> None:
        super().__init__(reason)
        self.code: Literal["bad_image", "too_large"] = code
        self.reason = reason


class LongWalkError(Exception):
    """The image has more parts than this scan may walk; it may still be sound."""


def check_image(payload: bytes, pixels: Pixels, max_pixels: int, max_steps: int = MAX_STEPS) -> ImageFacts:
    """Check the structure of `payload`; raise ImageHeaderError if it cannot be judged or is too large.

    Raise LongWalkError if it has more than `max_steps` parts, and more steps could be taken.
    """
    if pixels.encoding == "raw":
        return _check_raw(payload, pixels.shape or (0, 0, 0), max_pixels)
    for signature, walk in _FORMATS:
        if payload.startswith(signature):
            try:
                return walk(payload, max_pixels, max_steps)
            except struct.error:
                raise ImageHeaderError("the image ends inside its header") from None
    raise ImageHeaderError("the payload is not a JPEG, PNG, BMP or TIFF image")


def _too_long(reason: str, max_steps: int) -> ImageHeaderError | LongWalkError:
    return LongWalkError() if max_steps < MAX_STEPS else ImageHeaderError(reason)


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width <= 0 or height <= 0:
        raise ImageHeaderError(f"the image has no pixels ({width} × {height})")
    if width * height > max_pixels:
        raise ImageHeaderError(f"{width} × {height} pixels, at most {max_pixels} are taken", "too_large")


def _check_raw(payload: bytes, shape: tuple[int, int, int], max_pixels: int) -> ImageFacts:
    height, width, channels = shape
    _check_size(width, height, max_pixels)
    expected = height * width * channels
    if len(payload) != expected:
        raise ImageHeaderError(f"shape {list(shape)} needs {expected} bytes, the payload has {len(payload)}")
    return ImageFacts("raw", width, height)


class _JpegFrame:
    """Size of a JPEG, and the low bits that its scans have not brought yet, by component and coefficient.

    Decoders replace missing ones by zeros without a warning: a progressive JPEG that was cut between two scans.
    """

    def __init__(self, header: bytes, max_pixels: int) -> None:
        height, width = struct.unpack_from(">HH", header, 3)
        _check_size(width, height, max_pixels)
        self.facts = ImageFacts("jpeg", width, height)
        self.scans = 0
        self._missing = {component: bytearray(b"\xff" * _JPEG_COEFFICIENTS) for component in header[8::3]}

    def note_scan(self, header: bytes) -> None:
        if len(header) < 6 or len(header) != 6 + 2 * header[2]:
            raise ImageHeaderError("a scan of the JPEG has a header of an impossible length")
        self.scans += 1
        if self.scans > _MAX_SCANS:
            raise ImageHeaderError(f"the JPEG has more than {_MAX_SCANS} scans: save it as an ordinary JPEG")
        first, last, bits = header[-3:]
        stop = min(last, _JPEG_COEFFICIENTS - 1) + 1
        for component in header[3:-3:2]:
            if component in self._missing:
                self._missing[component][first:stop] = bytes([bits & 0x0F]) * max(0, stop - first)

    def is_complete(self) -> bool:
        return not any(any(bits) for bits in self._missing.values())


def _walk_jpeg(data: bytes, max_pixels: int, max_steps: int) -> ImageFacts:
    """Segments from SOI to EOI. Thumbnails inside segments and bytes behind EOI are never looked at."""
    frame: _JpegFrame | None = None
    at = 2
    for _ in range(max_steps):
        match = _JPEG_MARKER.search(data, at)  # also steps over entropy-coded data and padding, as decoders do
        if match is None:
            raise ImageHeaderError("the JPEG has no end marker: it is cut off")
        marker, at = data[match.end() - 1], match.end()
        if marker == _JPEG_END:
            return _whole_jpeg(frame)
        if marker in _JPEG_STANDALONE:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        if length < 2:
            raise ImageHeaderError("a segment of the JPEG has an impossible length")
        if marker in _JPEG_FRAMES:
            if frame is not None:
                raise ImageHeaderError("the JPEG has two frame headers")
            frame = _JpegFrame(data[at : at + length], max_pixels)
        elif marker == _JPEG_SCAN and frame is not None:
            frame.note_scan(data[at : at + length])
        at += length
    raise _too_long(f"the JPEG has more than {max_steps} segments", max_steps)


def _whole_jpeg(frame: _JpegFrame | None) -> ImageFacts:
    if frame is None or frame.scans == 0:
        raise ImageHeaderError("the JPEG has no pixels: it ends before its image data")
    if not frame.is_complete():
        raise ImageHeaderError("the JPEG is incomplete: it ends before its last scan")
    return frame.facts


def _walk_png(data: bytes, max_pixels: int, max_steps: int) -> ImageFacts:
    """Chunks from IHDR to IEND; checksums are for the decoder."""
    length, kind, width, height, depth, colour = struct.unpack_from(">I4sIIBB", data, 8)
    if kind != b"IHDR" or length != 13:
        raise ImageHeaderError("the PNG does not begin with its header chunk")
    _check_size(width, height, max_pixels)
    # Twice what the pixels take, for interlacing, filters and data that does not compress.
    most_bytes = 2 * height * (width * depth * _PNG_CHANNELS.get(colour, 4) // 8 + 2) + _SPARE_PIXEL_BYTES
    at, pixel_bytes, packed = 8, 0, 0
    for _ in range(max_steps):
        if at + 12 > len(data):
            raise ImageHeaderError("the PNG has no end chunk: it is cut off")
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            if not pixel_bytes:
                raise ImageHeaderError("the PNG has no pixels: it has no image data chunk")
            return ImageFacts("png", width, height)
        pixel_bytes += length if kind == b"IDAT" else 0
        packed += kind in _PACKED_CHUNKS
        if pixel_bytes > most_bytes:
            raise ImageHeaderError(f"the PNG has more image data than {width} × {height} pixels can take")
        if packed > _MAX_PACKED_CHUNKS:
            raise ImageHeaderError(f"the PNG has more than {_MAX_PACKED_CHUNKS} compressed chunks beside its pixels")
        at += 12 + length
    raise _too_long(f"the PNG has more than {max_steps} chunks", max_steps)


def _walk_bmp(data: bytes, max_pixels: int, _max_steps: int) -> ImageFacts:
    """Size from the old (12 bytes) or any newer header; uncompressed rows must lie inside the file."""
    pixels_at, header_bytes = struct.unpack_from("<II", data, 10)
    if header_bytes == 12:
        width, height, _, depth = struct.unpack_from("<HHHH", data, 18)
        compression = 0
    elif header_bytes >= 40:
        width, height, _, depth, compression = struct.unpack_from("<iiHHI", data, 18)
    else:
        raise ImageHeaderError("the BMP's header has an unknown length")
    height = abs(height)  # negative: rows from the top down
    _check_size(width, height, max_pixels)
    if compression not in (0, 3, 6):
        raise ImageHeaderError(
            "the BMP is run-length encoded, which hides missing rows: send it uncompressed or as PNG"
        )
    row_bytes = (width * depth + 31) // 32 * 4
    needed = row_bytes * (height - 1) + (width * depth + 7) // 8  # the last row's padding is often left out
    if depth == 0 or pixels_at < 14 or pixels_at + needed > len(data):
        raise ImageHeaderError("the BMP is cut off: its rows lie behind the end of the file")
    return ImageFacts("bmp", width, height)


def _walk_tiff(data: bytes, max_pixels: int, max_steps: int) -> ImageFacts:
    """Both byte orders, classic and BigTIFF; only the first page counts."""
    try:
        page = tiff.first_page(data, max_steps)
        _check_size(page.width, page.height, max_pixels)
        tiff.parts(data, page)
    except tiff.TiffError as error:
        raise ImageHeaderError(str(error)) from None
    except tiff.ManyPartsError:
        raise _too_long(f"the TIFF has more than {max_steps} strips or tiles", max_steps) from None
    return ImageFacts("tiff", page.width, page.height)


_FORMATS: tuple[tuple[bytes, Callable[[bytes, int, int], ImageFacts]], ...] = (
    (b"\xff\xd8\xff", _walk_jpeg),
    (_PNG_SIGNATURE, _walk_png),
    (b"BM", _walk_bmp),
    *((signature, _walk_tiff) for signature in tiff.SIGNATURES),
)


@dataclass(frozen=True, slots=True)
class PayloadScan:
    """A payload's sha256 (lower-case hex), and the flaw of its structure; None if it is sound."""

    sha256: str
    flaw: ImageHeaderError | None


def scan_payload(payload: bytes, pixels: Pixels, max_pixels: int, max_steps: int = MAX_STEPS) -> PayloadScan:
    """Return the scan of a payload. LongWalkError if its structure has more than `max_steps` parts."""
    flaw: ImageHeaderError | None = None
    try:
        check_image(payload, pixels, max_pixels, max_steps)
    except ImageHeaderError as error:
        flaw = error.with_traceback(None)  # it outlives this call, and must not keep the payload alive
    return PayloadScan(hashlib.sha256(payload).hexdigest(), flaw)


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """A payload to scan; `done` is called with its scan, None if that failed."""

    source: str
    payload: bytes
    pixels: Pixels
    max_pixels: int
    done: Callable[[PayloadScan | None], None]


class PayloadScanner:
    """`scan` is called from any thread, `done` in the scanner's. The caller bounds how much waits."""

    def __init__(self) -> None:
        self._waiting: Turns[ScanRequest] = Turns()
        self._changed = threading.Condition()
        self._stopping = False
        self._log = structlog.get_logger("intake")
        self._thread = threading.Thread(target=self._run, name="payload-scanner")

    def start(self) -> None:
        self._thread.start()

    def scan(self, request: ScanRequest) -> None:
        with self._changed:
            self._waiting.add((request.source,), request, len(request.payload))
            self._changed.notify()

    def stop(self) -> None:
        """Finish the running scan and end; waiting payloads are dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (request := self._next()) is not None:
            try:
                scan = scan_payload(request.payload, request.pixels, request.max_pixels)
            except Exception:  # noqa: BLE001 - one image must not stop the line
                self._log.exception("payload_scan_failed", source=request.source)
                scan = None
            request.done(scan)
            del request  # frees the payload before the next one comes

    def _next(self) -> ScanRequest | None:
        with self._changed:
            while not self._stopping and not len(self._waiting):
                self._changed.wait()
            return None if self._stopping else self._waiting.take(1, 0)[0]
