"""Reads data sets of other programs. Every problem is a DatasetError that names the file and the picture's number."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from experts.errors import ImageError
from tools.dataset import Format
from tools.dataset.write import DatasetError, LabelledBox, Picture, file_name, read_picture
from tools.pictures import find_pictures
from tools.training.labelled import UNSORTED, board_of

#: How far a box may reach beyond the edge of its picture, pixels: programs round.
_ROUNDING = 1.0
_MISTAKES = (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, OSError, ImageError)
#: The refusal of formats that only CVAT or Label Studio write.
_OWN_FORMATS = "is a file of CVAT or Label Studio in its own format: export COCO there (menus: docs/experts.md)"
#: The prefix that Label Studio's server adds to the name of an uploaded file.
_UPLOADED = "^[0-9a-f]{8}-"
#: Folder names that are no component type.
_SIDES = ("images", "train", "val", "test", UNSORTED)
#: A picture's name, its label, and its boxes; None if nobody has looked for any.
_Named = tuple[str, str | None, list[LabelledBox] | None]


def read_dataset(file: Path, form: Format, images: Path | None = None) -> list[Picture]:
    """Read the data set that `file` describes; its pictures lie in `images`, or the folder `images` beside it.

    For `folders`, `file` is the folder itself; for `yolo`, pictures lie anywhere in the folder of `data.yaml`. Boxes
    that a program proposed count as drawn: a person has looked at the data set. Raises DatasetError.
    """
    default = {"folders": file, "yolo": file.parent}.get(form, file.parent / "images")
    folder, pictures = images or default, list[Picture]()
    reader = {"folders": _folders, "yolo": _yolo, "coco": _coco}[form]
    try:
        for named in reader(file, folder):
            pictures.append(_picture(folder, *named))
    except _MISTAKES as error:
        text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        hint = ": name the folder of all pictures with --images" if isinstance(error, OSError) else ""
        raise DatasetError(f"{file}: not in the format {form}, at picture {len(pictures) + 1}: {text}{hint}") from error
    return pictures


def _picture(folder: Path, name: str, label: str | None, boxes: list[LabelledBox] | None) -> Picture:
    file = folder / name
    if ".." in Path(name).parts or not file.resolve().is_relative_to(folder.resolve()):
        raise PermissionError(f"{name!r} leads out of {folder}")
    _, _, width, height = read_picture(file)
    "".join([label or "", *(box.label for box in boxes or ())]).encode()  # half a character cannot be written
    for kind, x1, y1, x2, y2, _ in boxes or ():
        if not (-_ROUNDING <= x1 < x2 <= width + _ROUNDING and -_ROUNDING <= y1 < y2 <= height + _ROUNDING):
            shown = ", ".join(f"{at:.1f}" for at in (x1, y1, x2, y2))
            raise ValueError(f"the box {kind} ({shown}) is not in {file}, which has {width} x {height} pixels")
    stem = re.sub(rf"{_UPLOADED}(?=\d+-)", "", file.stem)  # or no board would have two pictures
    board = board_of(file.with_stem(stem))
    folders = [part for part in PurePosixPath(name).parts[:-1] if part not in (*_SIDES, label)]
    return Picture(file, file_name(stem), folders[-1] if folders else "", board, label, boxes)


def _folders(_: Path, folder: Path) -> Iterator[_Named]:
    for file in find_pictures(folder).files:
        first, *rest = file.relative_to(folder).parts
        if not rest:
            raise ValueError(f"{first} lies in no folder named after its label: move it to LABEL/{first}")
        yield file.relative_to(folder).as_posix(), None if first == UNSORTED else file.parent.name, None


def _yolo(file: Path, folder: Path) -> Iterator[_Named]:
    from tools.training.labelled import read_yolo_data

    data = read_yolo_data(file)
    for picture in (*data.train, *data.held_out):
        _, _, width, height = read_picture(picture.file)
        boxes = picture.boxes * (width, height, width, height, 1)
        yield (
            Path(os.path.relpath(picture.file, folder)).as_posix(),
            None,
            [LabelledBox(data.classes[int(kind)], x1, y1, x2, y2) for x1, y1, x2, y2, kind in boxes.tolist()],
        )


def _coco(file: Path, folder: Path) -> Iterator[_Named]:
    content = file.read_bytes()
    data = None if content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<") else json.loads(content)
    if not isinstance(data, dict):
        raise DatasetError(f"{file}: {_OWN_FORMATS}")
    names = {each["id"]: str(each["name"]) for each in data["categories"]}
    boxes: dict[Any, list[LabelledBox]] = {each["id"]: [] for each in data["images"]}
    for each in data["annotations"]:
        x, y, width, height = map(float, each["bbox"])
        if each["category_id"] not in names or each["image_id"] not in boxes:
            raise ValueError(f"of annotation {each.get('id')} the category or the image is not in the file")
        boxes[each["image_id"]].append(LabelledBox(names[each["category_id"]], x, y, x + width, y + height))
    for each in data["images"]:
        name = str(each["file_name"])  # Label Studio writes the folder of the pictures too
        yield (name if (folder / name).exists() else name.removeprefix("images/")), None, boxes[each["id"]]
