"""Check the structure of an image file: format, size in pixels, every part in its place. Nothing is decoded.

Intake and the decoder share this check, so no file reaches a decoder unchecked. Cost is bounded for any bytes: every
walk has a limit on its steps, every search is linear. The decoder finds damage inside the compressed data. No torch, no
OpenCV.
"""

import struct

from experts.errors import ImageHeaderError, LongWalkError
from experts.vision import jpeg, tiff

_PNG = b"\x89PNG\r\n\x1a\n"
#: Signatures of files whose last bytes tell that they are whole.
END_MARKED = (jpeg.SIGNATURE, _PNG)
#: Segments of a JPEG and chunks of a PNG that are walked; real files have tens, a 64 MB PNG some thousands.
MAX_STEPS = 50_000
#: Compressed chunks of a PNG beside its pixels. Each may expand to 8 MB: 1000 of them took 23 s.
_MAX_PACKED_CHUNKS = 16
_PACKED_CHUNKS = frozenset({b"iCCP", b"zTXt", b"iTXt"})
#: OpenCV decodes a later frame as well, black if there is none, and crashes on a frame of another size.
_ANIMATION_CHUNKS = frozenset({b"acTL", b"fcTL", b"fdAT"})
#: Channels of a PNG by its colour type.
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
#: Red, green, blue: OpenCV reads no other order of 32 bits.
_BMP_MASKS = (0xFF0000, 0xFF00, 0xFF)
#: Compressed pixels are never much larger than the pixels; a decoder decompresses all data, needed or not.
_SPARE_PIXEL_BYTES = 64 * 1024


def check_structure(
    payload: bytes,
    max_pixels: int,
    max_steps: int = MAX_STEPS,
    *,
    raw_shape: tuple[int, int, int] | None = None,
    to_end: bool = True,
) -> tuple[int, int]:
    """Return width and height in pixels by the header, or by `raw_shape` (h, w, c) for raw pixels.

    Raise ImageHeaderError if the image cannot be judged or is too large, LongWalkError if it has more than `max_steps`
    parts but may be walked further. Without `to_end` the end marker of a JPEG is left to the decoder.
    """
    if raw_shape is not None:
        height, width, channels = raw_shape
        check_size(width, height, max_pixels)
        expected = height * width * channels
        if len(payload) != expected:
            reason = f"shape {[*raw_shape]} needs {expected} bytes, the payload has {len(payload)}"
            raise ImageHeaderError(reason)
        return width, height
    try:
        if payload.startswith(jpeg.SIGNATURE):
            frame = jpeg.read_frame(payload, max_steps, to_end=to_end)
            check_size(frame.width, frame.height, max_pixels)
            return frame.width, frame.height
        if payload.startswith(_PNG):
            return _walk_png(payload, max_pixels, max_steps)
        if payload.startswith(b"BM"):
            return _walk_bmp(payload, max_pixels)
        if payload.startswith(tiff.SIGNATURES):
            page = tiff.first_page(payload, max_steps)
            check_size(page.width, page.height, max_pixels)
            tiff.parts(payload, page)
            return page.width, page.height
    except struct.error:
        raise ImageHeaderError("the image ends inside its header") from None
    except LongWalkError as error:
        if max_steps < MAX_STEPS:
            raise
        raise ImageHeaderError(error.reason) from None
    raise ImageHeaderError("the payload is not a JPEG, PNG, BMP or TIFF image")


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Raise ImageHeaderError if the image has no pixels, or more than `max_pixels`."""
    if width <= 0 or height <= 0:
        raise ImageHeaderError(f"the image has no pixels ({width} × {height})")
    if width * height > max_pixels:
        raise ImageHeaderError(f"{width} × {height} pixels, at most {max_pixels} are taken", "too_large")


def _walk_png(data: bytes, max_pixels: int, max_steps: int) -> tuple[int, int]:
    """Walk the chunks from IHDR to IEND; the decoder checks their checksums."""
    length, kind, width, height, depth, colour = struct.unpack_from(">I4sIIBB", data, 8)
    if kind != b"IHDR" or length != 13:
        raise ImageHeaderError("the PNG does not begin with its header chunk")
    check_size(width, height, max_pixels)
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
            return width, height
        if kind in _ANIMATION_CHUNKS:
            raise ImageHeaderError("the PNG is animated: send each picture as a PNG of its own")
        pixel_bytes += length if kind == b"IDAT" else 0
        packed += kind in _PACKED_CHUNKS
        if pixel_bytes > most_bytes:
            raise ImageHeaderError(f"the PNG has more image data than {width} × {height} pixels can take")
        if packed > _MAX_PACKED_CHUNKS:
            raise ImageHeaderError(f"the PNG has more than {_MAX_PACKED_CHUNKS} compressed chunks beside its pixels")
        at += 12 + length
    raise LongWalkError(f"the PNG has more than {max_steps} chunks")


def _walk_bmp(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Read the size from the old (12 bytes) or any newer header; uncompressed rows must lie inside the file."""
    pixels_at, header_bytes = struct.unpack_from("<II", data, 10)
    if header_bytes == 12:
        width, height, _, depth = struct.unpack_from("<HHHH", data, 18)
        compression = 0
    elif header_bytes >= 40:
        width, height, _, depth, compression = struct.unpack_from("<iiHHI", data, 18)
    else:
        raise ImageHeaderError("the BMP's header has an unknown length")
    height = abs(height)  # negative: rows from the top down
    check_size(width, height, max_pixels)
    if compression not in (0, 3, 6):
        raise ImageHeaderError("the BMP is run-length encoded or compressed: send it uncompressed or as PNG")
    if compression and depth == 32 and struct.unpack_from("<III", data, 54) != _BMP_MASKS:
        raise ImageHeaderError("the BMP has its colours in an unusual order: save it as 24 bits or as PNG")
    row_bytes = (width * depth + 31) // 32 * 4
    needed = row_bytes * (height - 1) + (width * depth + 7) // 8  # the last row's padding is often left out
    if depth == 0 or pixels_at < 14 or pixels_at + needed > len(data):
        raise ImageHeaderError("the BMP is cut off: its rows lie behind the end of the file")
    return width, height
