"""Bring a public data set of real boards, DeepPCB by S. Tang and others (MIT licence), into a line of CoServe.

    python deeppcb.py prepare path/to/DeepPCB data    # pictures for the training commands, and boards for the camera
    python deeppcb.py measure data line               # the quality of the trained line on other boards

README.md beside this file has the commands between the two.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import yaml
from numpy.typing import NDArray

from daemon.line.line import load_line
from experts.spec import ExpertId
from experts.vision.preprocess import decode
from experts.vision.slot import SlotPool
from tools.demo.judge import PartToJudge, judge_parts
from tools.terminal.console import console, print_table
from tools.training.box_scores import match_boxes
from tools.training.detector import find_boxes
from tools.training.photographs import read_yolo_data

#: The six kinds of defect in the order of the data set's numbers, which begin at 1.
LABELS = ("open", "short", "mousebite", "spur", "copper", "pin-hole")
#: A tile of 640 x 640 pixels is cut into four windows: small enough to train on in minutes, and a defect stays large.
WINDOW_PIXELS = 320
BOARD_TYPE, COMPONENT = "bare-board", "window"
DETECTOR, IOU = "board-defects", 0.33  # the data set's own measure: a hit overlaps a defect of its class by more


@dataclass(frozen=True)
class TileWindow:
    """A part of a tile; pixels: (S, S, 3) uint8 BGR; boxes: (n, 5) float32 rows of x1 y1 x2 y2 class, in its pixels."""

    name: str
    pixels: NDArray[np.uint8]
    boxes: NDArray[np.float32]


def read_windows(data: Path, split: str) -> Iterator[TileWindow]:
    """Yield the windows of the tiles that `data/SPLIT.txt` names, four of each tile."""
    listing = data / f"{split}.txt"
    if not listing.is_file():
        raise SystemExit(f"there is no {listing}: name the folder that holds train.txt and val.txt")
    for line in listing.read_text(encoding="utf-8").splitlines():
        if line.strip():
            tile = data / line.split()[0]
            pixels = compose(_read_grey(Path(f"{tile}_temp.jpg")), _read_grey(Path(f"{tile}_test.jpg")))
            boxes = read_boxes(Path(f"{tile}.txt"))
            for number, (part, boxes_of_part) in enumerate(cut(pixels, boxes), 1):
                yield TileWindow(f"{tile.name}-W{number}", part, boxes_of_part)


def compose(template: NDArray[np.uint8], tested: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return one picture of a pair: the template in the red channel, the tested tile in the two others.

    Where both agree the picture is black or white; additional copper is red, and missing copper is cyan.
    """
    return np.dstack([tested, tested, template])


