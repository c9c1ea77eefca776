"""Writes pictures with their labels and boxes, as folders or for another program."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import cv2
import yaml

from daemon.storage.image_archive import as_sent
from experts.durable import sync
from experts.errors import ImageError
from experts.vision.preprocess import decode
from tools.dataset import Format
from tools.pictures import as_payload, orientation
from tools.terminal.console import CommandError
from tools.terminal.names import file_name
from tools.terminal.new_files import unfinished_folder
from tools.training.labelled import UNSORTED


class LabelledBox(NamedTuple):
    """A box in pixels; `score` is its detector's confidence, None if a person drew it."""

    label: str
    x1: float
    y1: float
    x2: float
    y2: float
    score: float | None = None

    def cut(self, width: float, height: float) -> "LabelledBox | None":
        x1, y1, x2, y2 = max(self.x1, 0), max(self.y1, 0), min(self.x2, width), min(self.y2, height)
        return LabelledBox(self.label, x1, y1, x2, y2, self.score) if x1 < x2 and y1 < y2 else None


class Picture(NamedTuple):
    """A picture's file, and `stem`, its name in a data set; pictures of one `board` stay on one side of a split.

    `label` is None without a person's decision, `boxes` if neither a person nor a detector has searched the picture.
    Boxes are doubtful if a person passed it against the detector and drew none. `name` is its path below `images/` in a
    data set, with `width` and `height` in pixels.
    """

    file: Path
    stem: str
    component: str
    board: str
    label: str | None
    boxes: Sequence[LabelledBox] | None
    is_doubtful: bool = False
    name: str = ""
    width: int = 0
    height: int = 0


Counts = Counter[tuple[str, str]]


def write_dataset(pictures: Sequence[Picture], form: Format, out: Path) -> tuple[Counts, Counter[str]]:
    """Write the new or empty folder `out`, whole or not at all. Raises CommandError.

    Return the numbers of pictures by component and label, and of those left out by reason.
    """
    left_out, written = Counter[str](), dict[PurePosixPath, Picture]()
    with_boxes = {each.board for each in pictures if each.boxes}
    others = {each.board for each in pictures if each.boxes is not None} - with_boxes
    # A fifth of each, by digest, beginning with the second: a first board alone is learned from.
    held_out = [*sorted(with_boxes, key=_digest), *sorted(others, key=_digest)][1::5]
    with unfinished_folder(out) as part:
        for picture in pictures:
            try:
                if form in ("yolo", "coco") and picture.boxes is None:
                    raise ImageError("no detector has judged it, and nobody has drawn a box")  # noqa: TRY301
                if form == "yolo" and picture.is_doubtful:
                    raise ImageError("a person passed it against the detector: mark what is there on the page Review")  # noqa: TRY301
                content, suffix, width, height = read_picture(picture.file, as_stored=form != "folders")
                boxes = [box for box in (each.cut(width, height) for each in picture.boxes or ()) if box is not None]
                if form in ("yolo", "coco") and picture.boxes and not boxes:
                    raise ImageError("its boxes lie outside of it")  # noqa: TRY301
            except (ImageError, FileNotFoundError) as error:
                left_out[error.reason if isinstance(error, ImageError) else "retention has deleted it"] += 1
                continue
            place = _place(picture, form, "val" if picture.board in held_out else "train")
            if place in written:
                raise CommandError(f"{picture.file}: another picture is {place} already: rename one of them")
            target = part / f"{place}{suffix}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            name = target.relative_to(part).as_posix().removeprefix("images/")
            written[place] = picture._replace(boxes=boxes, name=name, width=width, height=height)
        if not written:
            raise CommandError("; ".join(["there is no picture to write: choose others", *left_out]))
        classes = sorted({box.label for picture in written.values() for box in picture.boxes or ()})
        for name, text in _WRITERS[form](list(written.values()), classes).items() if form in _WRITERS else ():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_text(text, encoding="utf-8")
        for path in part.rglob("*"):
            sync(path)
    return Counter((each.component, each.label or UNSORTED) for each in written.values()), left_out


def read_picture(file: Path, *, as_stored: bool = False) -> tuple[bytes, str, int, int]:
    """Return a file's bytes and suffix, width and height; raw pixels as PNG. Raises ImageError and OSError.

    With `as_stored` also one that other programs turn is a PNG, which they do not turn under its boxes.
    """
    content, suffix = file.read_bytes(), file.suffix.lower()
    if suffix in (".pgm", ".ppm"):
        payload, shape = as_sent(content, suffix)
        pixels = decode(payload, "raw", shape)
    else:
        payload = as_payload(content)
        pixels = decode(payload, "image")
        if not as_stored or orientation(content) == 1:
            return payload, suffix if payload is content else ".png", pixels.shape[1], pixels.shape[0]
    return cv2.imencode(".png", pixels[:, :, ::-1])[1].tobytes(), ".png", pixels.shape[1], pixels.shape[0]


def _digest(board: str) -> bytes:
    return hashlib.sha256(board.encode()).digest()


def _place(picture: Picture, form: Format, side: str) -> PurePosixPath:
    # Trainers look for labels beside the last folder `images` of a path.
    component = file_name(picture.component).replace("images", "images_") if picture.component else ""
    if form != "folders":
        return PurePosixPath("images", side if form == "yolo" else "", component, picture.stem)
    return (
        PurePosixPath(component, file_name(picture.label), picture.stem)
        if picture.label
        else PurePosixPath(UNSORTED, component, picture.stem)
    )


def _yolo(pictures: Sequence[Picture], classes: Sequence[str]) -> dict[str, str]:
    if not classes or len({each.name.split("/")[0] for each in pictures}) < 2:
        raise CommandError("YOLO needs boxes, and pictures of two boards, one of them to validate on: choose more")
    data = {"train": "images/train", "val": "images/val", "names": dict(enumerate(classes))}
    files = {"data.yaml": yaml.safe_dump(data, sort_keys=False, allow_unicode=True)}
    for each in pictures:
        files[f"labels/{PurePosixPath(each.name).with_suffix('.txt')}"] = "".join(
            f"{classes.index(label)} {(x1 + x2) / 2 / each.width:.6f} {(y1 + y2) / 2 / each.height:.6f}"
            f" {(x2 - x1) / each.width:.6f} {(y2 - y1) / each.height:.6f}\n"
            for label, x1, y1, x2, y2, _ in each.boxes or ()
        )
    return files


def _coco(pictures: Sequence[Picture], classes: Sequence[str]) -> dict[str, str]:
    images = [
        {"id": number, "file_name": each.name, "width": each.width, "height": each.height}
        for number, each in enumerate(pictures, 1)
    ]
    boxes = [(number, box) for number, each in enumerate(pictures, 1) for box in each.boxes or ()]
    annotations = [
        {"id": key, "image_id": number, "category_id": classes.index(label) + 1, "bbox": [x1, y1, x2 - x1, y2 - y1]}
        | {"area": (x2 - x1) * (y2 - y1), "iscrowd": 0, **({} if score is None else {"score": score})}
        for key, (number, (label, x1, y1, x2, y2, score)) in enumerate(boxes, 1)
    ]
    categories = [{"id": number, "name": label} for number, label in enumerate(classes, 1)]
    return {"annotations.json": json.dumps({"images": images, "annotations": annotations, "categories": categories})}


_WRITERS = {"yolo": _yolo, "coco": _coco}
