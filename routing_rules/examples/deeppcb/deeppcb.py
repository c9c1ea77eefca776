"""Bring a public data set of real boards, DeepPCB by S. Tang and others (MIT licence), into a line of CoServe.

    python deeppcb.py prepare path/to/DeepPCB data    # pictures for the training commands, and boards for the camera
    python deeppcb.py measure data line               # the quality of the trained line on other boards

README.md beside this file has the commands between the first two.
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
from experts.spec import ExpertId, ExpertSpec
from experts.vision.preprocess import decode
from tools.demo.judge import PartToJudge, judge_parts, loaded_pool
from tools.terminal.console import print_table
from tools.training.detector import find_boxes
from tools.training.held_out import BoxCounts, MatchedBoxes, match_boxes
from tools.training.labelled import read_yolo_data

#: The six kinds of defect in the order of the data set's numbers, which begin at 1.
LABELS = ("open", "short", "mousebite", "spur", "copper", "pin-hole")
TILE_PIXELS = 640
BOARD_TYPE, COMPONENT = "bare-board", "tile"
DETECTOR, IOU = "board-defects", 0.33  # the data set's own measure: a hit overlaps a defect of its class by more
#: Of the pairs in train.txt every tenth is not trained on: the detector's threshold is chosen on these.
HELD_OUT = 10


@dataclass(frozen=True)
class Tile:
    """A pair as one picture; pixels: (S, S, 3) uint8 BGR; boxes: (n, 5) float32, x1 y1 x2 y2 class in pixels."""

    name: str
    pattern: str
    pixels: NDArray[np.uint8]
    boxes: NDArray[np.float32]

    def repaired(self) -> NDArray[np.uint8]:
        """Return the picture with the template in place of each defect."""
        pixels = self.pixels.copy()
        for x1, y1, x2, y2 in self.boxes[:, :4].astype(int):
            pixels[y1:y2, x1:x2] = pixels[y1:y2, x1:x2, 2:]
        return pixels


def read_tiles(data: Path, split: str) -> Iterator[Tile]:
    listing = data / f"{split}.txt"
    if not listing.is_file():
        raise SystemExit(f"there is no {listing}: name the folder that holds train.txt and val.txt")
    for line in listing.read_text(encoding="utf-8").splitlines():
        if line.strip():
            tile = data / line.split()[0]
            pixels = compose(_read_grey(Path(f"{tile}_temp.jpg")), _read_grey(Path(f"{tile}_test.jpg")))
            yield Tile(tile.name, tile.parent.name, pixels, read_boxes(Path(f"{tile}.txt")))


def compose(template: NDArray[np.uint8], tested: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Merge a pair: template in red, tested tile in green and blue; additional copper is red, missing copper cyan."""
    return np.dstack([tested, tested, template])


def read_boxes(file: Path) -> NDArray[np.float32]:
    """Return the lines `x1 y1 x2 y2 type` of a label file as rows, the type as a class from 0 on."""
    try:
        rows = np.loadtxt(file, np.float32, ndmin=2).reshape(-1, 5)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file}: expected lines `x1 y1 x2 y2 type` ({error})") from error
    return rows - np.array([0, 0, 0, 0, 1], np.float32)


def _read_grey(file: Path) -> NDArray[np.uint8]:
    pixels = cv2.imread(str(file), cv2.IMREAD_GRAYSCALE)
    if pixels is None or pixels.shape != (TILE_PIXELS, TILE_PIXELS):
        raise SystemExit(f"{file}: expected a picture of {TILE_PIXELS} x {TILE_PIXELS} pixels")
    return np.asarray(pixels, np.uint8)


