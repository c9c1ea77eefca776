"""Samples for the profiler: the images of a folder, or rendered parts, as the payloads that cameras send."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from experts.spec import ExpertSpec
from experts.vision.preprocess import Prepared, prepare
from tools.experts.measure import SAMPLES, images_below


@dataclass(frozen=True, slots=True)
class Samples:
    """Encoded images, and in words where they are from."""

    payloads: tuple[bytes, ...]
    origin: str

    def prepared(self, spec: ExpertSpec, count: int) -> list[Prepared]:
        """Decoded and fitted to an expert, as an executor does before a batch; images repeat where there are few."""
        return [prepare(self.payloads[number % len(self.payloads)], "image", None, spec) for number in range(count)]


def read_samples(folder: Path) -> Samples:
    """Return images below a folder, spread evenly over their names. Raises ValueError if none can be decoded."""
    payloads = tuple(payload for payload, _ in images_below(folder))
    if not payloads:
        raise ValueError(f"{folder} holds no image that can be decoded; name another folder, or none")
    return Samples(payloads, f"{len(payloads)} images of {folder}")


def rendered_samples() -> Samples:
    """Return parts of rendered boards, for a line without photos."""
    from tools.camera.rendered import rendered_images

    images = rendered_images(boards=1, seed=11, prefix="profile", lot=None)
    payloads = tuple(image.payload for image in islice(images, SAMPLES))
    return Samples(payloads, f"{len(payloads)} rendered parts (no photos: name some with --images)")
