"""Architectures of experts, from torchvision and ultralytics, and the names of their slot layouts. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass

from experts.spec import ArchitectureId, LayoutId, Task

#: Classifier heads are padded to a multiple of this many rows, so that experts with few classes share one layout.
HEAD_ROWS_MULTIPLE = 16
#: A YOLO input must be a multiple of its coarsest stride.
YOLO_STRIDE_PIXELS = 32

#: YOLO26 has two heads of the same shapes; ultralytics chooses per model. The end-to-end one picks its own boxes.
PLAIN_HEAD, END_TO_END_HEAD = "plain", "end_to_end"
#: A backbone's layout names this instead of a head: it answers with features, for the heads of its family.
FEATURES = "features"

#: The memory format of all networks' convolutions.
CHANNELS_LAST = "channels_last"

#: One number per RGB channel.
Triple = tuple[float, float, float]

#: Means and standard deviations per RGB channel, of values in 0..1. Catalogs have names for the first two.
NORMALISATIONS: Mapping[str, tuple[Triple, Triple]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    ".5": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """`source` is the framework's name for it; `family` says how networks.py builds and adapts it."""

    name: ArchitectureId
    task: Task
    family: str
    source: str
    normalisation: str


_RESNETS = [f"resnet{depth}" for depth in (18, 34, 50, 101, 152)]
_YOLOS = [f"{family}{scale}" for family in ("yolov5", "yolov8", "yolo11", "yolo26") for scale in "nsmlx"]
ARCHITECTURES: Mapping[str, Architecture] = {
    **{name: Architecture(ArchitectureId(name), "classify", "resnet", name, "imagenet") for name in _RESNETS},
    **{name: Architecture(ArchitectureId(name), "detect", "yolo", f"{name}.yaml", "none") for name in _YOLOS},
}


def head_rows(architecture: Architecture, class_count: int) -> int:
    """Return the rows of the classifier's last layer, padding included; a detector has one per class."""
    if architecture.task == "detect":
        return class_count
    return -(-class_count // HEAD_ROWS_MULTIPLE) * HEAD_ROWS_MULTIPLE


def layout_id(
    architecture: Architecture,
    class_count: int,
    input_size: int,
    dtype: str,
    memory_format: str,
    head: str = PLAIN_HEAD,
) -> LayoutId:
    """Name the slot layout: experts with the same one fit the same slot."""
    rows = head_rows(architecture, class_count)
    return LayoutId(f"{architecture.name}-{rows}-{input_size}-{dtype}-{memory_format}-{head}")
