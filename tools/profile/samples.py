"""Samples for the profiler, encoded as cameras send them: the images of a folder, or drawn ones."""

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from experts.spec import ExpertSpec
from experts.vision.preprocess import Prepared, prepare
from tools.experts.measure import SAMPLES, images_below


@dataclass(frozen=True, slots=True)
class Samples:
    """Encoded images, and a description of their source."""

    payloads: tuple[bytes, ...]
    origin: str

    def prepared(self, spec: ExpertSpec, count: int) -> list[Prepared]:
        """Return `count` images decoded and fitted to an expert, as before a batch; few images repeat."""
        return [prepare(self.payloads[number % len(self.payloads)], "image", None, spec) for number in range(count)]


def read_samples(folder: Path) -> Samples:
    """Return images below a folder, spread evenly over their names. Raises ValueError if none can be decoded."""
    payloads = tuple(payload for payload, _ in images_below(folder))
    if not payloads:
        raise ValueError(f"{folder} holds no image that can be decoded; name another folder, or none")
    return Samples(payloads, f"{len(payloads)} images of {folder}")


def drawn_samples() -> Samples:
    """Draw pictures of the size of parts, for a line without photos: smooth colours with camera noise."""
    random, payloads = np.random.default_rng(11), list[bytes]()
    for side in np.linspace(64, 128, SAMPLES).astype(int):
        colours = cv2.resize(random.integers(0, 256, (9, 9, 3)).astype(np.float32), (side, side))
        noisy = colours + random.normal(0, 3, colours.shape)
        payloads.append(cv2.imencode(".png", np.clip(noisy, 0, 255).astype(np.uint8))[1].tobytes())
    return Samples(tuple(payloads), f"{len(payloads)} drawn pictures (no photos: name some with --images)")
