"""Reads data sets of other programs. Every problem is a CommandError that names the file and the picture's number."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from unicodedata import normalize

from daemon.units import count_text
from experts.errors import ImageError
from tools.dataset import Format
from tools.dataset.write import LabelledBox, Picture, read_picture
from tools.pictures import find_pictures, left_out_lines
from tools.terminal.console import CommandError
from tools.terminal.names import file_name, legal_name, read_text
from tools.training import class_names
from tools.training.labelled import UNSORTED, board_of, find_brought, read_yolo_data, refuse_turned, some

#: How far a box may reach beyond the edge of its picture, pixels: programs round.
_ROUNDING = 1.0
_MISTAKES = (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, OSError, ImageError)
#: The refusal of formats that only CVAT, Label Studio and others write.
_OWN_FORMATS = "is a file of CVAT, Label Studio or another program in its own format: export as COCO or YOLO there"
#: Folder names that are no component type.
_SIDES = ("images", "train", "val", "valid", "test", UNSORTED)
#: A picture's name and label; its boxes, None if nobody looked for any, and the width and height that they are for.
_Named = tuple[str, str | None, list[LabelledBox] | None, tuple[int, int] | None]


def read_dataset(
    file: Path, form: Format, images: Path | None = None, say: Callable[[str], None] = lambda _: None
) -> list[Picture]:
    """Read the data set that `file` describes; its pictures lie in `images`, or the folder `images` beside it.

    For `folders`, `file` is the folder itself; for `yolo`, pictures lie anywhere in the folder of `data.yaml`. Boxes
    that a program proposed count as drawn: a person has looked at the data set. `say` tells that person what was left
    out. Raises CommandError.
    """
    default = {"folders": file, "yolo": file.parent}.get(form, file.parent / "images")
    folder, pictures = images or default, list[Picture]()
    reader = {"folders": _folders, "yolo": _yolo, "coco": _coco}[form]
    try:
        for named in reader(file, folder, say):
            pictures.append(_picture(folder, named))
    except _MISTAKES as error:
        text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CommandError(f"{file}: not in the format {form}, at picture {len(pictures) + 1}: {text}") from error
    return pictures


def _picture(folder: Path, named: _Named) -> Picture:
    name, label, boxes, stated = named
    file = folder / name
    if ".." in Path(name).parts or not file.resolve().is_relative_to(folder.resolve()):
        raise PermissionError(f"{name!r} leads out of {folder}, where its pictures are read: move them there")
    _, _, width, height = read_picture(file)
    if boxes:
        refuse_turned(file, (width, height), stated)
    for kind, x1, y1, x2, y2, _ in boxes or ():
        is_inside = -_ROUNDING <= x1 < x2 <= width + _ROUNDING and -_ROUNDING <= y1 < y2 <= height + _ROUNDING
        if not is_inside or max(x2, y2) <= 1:  # fractions
            shown = ", ".join(f"{at:.1f}" for at in (x1, y1, x2, y2))
            raise ValueError(f"expected the box {kind} ({shown}) in pixels, inside {file} ({width} x {height})")
    stem = re.sub(r"^[0-9a-f]{8}-(?=\d+-)", "", file.stem)  # Label Studio adds it to uploaded files' names
    board = board_of(file.with_stem(stem))
    folders = [part for part in PurePosixPath(name).parts[:-1] if part not in (*_SIDES, label)]
    return Picture(file, file_name(stem), legal_name(folders[-1], file) if folders else "", board, label, boxes)


def _folders(_: Path, folder: Path, say: Callable[[str], None]) -> Iterator[_Named]:
    files, left_out = find_pictures(folder)
    for line in left_out_lines(left_out):
        say(f"{folder}: {line}")
    _refuse_twice("folder", (normalize("NFC", str(place)) for place in {file.parent for file in files}))
    for file in files:
        first, *rest = file.relative_to(folder).parts
        if not rest:
            raise ValueError(f"{first} lies in no folder named after its label: move it to LABEL/{first}")
        label = None if first == UNSORTED else legal_name(file.parent.name, file)
        yield file.relative_to(folder).as_posix(), label, None, None


def _yolo(file: Path, folder: Path, say: Callable[[str], None]) -> Iterator[_Named]:
    data = read_yolo_data(file)
    for note in data.notes:
        say(note)
    for picture in {each.file: each for each in (*data.train, *data.held_out)}.values():
        _, _, width, height = read_picture(picture.file)
        boxes = picture.boxes * (width, height, width, height, 1)
        yield (
            Path(os.path.relpath(picture.file, folder)).as_posix(),
            None,
            [LabelledBox(data.classes[int(kind)], x1, y1, x2, y2) for x1, y1, x2, y2, kind in boxes.tolist()],
            None,
        )


def _coco(file: Path, folder: Path, say: Callable[[str], None]) -> Iterator[_Named]:
    text = read_text(file)
    data = None if text.lstrip().startswith("<") else json.loads(text)
    if not isinstance(data, dict) or "annotations" not in data:
        raise CommandError(f"{file}: {_OWN_FORMATS} (menus: docs/experts.md)")
    names = _category_names(file, data)
    boxes: dict[Any, list[LabelledBox]] = {each["id"]: [] for each in data["images"]}
    files = {each["id"]: str(each["file_name"]) for each in data["images"]}
    for each in data["annotations"]:
        if each["category_id"] not in names or each["image_id"] not in boxes:
            raise ValueError(f"of annotation {each.get('id')} the category or the image is not in the file")
        where = f"annotation {each.get('id')} of {files[each['image_id']]}"
        boxes[each["image_id"]].append(LabelledBox(names[each["category_id"]], *_corners(each, where)))
    if crowds := sum(bool(each.get("iscrowd")) for each in data["annotations"]):
        say(f"{file}: {count_text(crowds, 'annotation')} marked iscrowd: each box counts as one object")
    # Label Studio writes folders before a name, other programs the path on another PC.
    found = {key: find_brought(folder, f"./{name}", least=1) for key, name in files.items()}
    missing = [files[key] for key, place in found.items() if place is None]
    _refuse_twice("picture", (normalize("NFC", str(place)) for place in found.values() if place is not None))
    if missing:
        text = f"{len(missing)} of {len(files)} pictures are not in {folder}{some(missing)}"
        if len(missing) * 2 >= len(files):
            raise ValueError(f"{text}: name the folder of all pictures with --images")
        say(f"{file}: left out: {text}")
    if others := {*find_pictures(folder).files} - {*found.values()}:
        shown = some(sorted(each.relative_to(folder).as_posix() for each in others))
        say(f"{file}: {count_text(len(others), 'picture')} of {folder} not in it, left out{shown}")
    for each in data["images"]:
        if (place := found[each["id"]]) is not None:
            is_stated = each.get("width") and each.get("height")
            stated = (int(each["width"]), int(each["height"])) if is_stated else None
            yield place.relative_to(folder).as_posix(), None, boxes[each["id"]], stated


def _category_names(file: Path, data: Mapping[str, Any]) -> dict[Any, str]:
    """Refuse ids that come twice; return the names of categories with boxes: Roboflow names one more as another."""
    for what, key in (("category", "categories"), ("image", "images"), ("annotation", "annotations")):
        _refuse_twice(what, (each["id"] for each in data[key] if "id" in each))
    used = {each["category_id"] for each in data["annotations"]}
    categories = {each["id"]: each["name"] for each in data["categories"] if each["id"] in used}
    names = class_names([*categories.values()], f"{file}: categories") if categories else ()
    return dict(zip(categories, names, strict=True))


def _corners(annotation: Mapping[str, Any], where: str) -> tuple[float, float, float, float]:
    if any(place.get("rotation") for place in (annotation, annotation.get("attributes") or {})):
        raise ValueError(f"{where} is a rotated box: only upright boxes are read, draw it so")
    if len(box := annotation.get("bbox") or ()) != 4:
        raise ValueError(f"{where}: expected a bbox of x, y, width, height, found {box}")
    x, y, width, height = map(float, box)
    return x, y, x + width, y + height


def _refuse_twice(what: str, values: Iterable[Hashable]) -> None:
    if twice := [value for value, count in Counter(values).items() if count > 1]:
        raise ValueError(f"the {what} {twice[0]} is there twice: it is not clear which one counts")
