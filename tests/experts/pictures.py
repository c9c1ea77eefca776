"""Pictures for tests, and how cameras encode them."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def a_picture(width: int = 90, height: int = 70, seed: int = 0) -> np.ndarray:
    """(H, W, 3) uint8 RGB with edges and gradients."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    picture = np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], axis=-1).astype(np.uint8)
    for _ in range(5):
        left, top = int(random.integers(0, width)), int(random.integers(0, height))
        picture[top : top + height // 4, left : left + width // 4] = random.integers(0, 256, 3)
    return picture


def a_busy_picture(width: int, height: int, seed: int) -> np.ndarray:
    """Without flat parts, where many boxes would be equally good and their order a matter of rounding."""
    noise = np.random.default_rng(seed).normal(0, 40, (height, width, 3))
    return np.clip(a_picture(width, height, seed) + noise, 0, 255).astype(np.uint8)


def encoded(picture: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    buffer = io.BytesIO()
    image.copy().save(buffer, kind, **options)  # a copy: saving leaves an encoder's settings in the image
    return buffer.getvalue()


def a_png(width: int, height: int, kind: int, *chunks: bytes) -> bytes:
    """A PNG of 8 bits with a head that may lie; `kind` is 0 for grey, 2 for RGB."""
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + a_chunk(b"IHDR", header) + b"".join(chunks) + a_chunk(b"IEND", b"")


def a_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
