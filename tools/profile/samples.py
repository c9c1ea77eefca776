"""Samples for the profiler: the images of a folder, or rendered parts, as the payloads that cameras send."""

from dataclasses import dataclass
from pathlib import Path

from experts.errors import ImageError
from experts.spec import ExpertSpec
from experts.vision.preprocess import Prepared, decode, prepare
from tools.camera.layout import SUFFIXES

#: More images say nothing more of time.
_MAX_IMAGES = 32


@dataclass(frozen=True, slots=True)
class Samples:
    """Encoded images, and in words where they are from."""

    payloads: tuple[bytes, ...]
    origin: str

    def prepared(self, spec: ExpertSpec, count: int) -> list[Prepared]:
        """Decoded and fitted to an expert, as an executor does before a batch; images repeat where there are few."""
        return [prepare(self.payloads[number % len(self.payloads)], "image", None, spec) for number in range(count)]


def read_samples(folder: Path) -> Samples:
    """The first images below a folder, by name. Raises ValueError if none can be decoded."""
    payloads: list[bytes] = []
    for file in sorted(folder.rglob("*")):
        if len(payloads) == _MAX_IMAGES:
            break
        if file.suffix.lower() in SUFFIXES and file.is_file():
            payload = file.read_bytes()
            try:
                decode(payload, "image")
            except ImageError:
                continue
            payloads.append(payload)
    if not payloads:
        raise ValueError(f"{folder} holds no image that can be decoded; name another folder, or none")
    return Samples(tuple(payloads), f"{len(payloads)} images of {folder}")


def rendered_samples() -> Samples:
    """Return parts of rendered boards, for a line without photos."""
    from tools.camera.rendered import rendered_images

    payloads: list[bytes] = []
    for image in rendered_images(boards=1, seed=11, prefix="profile", lot=None):
        payloads.append(image.payload)
        if len(payloads) == _MAX_IMAGES:
            break
    return Samples(tuple(payloads), f"{len(payloads)} rendered parts (no photos: name some with --images)")
