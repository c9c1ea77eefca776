"""Data sets: pictures of a line as folders, YOLO, COCO, Label Studio and CVAT; the last three are also read.

`stored` selects pictures of a line; `write` and `read` know the formats. Nothing here has options of commands.
"""

from typing import Literal

ReadFormat = Literal["coco", "label-studio", "cvat"]
Format = Literal["folders", "yolo", ReadFormat]
