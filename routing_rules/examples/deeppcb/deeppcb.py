"""Bring a public data set of real boards, DeepPCB by S. Tang and others (MIT licence), into a line of CoServe.

    python deeppcb.py prepare path/to/DeepPCB data    # pictures for the training commands, and boards for the camera
    python deeppcb.py measure data line               # the quality of the trained line on other boards
    python deeppcb.py few-shot path/to/DeepPCB crops  # six classifiers from 25 good and 25 bad crops each, three times

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
from experts.catalog import CatalogFile, resolve
from experts.spec import ExpertId, ExpertSpec
from experts.vision.preprocess import decode
from tools.demo.judge import PartToJudge, judge_parts, loaded_pool
from tools.experts.measure import answers_of, images_in
from tools.terminal.console import print_table
from tools.training.backbone import BackbonePlan, read_entries, train_backbone
from tools.training.classifier import TrainingPlan, train_classifier
from tools.training.detector import find_boxes
from tools.training.fit import Schedule, Variation
from tools.training.held_out import BoxCounts, MatchedBoxes, Rate, match_boxes
from tools.training.labelled import read_yolo_data

#: The six kinds of defect in the order of the data set's numbers, which begin at 1.
LABELS = ("open", "short", "mousebite", "spur", "copper", "pin-hole")
TILE_PIXELS = 640
BOARD_TYPE, COMPONENT = "bare-board", "tile"
DETECTOR, IOU = "board-defects", 0.33  # the data set's own measure: a hit overlaps a defect of its class by more
#: Of the pairs in train.txt every tenth is not trained on: the detector's threshold is chosen on these.
HELD_OUT = 10
#: Few-shot: pixels of a crop, pictures of each label to train on and at most to judge, and the seeds.
CROP_PIXELS, SHOTS, MAX_JUDGED, SEEDS = 64, 25, 100, (0, 1, 2)


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
    verdicts = judge_parts(loaded.routes, loaded.catalog, loaded_pool(loaded.catalog), parts)
    counts = Counter((file.parent.name.endswith("-repaired"), each) for file, each in zip(files, verdicts, strict=True))
    columns = ("pass", "review", "fail")
    rows = [
        (title, *(counts[repaired, verdict] for verdict in columns))
        for title, repaired in (("with defects", False), ("repaired", True))
    ]
    print_table("Verdicts of the line", ("tiles", *columns), rows)

    spec = loaded.catalog[ExpertId(DETECTOR)]
    threshold = _match(spec, data / "detector" / "data.yaml").best_threshold()
    matched = _match(spec, data / "detector" / "test.yaml")
    precisions = matched.average_precisions()
    figures = {label: matched.of_class(number) for number, label in enumerate(LABELS)}
    rows = [
        (label, len(of.object_classes), *_figures(of.counts(threshold)), f"{precisions.get(number, 0):.3f}")
        for number, (label, of) in enumerate(figures.items())
    ]
    total = (*_figures(matched.counts(threshold)), f"{matched.mean_average_precision():.3f}")
    rows.append(("all", len(matched.object_classes), *total))
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


def few_shot(data: Path, out: Path, seeds: Sequence[int] = SEEDS, epochs: int = 120) -> None:
    """Train six classifiers, with one backbone, on few crops of train.txt's tested tiles; judge crops of val.txt."""
    splits = {split: list(read_tiles(data, split)) for split in ("train", "val")}
    rows: list[tuple[object, ...]] = []
    for seed in seeds:
        folder = out / f"seed-{seed}"
        rng = np.random.default_rng(seed)
        for number, label in enumerate(LABELS):
            _write_crops(folder / "train" / label, splits["train"], number, SHOTS, rng)
            _write_crops(folder / "val" / label, splits["val"], number, MAX_JUDGED, rng)
        experts, folders = folder / "experts", [folder / "train" / label for label in LABELS]
        schedule = Schedule(epochs, learning_rate=2e-3, seed=seed)
        plan = BackbonePlan(input_size=CROP_PIXELS, schedule=schedule, vary=Variation(6, "all"))
        train_backbone(folders, experts, name="backbone", plan=plan)
        heads = TrainingPlan(Schedule(12, seed=seed), kinds=("bank", "head"), play=6, symmetry=True, use_anyway=True)
        rates = Counter[str]()
        for label, crops in zip(LABELS, folders, strict=True):
            report = train_classifier(crops, experts, expert=label, plan=heads)
            catalog, _ = resolve(CatalogFile(experts=read_entries(experts / "catalog.yaml")), experts)
            spec = catalog[ExpertId(label)]
            row: list[object] = [seed, label, report.chosen.kind]
            for truth in ("ok", "bad"):
                answers = answers_of(spec, images_in(folder / "val" / label / truth, spec))
                right = Rate(sum(answer.label == truth for answer in answers), len(answers))
                rates.update({truth: right.count, f"of {truth}": right.of})
                row.append(right)
            rows.append(tuple(row))
        of_all = (Rate(rates[truth], rates[f"of {truth}"]) for truth in ("ok", "bad"))
        rows.append((seed, "all", "", *of_all))
    title = f"{SHOTS} + {SHOTS} crops of train.txt, judged on crops of val.txt"
    print_table(title, ("seed", "defect", "kind", "good ones that pass", "bad ones caught"), rows)


