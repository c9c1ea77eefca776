"""Values that describe an expert: identity, architecture, classes, preprocessing, its answers and loads."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NewType

#: What schedulers, slots and pools call an expert: the catalog's name, and a digest of weights and settings, so that
#: two versions of one expert are two experts: "R0402#9f3c1a…". `#` sorts before what names are made of: ties between
#: experts are broken as between their names.
ExpertId = NewType("ExpertId", str)
#: A network's shape without its weights: "resnet18", "yolo11n".
ArchitectureId = NewType("ArchitectureId", str)
#: Experts of one layout fit the same slot: architecture, head rows, dtype, memory format, input size.
LayoutId = NewType("LayoutId", str)

Task = Literal["classify", "detect"]
Box = tuple[float, float, float, float]

#: The parts of a layout's name (architectures.layout_id) that architecture, classes and input size do not tell.
_FORM = ("dtype", "memory_format", "head")


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
    confident first; `label` and `confidence` repeat the first box, or are None if nothing was found. `guards`
    are those of routing_rules.routes that would not let the image pass.
    """

    label: str | None
    confidence: float | None
    detections: tuple[Detection, ...] = ()
    guards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One load of an expert: bytes moved, milliseconds, and where they came from."""

    bytes: int
    load_ms: float
    tier: Literal["ram", "disk"] = "disk"


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """The pictures that an expert can judge: like those that it learned from (experts/vision/guards.py).

    `brightness` and `sharpness` are least and most, in levels of 255; `constant` is the largest share of rows, or of
    columns, that show nothing; `distance` that of a head's features from those of good pictures.
    """

    brightness: tuple[float, float]
    sharpness: tuple[float, float]
    constant: float
    distance: float | None = None


@dataclass(frozen=True)
class ExpertSpec:
    """One catalog entry, resolved: where its weights are and how an image becomes its input.

    `input_size` is the side of the square input in pixels; `mean` and `std` are per RGB channel of values in 0..1;
    `weights_bytes` is the length of the contiguous region a slot holds. A file thinner than the slot names its form in
    `stored_as`, and `stored_bytes` of it are read by a load.

    An expert with a `backbone` is a head: its file has only what follows the backbone's features, and its family is all
    heads of the same backbone. A backbone has no classes.
    """

    expert: ExpertId
    architecture: ArchitectureId
    task: Task
    file: Path = field(compare=False)
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
    stored_as: str = ""
    stored_bytes: int = 0
    backbone: "ExpertSpec | None" = None
    pictures: PictureLimits | None = None

    @cached_property
    def name(self) -> str:
        """The catalog's name of the expert; for a backbone with its version: `line@50e527a8f71d`."""
        return name_of(self.expert)

    @cached_property
    def resident(self) -> "ExpertSpec":
        """Return what the slot holds while this expert answers: the expert itself, or a head's backbone."""
        return self.backbone or self

    @property
    def read_bytes(self) -> int:
        return self.stored_bytes or self.weights_bytes

    @cached_property
    def version(self) -> str:
        """The first 12 hex digits of the weights' sha256 (RESULTS.md, `expert_version`)."""
        return self.sha256[:12]

    @cached_property
    def settings(self) -> str:
        """Everything that an answer depends on but the weights, as canonical JSON with the catalog's names.

        The stored form is missing while the weights file cannot be read.
        """
        head: dict[str, Any] = {"temperature": _number(self.temperature)}
        if self.task == "detect":
            head = {name: _number(getattr(self, name)) for name in ("confidence_floor", "nms_iou")}
            head["max_detections"] = self.max_detections
        values = {
            "architecture": self.architecture,
            "classes": self.classes,
            "input_size": self.input_size,
            "mean": [*map(_number, self.mean)],
            "std": [*map(_number, self.std)],
            **dict(zip(_FORM, self.layout.split("-")[3:], strict=False)),
            **head,
            **({"backbone": self.backbone.sha256} if self.backbone else {}),
            **({"pictures": asdict(self.pictures)} if self.pictures else {}),
        }
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @cached_property
    def settings_digest(self) -> str:
        """The first 12 hex digits of the sha256 of `settings` (RESULTS.md, `expert_settings`)."""
        return digest_of(self.settings)


def resident_in(catalog: Mapping[ExpertId, ExpertSpec]) -> dict[ExpertId, ExpertSpec]:
    """Return what slots hold for a catalog's experts: whole networks, and the backbones of heads."""
    return {spec.resident.expert: spec.resident for spec in catalog.values() if spec.classes}


def identified(spec: ExpertSpec) -> ExpertSpec:
    """Return a spec that has a name as its id with the id of its weights and settings."""
    digest = hashlib.sha256(f"{spec.sha256}\n{spec.settings}".encode()).hexdigest()[:12]
    return replace(spec, expert=ExpertId(f"{spec.expert}#{digest}"))


def name_of(expert: ExpertId) -> str:
    return re.sub(r"#[0-9a-f]{12}$", "", expert)


def digest_of(settings: str) -> str:
    return hashlib.sha256(settings.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class SettingChange:
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name} {self.before} → {self.after}"


def setting_changes(before: str, after: str) -> list[SettingChange]:
    """Return the settings that differ; those that only one side has are left out, but for limits of pictures."""
    old, new = json.loads(before), json.loads(after)
    names = dict.fromkeys((*(name for name in old if name in new), "pictures"))
    return [SettingChange(name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)]


def _number(value: float) -> float:
    """Return the canonical form of a number: 1 is 1.0, -0.0 is 0.0."""
    return float(value) + 0.0
