"""Values that describe an expert: identity, architecture, classes, preprocessing, and its answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NewType

ExpertId = NewType("ExpertId", str)
#: A network's shape without its weights: "resnet18", "yolo11n".
ArchitectureId = NewType("ArchitectureId", str)
#: Experts of one layout fit the same slot: architecture, head rows, dtype, memory format, input size.
LayoutId = NewType("LayoutId", str)

Task = Literal["classify", "detect"]
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Detection:
    """One box after non-maximum suppression; box is (x1, y1, x2, y2) in pixels of the stored image."""

    label: str
    confidence: float
    box: Box


@dataclass(frozen=True, slots=True)
class Answer:
    """An expert's answer for one image.

    A classifier gives its best label and that label's probability. A detector gives its boxes, most
    confident first; `label` and `confidence` repeat the first box, or are None if nothing was found.
    """

    label: str | None
    confidence: float | None
    detections: tuple[Detection, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """One catalog entry, resolved: where its weights are and how an image becomes its input.

    `input_size` is the side of the square input in pixels; `mean` and `std` are per RGB channel of values in
    0..1; `weights_bytes` is the length of the contiguous region a slot holds.
    """

    expert: ExpertId
    architecture: ArchitectureId
    task: Task
    file: Path
    classes: tuple[str, ...]
    input_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    sha256: str
    layout: LayoutId
    weights_bytes: int
    temperature: float = 1.0
    confidence_floor: float = 0.25
    nms_iou: float = 0.45
    max_detections: int = 300

    @property
    def version(self) -> str:
        """The first 12 hex digits of the weights' sha256 (RESULTS.md, `expert_version`)."""
        return self.sha256[:12]
