"""A picture in `images/` as the payload that it was: what the camera sent, or why it cannot be judged again."""

import hashlib
from pathlib import Path

from daemon.storage.raw_pixels import as_sent
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
    try:
        payload, shape = as_sent(content, file.suffix)
    except ValueError as error:
        raise PictureError(f"{file}: its header is damaged") from error
    if hashlib.sha256(payload).hexdigest() != sha256:
        raise PictureError(f"{file}: is not what the camera sent (its sha256 differs)")
    return payload, "image" if shape is None else "raw", shape
