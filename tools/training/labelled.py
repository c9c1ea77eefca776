"""Reads labelled pictures, folders of labels and YOLO data sets; refuses by name what nothing can be learned from."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from daemon.units import count_text
from experts.errors import ImageError
from experts.vision.preprocess import to_square
from routing_rules.load import Document, read_yaml_text
from tools.experts.measure import label_folders
from tools.pictures import MARK_IGNORED, SUFFIXES, find_pictures, is_hidden, left_out_lines, orientation, read_pixels
from tools.terminal.names import read_text
from tools.training import TrainingError, class_names
from tools.training.fit import Pictures, Targets

#: The folder of undecided pictures, by component: a network learns nothing from its own answers.
UNSORTED = "unsorted"
DIGEST_BYTES = 8
#: The last EXIF mark that leaves a picture's width and height in their places.
_HALF_TURN = 4
#: Files beside labels that hold names of classes.
_OTHER_TEXTS = ("classes.txt", "predefined_classes.txt")
_SHOWN = 5
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
    folders = label_folders(folder, min_labels)
    labels = list(folders)
    passes = _passing(folder, labels, good)
    first_of: dict[bytes, tuple[Path, int]] = {}
    squares: list[np.ndarray] = []
    sizes: list[tuple[int, int]] = []
    warnings: list[str] = []
    turned = 0
    for number, label in enumerate(labels):
        files, left_out = find_pictures(folders[label], 1)
        warnings += [f"{folders[label]}: {line}" for line in left_out_lines(left_out)]
        if len(files) < 2:
            lie_deeper = len(find_pictures(folders[label]).files) > len(files)
            how = f"others lie deeper: move them up, or name it instead of {folder}" if lie_deeper else "png, jpg …"
            count = count_text(len(files), "image")
            raise TrainingError(f"{folder / label}: holds {count}, two at least are needed ({how})")
        for file in files:
            content, pixels = read_picture(file)
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


def read_picture(file: Path) -> tuple[bytes, Pictures]:
    """Return a file's bytes and pixels (H, W, 3). Raises TrainingError."""
    try:
        content = file.read_bytes()
        return content, read_pixels(content)
    except ImageError as error:
        raise TrainingError(f"{file}: {error.reason}; take it out of the folder") from error
    except OSError as error:
        raise TrainingError(f"{file}: {error.strerror or error}") from error


def _passing(folder: Path, labels: Sequence[str], good: str | None) -> str | None:
    """Return the label that passes, None if no label is named so. Raises TrainingError."""
    passing = [label for label in labels if label.casefold() in _GOOD_NAMES]
    if good is None and len(passing) > 1:
        raise TrainingError(f"{folder}: {' and '.join(passing)} both sound as if they pass: name one with --good")
    if good is not None and good not in labels:
        raise TrainingError(f"{folder}: has no label {good} (--good); it has {', '.join(labels)}")
    return good or next(iter(passing), None)


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
    """A data set as ultralytics lays it out, read; `held_out` is its `val`. `notes` say what was left out or odd."""

    classes: tuple[str, ...]
    train: tuple[Photograph, ...]
    held_out: tuple[Photograph, ...]
    notes: tuple[str, ...] = ()


def read_yolo_data(file: Path) -> YoloData:
    """Return the data set of a YAML file with `path`, `train`, `val` and `names`.

    Raises TrainingError, which names the file and the line.

    Labels lie where ultralytics looks for them: `labels` in place of the last `images` in a path, suffix `.txt`.
    An image without a label file has nothing on it. Of outlines and rotated boxes the upright box around them counts.
    """
    document = read_yaml_text(read_text(file), str(file), as_written=True)
    if document.problems:
        raise TrainingError("\n".join(map(str, document.problems)))
    if missing := {"train", "val", "names"} - set(document.keys(())):
        expected = "expected path, train, val and names (of other formats `coserve dataset import` makes such a file)"
        raise TrainingError(f"{file}: has no {', '.join(sorted(missing))}; {expected}")
    if "kpt_shape" in document.data:
        raise _wrong(document, "poses are not read: export boxes", "kpt_shape")
    classes, notes = _classes(document), list[str]()
    root = file.parent / (base := str(document.data.get("path") or "."))
    if not root.is_dir():
        root = file.parent
        notes.append(f"{file}: path: {base} is not on this PC: read from {root}")
    train, held_out = (_photographs(document, side, root, len(classes), notes) for side in ("train", "val"))
    if not any(len(photograph.boxes) for photograph in train):
        raise TrainingError(f"{file}: no image of train has a label; expected .txt files in a folder named labels")
    if both := {each.file for each in train} & {each.file for each in held_out}:
        notes.append(f"{file}: {count_text(len(both), 'picture')} of val are in train too: figures of val say little")
    return YoloData(classes, train, held_out, tuple(notes))


