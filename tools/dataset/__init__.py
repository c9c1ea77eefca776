"""Data sets: pictures as folders, YOLO and COCO, written and read.

`stored` selects pictures of a line; `write` and `read` know the formats. Nothing here has options of commands.
"""

from typing import Literal

Format = Literal["folders", "yolo", "coco"]
