"""Data sets: pictures as folders, YOLO and COCO, written and read, or selected from a line's results (`stored`)."""

from typing import Literal

Format = Literal["folders", "yolo", "coco"]