def _write_crops(folder: Path, tiles: Sequence[Tile], kind: int, count: int, rng: np.random.Generator) -> None:
    """Write up to `count` crops with a defect of `kind`, and as many without any, each from another tile."""
    for truth in ("bad", "ok"):
        written = 0
        for place in sorted(range(len(tiles)), key=lambda _: rng.random()):
            tile = tiles[place]
            corner = _corner_at(tile, kind, rng) if truth == "bad" else _free_corner(tile, rng)
            if corner is not None and written < count:
                x, y = corner
                crop = np.ascontiguousarray(np.repeat(tile.pixels[y : y + CROP_PIXELS, x : x + CROP_PIXELS, :1], 3, 2))
                write_picture(folder / truth / f"{tile.name}.{truth}.png", crop)
                written += 1


def _corner_at(tile: Tile, kind: int, rng: np.random.Generator) -> tuple[int, int] | None:
    """Return the corner of a crop around a defect of `kind`, up to 6 pixels off the centre."""
    of_kind = tile.boxes[tile.boxes[:, 4] == kind]
    if not len(of_kind):
        return None
    x1, y1, x2, y2 = of_kind[int(rng.integers(len(of_kind))), :4].tolist()
    middle = np.array([x1 + x2, y1 + y2]) / 2 + rng.uniform(-6, 6, 2) - CROP_PIXELS / 2
    x, y = np.clip(middle, 0, TILE_PIXELS - CROP_PIXELS).astype(int)
    return int(x), int(y)


def _free_corner(tile: Tile, rng: np.random.Generator) -> tuple[int, int] | None:
    """Return the corner of a crop that shows copper and its edges, and no defect."""
    for x, y in rng.integers(0, TILE_PIXELS - CROP_PIXELS, (50, 2)).tolist():
        x1, y1, x2, y2 = tile.boxes[:, :4].T
        is_free = np.all((x2 <= x) | (x1 >= x + CROP_PIXELS) | (y2 <= y) | (y1 >= y + CROP_PIXELS))
        share = (tile.pixels[y : y + CROP_PIXELS, x : x + CROP_PIXELS, 0] > 127).mean()
        if is_free and 0.1 < share < 0.9:
            return x, y
    return None


def main(arguments: Sequence[str]) -> None:
    commands = {"prepare": prepare, "measure": measure, "few-shot": few_shot}
    if len(arguments) != 3 or arguments[0] not in commands:
        sys.exit(__doc__)
    commands[arguments[0]](Path(arguments[1]), Path(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