def prepare(data: Path, out: Path) -> None:
    """Write the inputs of `coserve train classifier`, `coserve train detector`, `coserve camera` and `measure`."""
    for number, tile in enumerate(read_tiles(data, "train"), 1):
        _write_labelled(out / "detector", "val" if number % HELD_OUT == 0 else "train", tile)
        write_picture(out / "classifier" / tile.pattern / f"{tile.name}.png", tile.pixels)
    for tile in read_tiles(data, "val"):
        _write_labelled(out / "detector", "test", tile)
        write_picture(out / "boards" / BOARD_TYPE / tile.name / f"T1.{COMPONENT}.png", tile.pixels)
        write_picture(out / "boards" / BOARD_TYPE / f"{tile.name}-repaired" / f"T1.{COMPONENT}.png", tile.repaired())
    for name, held_out in (("data", "val"), ("test", "test")):
        description = {"train": "images/train", "val": f"images/{held_out}", "names": dict(enumerate(LABELS))}
        write_text(out / "detector" / f"{name}.yaml", yaml.safe_dump(description))


def _write_labelled(folder: Path, split: str, tile: Tile) -> None:
    write_picture(folder / "images" / split / f"{tile.name}.png", tile.pixels)
    write_text(folder / "labels" / split / f"{tile.name}.txt", yolo_labels(tile.boxes))


def yolo_labels(boxes: NDArray[np.float32]) -> str:
    """Return lines `class x y width height`, in fractions of the tile."""
    lines: list[str] = []
    for x1, y1, x2, y2, kind in boxes.tolist():
        values = np.array([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]) / TILE_PIXELS
        lines.append(f"{kind:.0f} " + " ".join(f"{value:.6f}" for value in values) + "\n")
    return "".join(lines)


def write_picture(file: Path, pixels: NDArray[np.uint8]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(file), pixels)


def write_text(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def measure(data: Path, line: Path) -> None:
    """Print how good the line of `line/coserve.yaml` is on the tiles of val.txt, which nothing was trained on."""
    loaded = load_line(line / "coserve.yaml")
    files = sorted((data / "boards").rglob("*.png"))
    parts = [PartToJudge(BOARD_TYPE, COMPONENT, decode(file.read_bytes(), "image")) for file in files]
    judged = judge_parts(loaded.routes, loaded.catalog, loaded_pool(loaded.catalog), parts)
    counts = Counter(
        (file.parent.name.endswith("-repaired"), verdict) for file, (verdict, _) in zip(files, judged, strict=True)
    )
    columns = ("pass", "review", "fail")
    rows = [
        (title, *(counts[repaired, verdict] for verdict in columns))
        for title, repaired in (("with defects", False), ("repaired", True))
    ]
    print_table("Verdicts of the line", ("tiles", *columns), rows)

    spec = loaded.catalog[ExpertId(DETECTOR)]
    threshold = _match(spec, data / "detector" / "data.yaml").best_threshold()
    matched = _match(spec, data / "detector" / "test.yaml")
    figures = [(label, matched.of_class(number)) for number, label in enumerate(LABELS)]
    rows = [
        (label, len(of.object_classes), *_figures(of.counts(threshold)), f"{of.mean_average_precision():.3f}")
        for label, of in (*figures, ("all", matched))
    ]
    title = f"{DETECTOR} alone, IoU above {IOU}, confidence {threshold:.2f}, chosen on held-out pairs of train.txt"
    print_table(title, ("defect", "number", "F", "precision", "recall", "AP"), rows)


def _match(spec: ExpertSpec, data: Path) -> MatchedBoxes:
    """Compare a detector's boxes with those of held-out tiles; a place has one defect, the surest."""
    held_out = read_yolo_data(data).held_out
    truths = [photograph.boxes * np.array([TILE_PIXELS] * 4 + [1], np.float32) for photograph in held_out]
    answers = find_boxes(spec, [photograph.file.read_bytes() for photograph in held_out])
    return match_boxes([answer.one_per_place(IOU) for answer in answers], truths, IOU)


def _figures(counts: BoxCounts) -> tuple[str, str, str]:
    return f"{counts.f_score:.3f}", f"{counts.precision:.3f}", f"{counts.recall:.3f}"


def main(arguments: Sequence[str]) -> None:
    commands = {"prepare": prepare, "measure": measure}
    if len(arguments) != 3 or arguments[0] not in commands:
        sys.exit(__doc__)
    commands[arguments[0]](Path(arguments[1]), Path(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
