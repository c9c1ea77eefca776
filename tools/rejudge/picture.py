"""A picture in `images/` as the payload that it was: what the camera sent, or why it cannot be judged again."""

import hashlib
from pathlib import Path

from experts.vision.decode import Encoding

Payload = tuple[bytes, Encoding, tuple[int, int, int] | None]


class PictureError(Exception):
    """The file is gone or is not what the camera sent; the text says which."""


def read_picture(images: Path, image_path: str, sha256: str) -> Payload:
    """As the executors take it: payload, encoding and the shape of raw pixels. Raises PictureError.

    `image_path` is the database's, relative to the folder that `images` lies in.
    """
    file = images.parent / image_path
    if not file.resolve().is_relative_to(images.resolve()):
        raise PictureError(f"{image_path} lies outside {images}")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise PictureError(f"{file}: {error.strerror or error}") from error
    payload, encoding, shape = _raw(content) if file.suffix in (".pgm", ".ppm") else (content, "image", None)
    if hashlib.sha256(payload).hexdigest() != sha256:
        raise PictureError(f"{file}: is not what the camera sent (its sha256 differs)")
    return payload, encoding, shape


def _raw(content: bytes) -> Payload:
    """Raw pixels stand behind three lines: kind, width and height, 255."""
    try:
        kind, size, _, payload = content.split(b"\n", 3)
        width, height = map(int, size.split())
    except ValueError as error:
        raise PictureError("its header is damaged") from error
    return payload, "raw", (height, width, 1 if kind == b"P5" else 3)
