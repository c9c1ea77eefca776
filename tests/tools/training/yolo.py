"""A small YOLO data set on disk."""

from pathlib import Path

import cv2
import numpy as np

BOX = "0 0.5 0.5 0.25 0.5\n"
SIDES = "train: images/train\nval: images/val\n"


def a_data_set(folder: Path, text: str = f"{SIDES}names: [bridge, void]\n", labels: str = BOX) -> Path:
    """Two photographs a side, of 96 x 48 pixels with a white rectangle where `BOX` says, and the YAML of this text."""
    picture = np.full((48, 96, 3), 30, np.uint8)
    picture[12:36, 36:60] = 255
    for side in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / kind / side).mkdir(parents=True)
        for number in range(2):
            cv2.imwrite(str(folder / f"images/{side}/{side}{number}.png"), picture)
            (folder / f"labels/{side}/{side}{number}.txt").write_text(labels, encoding="utf-8")
    (file := folder / "data.yaml").write_text(text, encoding="utf-8")
    return file