def _wrong(document: Document, message: str, *path: str | int) -> TrainingError:
    return TrainingError(str(document.problem(path, f"{path[0]}: {message}", key=True)))


def _classes(document: Document) -> tuple[str, ...]:
    classes = class_names(document.data["names"], document.problem(("names",), "names", key=True))
    if document.data.get("nc") not in (None, str(len(classes))):
        raise _wrong(document, f"there are {len(classes)} names, not {document.data['nc']}: correct one of them", "nc")
    return classes


def _photographs(document: Document, side: str, root: Path, classes: int, notes: list[str]) -> tuple[Photograph, ...]:
    """Return the photographs of a folder of images, a .txt with a path per line, or a list of such."""
    entry, where, files = document.data[side], f"{document.name}: {side}", list[Path]()
    for name in map(str, entry if isinstance(entry, list) else [entry]):
        place = find_brought(root, name)
        if place is not None and place.is_dir():
            found, left_out = find_pictures(place)
            notes += [f"{where}: {line}" for line in left_out_lines(left_out)]
            files += found
        elif place is not None and place.suffix == ".txt":
            files += _listed(place, root)
        else:
            text = f"{root / name} is neither a folder of images nor a .txt that lists them"
            if "\\" in (written := f"{document.data.get('path') or ''} {name}"):
                text += f"; {written.strip()}: a drive letter or backslashes are of Windows, name the folder on this PC"
            raise _wrong(document, text, side)
        if place != root / name:
            notes.append(f"{where}: {name} is read from {place}")
    if not files:
        raise _wrong(document, f"holds no image ({', '.join(sorted(SUFFIXES))})", side)
    if twice := [file for file, count in Counter(files).items() if count > 1]:
        raise _wrong(document, f"{twice[0]} is there twice: name each picture once", side)
    labels = _label_files(files, where, notes)
    return tuple(Photograph(image, _read_boxes(labels[image], image, classes)) for image in files)


def _listed(file: Path, root: Path) -> Iterator[Path]:
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if name := line.strip():
            found = find_brought(file.parent, name) or find_brought(root, name)
            if found is None:
                raise TrainingError(f"{file}:{number}: there is no picture {name}")
            yield found


def find_brought(root: Path, name: str, least: int = 2) -> Path | None:
    """Return what `name` is in `root`: as written, or as Windows, a Mac or another PC wrote its path.

    Of such a path the last `least` parts at least must fit: `../train/images` of Roboflow is `train/images`.
    """
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    names = [name, *("/".join(parts[start:]) for start in range(max(len(parts) - least, 0) + 1))]
    forms = [name, *(normalize(form, each) for each in names for form in ("NFC", "NFD"))]
    return next((place for place in map(root.joinpath, forms) if place.exists()), None)


def _label_files(images: Sequence[Path], where: str, notes: list[str]) -> dict[Path, Path | None]:
    """Return each image's label file. Refuses half of them missing, notes fewer, and files that fit no image."""
    places = {image: _label_file(image, where) for image in images}
    folders = {place.parent: image.parent for image, place in places.items()}
    texts = {folder: _texts(folder) for folder in folders}
    labels = {image: texts[place.parent].get(normalize("NFC", place.name)) for image, place in places.items()}
    without, strays = [image.name for image in images if labels[image] is None], list[str]()
    for folder, pictures in folders.items():
        fitting = {normalize("NFC", f"{picture.stem}.txt") for picture in find_pictures(pictures, 1).files}
        strays += texts[folder].keys() - fitting
    text = f"{where}: {len(without)} of {len(images)} pictures have no label file{some(without)}"
    text += f"; label files without a picture{some(sorted(strays))}" if strays else ""
    if len(without) * 2 >= len(images):
        raise TrainingError(f"{text}. Give both one name, label files .txt; an empty one says: nothing is on it")
    notes += [text] if without or strays else []
    return labels