def cut(
    pixels: NDArray[np.uint8], boxes: NDArray[np.float32]
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.float32]]]:
    """Yield each window with the boxes of which it shows at least a third, cut at its edges."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    for top in range(0, pixels.shape[0], WINDOW_PIXELS):
        for left in range(0, pixels.shape[1], WINDOW_PIXELS):
            shown = boxes - np.array([left, top, left, top, 0], np.float32)
            shown[:, :4] = shown[:, :4].clip(0, WINDOW_PIXELS)
            shares = (shown[:, 2] - shown[:, 0]) * (shown[:, 3] - shown[:, 1]) / areas
            yield pixels[top : top + WINDOW_PIXELS, left : left + WINDOW_PIXELS], shown[shares >= 1 / 3]


def read_boxes(file: Path) -> NDArray[np.float32]:
    """Return the lines `x1 y1 x2 y2 type` of a label file as rows, the type as a class from 0 on."""
    try:
        rows = np.loadtxt(file, np.float32, ndmin=2).reshape(-1, 5)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file}: expected lines `x1 y1 x2 y2 type` ({error})") from error
    return rows - np.array([0, 0, 0, 0, 1], np.float32)


def _read_grey(file: Path) -> NDArray[np.uint8]:
    pixels = cv2.imread(str(file), cv2.IMREAD_GRAYSCALE)
    if pixels is None or pixels.shape != (2 * WINDOW_PIXELS, 2 * WINDOW_PIXELS):
        raise SystemExit(f"{file}: expected a picture of {2 * WINDOW_PIXELS} x {2 * WINDOW_PIXELS} pixels")
    return np.asarray(pixels, np.uint8)


def prepare(data: Path, out: Path) -> None:
    """Write what `coserve train classifier`, `coserve train detector` and `coserve camera` take."""
    for split in ("train", "val"):
        for window in read_windows(data, split):
            write_picture(out / "detector" / "images" / split / f"{window.name}.png", window.pixels)
            write_text(out / "detector" / "labels" / split / f"{window.name}.txt", yolo_labels(window.boxes))
            if split == "train":
                label = "suspect" if len(window.boxes) else "clean"
                write_picture(out / "classifier" / label / f"{window.name}.png", window.pixels)
            else:
                tile, designator = window.name.rsplit("-", 1)
                write_picture(out / "boards" / BOARD_TYPE / tile / f"{designator}.{COMPONENT}.png", window.pixels)
    description = {"train": "images/train", "val": "images/val", "names": dict(enumerate(LABELS))}
    write_text(out / "detector" / "data.yaml", yaml.safe_dump(description))


def yolo_labels(boxes: NDArray[np.float32]) -> str:
    """Return lines `class x y width height`, in fractions of the window."""
    lines: list[str] = []
    for x1, y1, x2, y2, kind in boxes.tolist():
        values = np.array([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]) / WINDOW_PIXELS
        lines.append(f"{kind:.0f} " + " ".join(f"{value:.6f}" for value in values) + "\n")
    return "".join(lines)


def write_picture(file: Path, pixels: NDArray[np.uint8]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(file), pixels)


def write_text(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def measure(data: Path, line: Path) -> None:
    """Print how good the line of `line/coserve.yaml` is on the windows of `val`, which nothing was trained on."""
    loaded = load_line(line / "coserve.yaml")
    held_out = read_yolo_data(data / "detector" / "data.yaml").held_out
    payloads = [photograph.file.read_bytes() for photograph in held_out]
    truths = [photograph.boxes * np.array([WINDOW_PIXELS] * 4 + [1], np.float32) for photograph in held_out]

    pool = SlotPool("cpu", sum(spec.weights_bytes for spec in loaded.catalog.values()))
    for spec in loaded.catalog.values():
        pool.load(spec)
    parts = [PartToJudge(BOARD_TYPE, COMPONENT, decode(payload, "image")) for payload in payloads]
    verdicts = judge_parts(loaded.routes, pool.slot, parts)
    counts = Counter((len(truth) > 0, verdict) for truth, verdict in zip(truths, verdicts, strict=True))
    columns = ("pass", "review", "fail")
    rows = [
        (title, *(counts[defective, verdict] for verdict in columns))
        for title, defective in (("with defects", True), ("without", False))
    ]
    print_table("Verdicts of the line", ("windows", *columns), rows)

    matched = match_boxes(find_boxes(loaded.catalog[ExpertId(DETECTOR)], payloads), truths, IOU)
    threshold = matched.best_threshold()
    scores = matched.counts(threshold)
    console.print(
        f"{DETECTOR} alone, {len(matched.object_classes)} defects, IoU above {IOU}: mAP"
        f" {matched.mean_average_precision():.3f}, F {scores.f_score:.3f} (precision {scores.precision:.3f}, recall"
        f" {scores.recall:.3f}) at confidence {threshold:.2f}"
    )


def main(arguments: Sequence[str]) -> None:
    commands = {"prepare": prepare, "measure": measure}
    if len(arguments) != 3 or arguments[0] not in commands:
        sys.exit(__doc__)
    commands[arguments[0]](Path(arguments[1]), Path(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
