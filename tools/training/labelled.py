"""Reads labelled pictures, folders of labels and YOLO data sets; refuses by name what nothing can be learned from."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from daemon.units import count_text
from experts.errors import ImageError
from experts.vision.preprocess import to_square
from tools.pictures import MARK_IGNORED, SUFFIXES, find_pictures, is_hidden, left_out_lines, orientation, read_pixels
from tools.training import TrainingError
from tools.training.fit import Pictures, Targets

#: The folder of undecided pictures, by component: a network learns nothing from its own answers.
UNSORTED = "unsorted"
DIGEST_BYTES = 8
_MAX_LABEL = 128
_AT_LEAST = {1: "one at least", 2: "two at least"}
#: Names of the label that passes, if a folder is not told another.
_GOOD_NAMES = ("ok", "good", "pass")


@dataclass(frozen=True, slots=True)
class LabelledPictures:
    """Pictures (N, S, S, 3) uint8 RGB with their labels' numbers and files.

    `good` is the number of the label that passes, None if no label is named so; `side` is the longer side of a picture
    before it was made square, in pixels (the median); `digests` tell pictures apart, whatever their files.
    """

    labels: tuple[str, ...]
    pictures: Pictures
    targets: Targets
    files: tuple[Path, ...]
    digests: tuple[bytes, ...]
    good: int | None
    side: float

    def counts(self) -> dict[str, int]:
        return {label: int((self.targets == number).sum()) for number, label in enumerate(self.labels)}


def read_labelled(
    folder: Path, input_size: int, *, min_labels: int = 2, good: str | None = None
) -> tuple[LabelledPictures, list[str]]:
    """Read `folder/LABEL/*.png`, and return warnings. Raises TrainingError."""
    labels, passes = _labels(folder, min_labels, good)
    first_of: dict[bytes, tuple[Path, int]] = {}
    squares: list[np.ndarray] = []
    sizes: list[tuple[int, int]] = []
    warnings: list[str] = []
    turned = 0
    for number, label in enumerate(labels):
        files, left_out = find_pictures(folder / label, depth=1)
        warnings += [f"{folder / label}: {line}" for line in left_out_lines(left_out)]
        if len(files) < 2:
            raise TrainingError(
                f"{folder / label}: holds {count_text(len(files), 'image')}, two at least are needed (png, jpg, bmp,"
                " tif, webp)"
            )
        for file in files:
            content, pixels = _decoded(file)
            turned += orientation(content) != 1
            digest = hashlib.sha256(pixels.tobytes()).digest()[:DIGEST_BYTES]
            first, other = first_of.setdefault(digest, (file, number))
            if other != number:
                raise TrainingError(f"{first} and {file} are the same picture under two labels: delete the wrong one")
            if first != file:
                warnings.append(f"{file} is the same picture as {first.name}, and is left out")
                continue
            sizes.append((pixels.shape[1], pixels.shape[0]))
            squares.append(to_square(pixels, "classify", input_size))
    if len(set(sizes)) > 1:
        least, most = (f"{width} x {height}" for width, height in (min(sizes), max(sizes)))
        warnings.append(f"{folder}: pictures from {least} to {most} pixels are all made {input_size} x {input_size}")
    if turned:
        warnings.append(f"{folder}: {count_text(turned, 'picture')} with an orientation mark: {MARK_IGNORED}")
    return LabelledPictures(
        labels=tuple(labels),
        pictures=np.stack(squares),
        targets=np.array([number for _, number in first_of.values()]),
        files=tuple(file for file, _ in first_of.values()),
        digests=tuple(first_of),
        good=None if passes is None else labels.index(passes),
        side=float(np.median([max(size) for size in sizes])),
    ), warnings


def _decoded(file: Path) -> tuple[bytes, Pictures]:
    try:
        content = file.read_bytes()
        return content, read_pixels(content)
    except ImageError as error:
        raise TrainingError(f"{file}: {error.reason}; take it out of the folder") from error
    except OSError as error:
        raise TrainingError(f"{file}: {error.strerror or error}") from error


def _labels(folder: Path, min_labels: int, good: str | None) -> tuple[list[str], str | None]:
    """Return the labels of a folder, and the one that passes. Raises TrainingError."""
    folders = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    labels = sorted(path.name for path in folders if not is_hidden(Path(path.name)))
    if len(labels) < min_labels:
        raise TrainingError(
            f"{folder}: expected a subfolder of images for each label, {_AT_LEAST[min_labels]}; found {labels}"
        )
    by_lower: dict[str, str] = {}
    for label in labels:
        other = by_lower.setdefault(label.casefold(), label)
        if other != label:
            raise TrainingError(
                f"{folder}: the labels {other} and {label} differ only in case: make one folder of them"
            )
    if long := [label for label in labels if len(label) > _MAX_LABEL]:
        raise TrainingError(f"{folder / long[0]}: a label has at most {_MAX_LABEL} characters: rename the folder")
    passing = [label for label in labels if label.casefold() in _GOOD_NAMES]
    if good is None and len(passing) > 1:
        raise TrainingError(f"{folder}: {' and '.join(passing)} both sound as if they pass: name one with --good")
    if good is not None and good not in labels:
        raise TrainingError(f"{folder}: has no label {good} (--good); it has {', '.join(labels)}")
    return labels, good or next(iter(passing), None)


def held_back(data: LabelledPictures, share: float) -> np.ndarray:
    """Return a mask of the pictures of each label that a backbone does not learn from, one of three or more at least.

    They are of the same boards in every folder, as far as files are named by boards.
    """
    order = [hashlib.sha256(board.encode()).digest() for board in map(board_of, data.files)]
    mask = np.zeros(len(order), bool)
    for target in np.unique(data.targets):
        places = sorted(np.nonzero(data.targets == target)[0].tolist(), key=lambda place: order[place])
        mask[places[: max(round(len(places) * share), int(len(places) > 2))]] = True
    return mask


def board_of(file: Path) -> str:
    """Return a picture's board, as `coserve camera` and `coserve dataset export` name files:
    SERIAL.DESIGNATOR.png and NUMBER-SERIAL.png. Pictures named otherwise are each of a board of its own.
    """
    if (numbered := re.fullmatch(r"\d+-(.+)", file.stem)) is not None:
        return numbered[1]
    return file.name.split(".")[0] if file.name.count(".") > 1 else f"{file.parent.name}/{file.name}"


def folds(data: LabelledPictures, count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield a mask of the pictures that each fold holds out; labels are spread evenly.

    Pictures of one board are never on both sides.
    """
    boards = list(map(board_of, data.files))
    members: dict[str, list[int]] = {}
    for place in rng.permutation(len(boards)):
        members.setdefault(boards[place], []).append(int(place))
    held = np.zeros((count, len(data.labels)), np.int64)
    fold_of = np.zeros(len(boards), np.int64)
    for places in sorted(members.values(), key=len, reverse=True):
        labels = data.targets[places]
        fold = int(np.argmin(held[:, labels].sum(1)))
        held[fold] += np.bincount(labels, minlength=len(data.labels))
        fold_of[places] = fold
    for fold in range(count):
        yield fold_of == fold


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
            files += find_pictures(place_).files
        elif place_.is_file() and place_.suffix == ".txt":
            lines = place_.read_text(encoding="utf-8").splitlines()
            files += [place_.parent / line.strip() for line in lines if line.strip()]
        else:
            raise TrainingError(f"{where}: {place_} is neither a folder of images nor a .txt that lists them")
    if not files:
        raise TrainingError(f"{where}: holds no image ({', '.join(sorted(SUFFIXES))})")
    return tuple(Photograph(image, _read_boxes(_label_file(image, where), classes)) for image in files)


def _label_file(image: Path, where: str) -> Path:
    parts = list(image.parts)
    if "images" not in parts[:-1]:
        raise TrainingError(f"{where}: {image} lies in no folder named images, so its labels cannot be found")
    index = len(parts) - 2 - parts[-2::-1].index("images")
    labels = Path(*parts[:index], "labels")
    if not labels.is_dir():
        raise TrainingError(f"{where}: there is no folder {labels} with the labels of {Path(*parts[: index + 1])}")
    return labels.joinpath(*parts[index + 1 :]).with_suffix(".txt")


def _read_boxes(file: Path, classes: int) -> NDArray[np.float32]:
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