def _texts(folder: Path) -> dict[str, Path]:
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    files = [file for file in files if file.suffix.lower() == ".txt" and not is_hidden(Path(file.name))]
    return {normalize("NFC", file.name): file for file in files if file.name not in _OTHER_TEXTS}


def _label_file(image: Path, where: str) -> Path:
    parts = list(image.parts)
    if "images" not in parts[:-1]:
        raise TrainingError(f"{where}: {image} lies in no folder named images, so its labels cannot be found")
    index = len(parts) - 2 - parts[-2::-1].index("images")
    labels = Path(*parts[:index], "labels")
    if not labels.is_dir():
        raise TrainingError(f"{where}: there is no folder {labels} with the labels of {Path(*parts[: index + 1])}")
    return labels.joinpath(*parts[index + 1 :]).with_suffix(".txt")


def _read_boxes(file: Path | None, image: Path, classes: int) -> NDArray[np.float32]:
    """Return the boxes of lines `class x y width height`, or of outlines `class x1 y1 x2 y2 …`, in fractions."""
    rows: list[tuple[float, ...]] = []
    for number, line in enumerate(read_text(file).splitlines() if file else (), 1):
        if not line.strip():
            continue
        try:
            kind, *values = (float(word) for word in line.split())
        except ValueError:
            kind, values = -1.0, []
        has_key_points = len(values) % 3 == 1 and all(value in (0, 1, 2) for value in values[6::3])
        outline = len(values) >= 6 and len(values) % 2 == 0 and not has_key_points
        if not (len(values) == 4 or outline) or kind not in range(classes):
            expected = f"expected `class x y width height` with a class from 0 to {classes - 1}, or an outline"
            raise TrainingError(f"{file}:{number}: {expected}, not {line!r}")
        x, y, *size = values
        corners = (x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)
        if outline:
            corners = (min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2]))
        is_empty = corners[0] >= corners[2] or corners[1] >= corners[3]
        if is_empty or not all(-0.01 <= value <= 1.01 for value in (*values, *corners)):
            expected = "expected fractions of the image, 0 to 1, with a size, of a box inside it"
            raise TrainingError(f"{file}:{number}: {expected}, not {line!r}")
        rows.append((*(min(max(corner, 0.0), 1.0) for corner in corners), kind))
    if rows:
        refuse_turned(image)
    return np.array(rows, np.float32).reshape(-1, 5)


def refuse_turned(file: Path, size: tuple[int, int] | None = None, stated: tuple[int, int] | None = None) -> None:
    """Refuse boxes that are stated for a picture of another size, or of one that other programs turn by its EXIF mark.

    We read pixels as stored, most programs that draw boxes do not. Raises TrainingError.
    """
    mark = orientation(file.read_bytes())
    is_other = stated is not None and size is not None and stated != size
    is_told = stated is not None and stated != stated[::-1] and mark > _HALF_TURN
    if is_other or (mark > 1 and not is_told):
        why = f"its EXIF mark {mark} turns or mirrors it in other programs, so its boxes may lie elsewhere"
        if is_other and stated and size:
            why = f"has {size[0]} x {size[1]} pixels, its boxes are for {stated[0]} x {stated[1]}"
        remedy = " (`mogrify -auto-orient FILE` stores it as others show it; `exiftool -Orientation= FILE` lets them"
        remedy = f"{remedy} show it as it is stored)" if mark > 1 else ""
        raise TrainingError(f"{file}: {why}: bring the picture as it was drawn on{remedy}")


def some(names: Sequence[str]) -> str:
    """Return ` (a, b, …)` of the first names, nothing of none."""
    return f" ({', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''})" if names else ""
