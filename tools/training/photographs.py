"""Reads the photographs of a YOLO data set, and makes training samples of them: moved, mirrored, in another light."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml
from numpy.typing import NDArray

from experts.errors import ImageError
from experts.vision.architectures import YOLO_STRIDE_PIXELS
from experts.vision.preprocess import LETTERBOX_GREY, decode, fit, place
from tools.training import TrainingError
from tools.training.detector_loop import Image, Sample
from tools.training.labelled import SUFFIXES

#: Share of crops around an object; the others lie anywhere.
_OBJECT_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Photograph:
    """A labelled image file; boxes are (n, 5) float32 rows of x1 y1 x2 y2 class, in fractions of the image."""

    file: Path
    boxes: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class YoloData:
    """A data set as ultralytics lays it out, read; `held_out` is its `val`."""

    classes: tuple[str, ...]
    train: tuple[Photograph, ...]
    held_out: tuple[Photograph, ...]


def read_yolo_data(file: Path) -> YoloData:
    """Return the data set of a YAML file with `path`, `train`, `val` and `names`.

    Raises TrainingError, which names the file and the line.

    Labels lie where ultralytics looks for them: `labels` in place of the last `images` in a path, suffix `.txt`.
    An image without a label file has nothing on it.
    """
    try:
        document: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise TrainingError(f"{file}: is not YAML ({error})") from error
    missing = {"train", "val", "names"} - set(document if isinstance(document, Mapping) else ())
    if missing:
        raise TrainingError(f"{file}: has no {', '.join(sorted(missing))}; expected path, train, val and names")
    names = document["names"]
    classes = tuple(str(names[key]) for key in sorted(names)) if isinstance(names, Mapping) else tuple(map(str, names))
    root = file.parent / str(document.get("path") or ".")
    train, held_out = (_photographs(document[part], root, f"{file}: {part}", len(classes)) for part in ("train", "val"))
    if not any(len(photograph.boxes) for photograph in train):
        raise TrainingError(f"{file}: no image of train has a label; expected .txt files in a folder named labels")
    return YoloData(classes, train, held_out)


def _photographs(entry: Any, root: Path, where: str, classes: int) -> tuple[Photograph, ...]:
    """Return the photographs of a folder of images, a .txt with a path per line, or a list of such."""
    files: list[Path] = []
    for name in entry if isinstance(entry, list) else [entry]:
        place_ = root / str(name)
        if place_.is_dir():
            files += sorted(path for path in place_.rglob("*") if path.suffix.lower() in SUFFIXES)
        elif place_.is_file() and place_.suffix == ".txt":
            lines = place_.read_text(encoding="utf-8").splitlines()
            files += [place_.parent / line.strip() for line in lines if line.strip()]
        else:
            raise TrainingError(f"{where}: {place_} is neither a folder of images nor a .txt that lists them")
    if not files:
        raise TrainingError(f"{where}: holds no image ({', '.join(sorted(SUFFIXES))})")
    return tuple(Photograph(image, _read_labels(_label_file(image, where), classes)) for image in files)


def _label_file(image: Path, where: str) -> Path:
    parts = list(image.parts)
    if "images" not in parts[:-1]:
        raise TrainingError(f"{where}: {image} lies in no folder named images, so its labels cannot be found")
    index = len(parts) - 2 - parts[-2::-1].index("images")
    labels = Path(*parts[:index], "labels")
    if not labels.is_dir():
        raise TrainingError(f"{where}: there is no folder {labels} with the labels of {Path(*parts[: index + 1])}")
    return labels.joinpath(*parts[index + 1 :]).with_suffix(".txt")


def _read_labels(file: Path, classes: int) -> NDArray[np.float32]:
    """Return the boxes of lines `class x y width height`, or of outlines `class x1 y1 x2 y2 …`, in fractions."""
    rows: list[tuple[float, ...]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines() if file.exists() else (), 1):
        if not line.strip():
            continue
        try:
            kind, *values = (float(word) for word in line.split())
        except ValueError:
            kind, values = -1.0, []
        outline = len(values) >= 6 and len(values) % 2 == 0
        if not (len(values) == 4 or outline) or kind not in range(classes):
            expected = f"expected `class x y width height` with a class from 0 to {classes - 1}"
            raise TrainingError(f"{file}:{number}: {expected}, not {line!r}")
        if not all(-0.01 <= value <= 1.01 for value in values):
            raise TrainingError(f"{file}:{number}: expected fractions of the image, 0 to 1, not {line!r}")
        x, y, *size = values
        corners = (x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)
        if outline:
            corners = (min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2]))
        rows.append((*(min(max(corner, 0.0), 1.0) for corner in corners), kind))
    return np.array(rows, np.float32).reshape(-1, 5)


@dataclass(frozen=True, slots=True)
class Views:
    """How photographs are shown in training: scaled by 1 ± `zoom`, with `symmetry` in eight turned and mirrored views.

    With `crop` only a square of so many pixels of the input is shown, nine times in ten around an object.
    """

    symmetry: bool = False
    zoom: float = 0.4
    crop: int | None = None

    def __post_init__(self) -> None:
        if self.crop is not None and self.crop % YOLO_STRIDE_PIXELS:
            raise TrainingError(f"a crop of {self.crop} pixels is not a multiple of {YOLO_STRIDE_PIXELS}")


@dataclass(frozen=True, slots=True)
class PhotographSampler:
    """Makes inputs of a detector from labelled photographs: letterboxed as in the running line.

    With `jitter` they are also moved, scaled, cropped, mirrored left to right, and lit differently.
    """

    photographs: Sequence[Photograph]
    size: int
    jitter: bool
    views: Views = field(default_factory=Views)
    #: Decoded images, shared by samplers of the same photographs; as many as fit `cache_bytes`.
    cache: dict[Path, Image] = field(default_factory=dict)
    cache_bytes: int = 2 * 2**30

    def __call__(self, rng: np.random.Generator) -> Sample:
        views = self.views
        photograph = self.photographs[int(rng.integers(len(self.photographs)))]
        image = self._image(photograph.file)
        height, width = image.shape[:2]
        boxes = photograph.boxes * np.array([width, height, width, height, 1], np.float32)
        if not self.jitter:
            fitted = fit(image, "detect", self.size)
            to = fitted.placement
            gains = np.array([to.gain_x, to.gain_y, to.gain_x, to.gain_y, 1], np.float32)
            boxes = boxes * gains + np.array([to.left, to.top, to.left, to.top, 0], np.float32)
            return _turned(_mirrored((fitted.pixels, boxes), rng), rng) if views.symmetry else (fitted.pixels, boxes)
        gain = place(width, height, "detect", self.size).gain_x * rng.uniform(1 - views.zoom, 1 + views.zoom)
        size = views.crop or self.size
        room = size - gain * np.array([width, height])
        x_offset, y_offset = rng.random(2) * room
        if views.crop and len(boxes) and rng.random() < _OBJECT_SHARE:
            box = boxes[int(rng.integers(len(boxes)))]
            centre = gain * (box[:2] + box[2:4]) / 2 + size * rng.uniform(-0.45, 0.45, 2)
            x_offset, y_offset = np.clip(size / 2 - centre, np.minimum(room, 0), 0)
        # OpenCV counts from the centres of pixels, boxes from their corners.
        matrix = np.array([[gain, 0, x_offset + gain / 2 - 0.5], [0, gain, y_offset + gain / 2 - 0.5]])
        grey = (LETTERBOX_GREY,) * 3
        pixels = np.asarray(cv2.warpAffine(image, matrix, (size, size), borderValue=grey), np.uint8)
        offsets = np.array([x_offset, y_offset, x_offset, y_offset, 0], np.float32)
        moved = boxes * np.array([gain] * 4 + [1], np.float32) + offsets
        sample = _mirrored((_relit(pixels, rng), _visible(moved, size)), rng)
        return _turned(sample, rng) if views.symmetry else sample

    def _image(self, file: Path) -> Image:
        if file in self.cache:
            return self.cache[file]
        try:
            image = decode(file.read_bytes(), "image")
        except (OSError, ImageError) as error:
            raise TrainingError(f"{file}: {error}; take it out of the data set") from error
        if sum(image_in_cache.nbytes for image_in_cache in self.cache.values()) + image.nbytes <= self.cache_bytes:
            self.cache[file] = image
        return image


def _visible(boxes: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Return the boxes cut at the square's edges, without those of which less than a third is left."""
    cut = boxes.copy()
    cut[:, :4] = cut[:, :4].clip(0, size)
    visible, whole = ((rows[:, 2] - rows[:, 0]) * (rows[:, 3] - rows[:, 1]) for rows in (cut, boxes))
    return cut[(visible >= whole / 3) & (visible >= 4)]


def _relit(pixels: Image, rng: np.random.Generator) -> Image:
    gains = rng.uniform(0.8, 1.2) * rng.uniform(0.95, 1.05, 3)
    return np.clip(pixels * gains + rng.uniform(-15, 15), 0, 255).astype(np.uint8)


def _mirrored(sample: Sample, rng: np.random.Generator) -> Sample:
    pixels, boxes = sample
    if rng.random() < 0.5:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
        boxes[:, [0, 2]] = pixels.shape[1] - boxes[:, [2, 0]]
    return pixels, boxes


def _turned(sample: Sample, rng: np.random.Generator) -> Sample:
    """Turn a square sample by 0, 90, 180 or 270 degrees, counter-clockwise."""
    pixels, boxes = sample
    turns = int(rng.integers(4))
    for _ in range(turns):
        boxes = boxes[:, [1, 2, 3, 0, 4]]
        boxes[:, [1, 3]] = pixels.shape[0] - boxes[:, [1, 3]]
    return np.ascontiguousarray(np.rot90(pixels, turns)), boxes
