"""The catalog of experts: a YAML file beside the weights, resolved to `ExpertSpec`s without torch."""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from experts.drift import BINS
from experts.durable import replace_text
from experts.errors import WeightsError
from experts.spec import ExpertId, ExpertSpec, LayoutId, PictureLimits, identified
from experts.vision.architectures import (
    ARCHITECTURES,
    CHANNELS_LAST,
    NORMALISATIONS,
    YOLO_STRIDE_PIXELS,
    Architecture,
    layout_id,
)
from experts.weights import PAGE_BYTES, WeightsHeader, read_header
from routing_rules.document import read_yaml_text

#: The layout of an expert whose file could not be read: it fits no slot, so loading it fails and says why.
UNREADABLE = LayoutId("unreadable")

#: Beyond these every answer is certain, or none is.
TEMPERATURES = (0.05, 20.0)

Problem = tuple[tuple[str | int, ...], str]
Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Channels = tuple[Finite, Finite, Finite]
Label = Annotated[str, StringConstraints(min_length=1, max_length=128)]
_SHA256 = r"[0-9a-f]{64}"
Digest = Annotated[str, StringConstraints(pattern=f"^{_SHA256}$")]
Counts = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=BINS, max_length=BINS)]
Confidences = Mapping[str, tuple[int, ...]]


def is_digest(text: str) -> bool:
    return re.fullmatch(_SHA256, text) is not None


class CatalogError(Exception):
    """A catalog's file cannot be read; the text names it and its first mistake."""


class Normalisation(BaseModel):
    """Mean and standard deviation per RGB channel, of values in 0..1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: Channels
    std: Annotated[tuple[Annotated[Finite, Field(gt=0)], ...], Field(min_length=3, max_length=3)]


class StoredFigures(BaseModel):
    """The stored form of a thin file, its size in the file and in a slot, and how far its answers differ.

    The import compared it with the original on `images` pictures or generated patterns: `same_labels` of them kept
    their labels, `confidence` and `box_pixels` are the largest differences, `mean_precision` is a detector's mean
    average precision with the original's boxes as the truth.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    form: str
    bytes: int
    slot_bytes: int
    on: Literal["pictures", "patterns"]
    images: int
    same_labels: int
    confidence: Finite
    box_pixels: Finite = 0.0
    mean_precision: Share | None = None


class BackboneReference(BaseModel):
    """The network whose features a head judges; `file` is relative to the catalog."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    sha256: Digest

    def for_package(self) -> "BackboneReference":
        return BackboneReference(file=backbone_file(self.sha256), sha256=self.sha256)


def backbone_file(sha256: str) -> str:
    return f"backbone@{sha256[:12]}.safetensors"


class CatalogEntry(BaseModel):
    """One expert as the file has it; `file` is relative to the catalog.

    With `backbone` the file is a head of it; architecture, input size and normalisation are the backbone's. Without
    `classes` it is a backbone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    architecture: str
    file: str
    classes: tuple[Label, ...] = ()
    input_size: Annotated[int, Field(ge=32, le=4096)]
    normalisation: Literal["imagenet", "none"] | Normalisation
    sha256: Digest
    backbone: BackboneReference | None = None
    temperature: Annotated[Finite, Field(gt=0)] = 1.0
    confidence_floor: Share = 0.25
    nms_iou: Share = 0.45
    max_detections: Annotated[int, Field(ge=1, le=3000)] = 300
    #: How sure it was on images held out from training, by answered label or `all` (experts/drift.py).
    confidences: dict[Label, Counts] = {}
    #: Limits of the pictures that it can judge, learned in training.
    pictures: PictureLimits | None = None
    #: Figures of weights that are stored thinner than they are computed.
    stored: StoredFigures | None = None

    @property
    def network(self) -> str:
        """Describe what computes the answer: `resnet18`, `head on a resnet18 (backbone 50e527a8f71d)`."""
        if self.backbone is not None:
            return f"head on a {self.architecture} (backbone {self.backbone.sha256[:12]})"
        return self.architecture if self.classes else f"{self.architecture} as backbone"

    @property
    def weights(self) -> set[str]:
        """Return the sha256 of its weights, and of its backbone's."""
        return {self.sha256} if self.backbone is None else {self.sha256, self.backbone.sha256}

    def moved_from(self, root: Path) -> "CatalogEntry":
        """Return this entry of the catalog in `root` with absolute paths, for a catalog elsewhere."""
        return self.with_files(lambda file, _: str((root / file).resolve()))

    def with_files(self, place: Callable[[str, str], str]) -> "CatalogEntry":
        """Return the entry with its files renamed by `place(old name, sha256)`."""
        update: dict[str, object] = {"file": place(self.file, self.sha256)}
        if (backbone := self.backbone) is not None:
            update["backbone"] = backbone.model_copy(update={"file": place(backbone.file, backbone.sha256)})
        return self.model_copy(update=update)


class CatalogFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    experts: dict[Annotated[str, StringConstraints(min_length=1, max_length=128)], CatalogEntry]


class Catalog(dict[ExpertId, ExpertSpec]):
    """Experts by name, in the file's order. `headers` has those whose weights file could be read, `confidences` those
    that were measured on images held out, `entries` all as the file has them, `unusable` why a file cannot be read.
    """

    def __init__(
        self,
        specs: Mapping[ExpertId, ExpertSpec],
        headers: Mapping[ExpertId, WeightsHeader],
        entries: Mapping[str, CatalogEntry] | None = None,
        unusable: Mapping[ExpertId, str] | None = None,
    ) -> None:
        super().__init__(specs)
        self.headers = dict(headers)
        self.entries = dict(entries or {})
        self.unusable = dict(unusable or {})
        self.confidences: dict[ExpertId, Confidences] = {
            ExpertId(name): entry.confidences for name, entry in self.entries.items() if entry.confidences
        }

    @property
    def judges(self) -> int:
        """Count the experts that rules can name: all but backbones."""
        return sum(bool(spec.classes) for spec in self.values())


def resolve(catalog_file: CatalogFile, root: Path, folders: Sequence[Path] = ()) -> tuple[Catalog, list[Problem]]:
    """Return the specs of all usable entries, and every mistake with its place in the document.

    `root` is the catalog's folder. An entry whose weights file is wrong (the place ends in "file") keeps its spec: the
    line starts, loading that expert fails, and only its images are `unknown`. With `folders`, a file outside all of
    them (links followed) is a mistake and is not opened.
    """
    specs: dict[ExpertId, ExpertSpec] = {}
    headers: dict[ExpertId, WeightsHeader] = {}
    unusable: dict[ExpertId, str] = {}
    backbones: dict[str, ExpertSpec] = {}
    backbone_names = {entry.sha256: name for name, entry in catalog_file.experts.items() if not entry.classes}
    problems: list[Problem] = []
    for name, entry in catalog_file.experts.items():
        place = ("experts", name)
        mistakes = list(_entry_mistakes(entry))
        problems.extend(((*place, key), message) for key, message in mistakes)
        if mistakes:
            continue
        expert, architecture, file = ExpertId(name), ARCHITECTURES[entry.architecture], root / entry.file
        outside = [part for part in _files(entry) if folders and not _lies_in(root / part, folders)]
        if outside:
            remedy = "move it, or name its folder in security.weights of coserve.yaml"
            problems.append((place, f"{outside[0]} lies outside the catalog's folder: {remedy}"))
            continue
        low, high = TEMPERATURES
        if not low <= entry.temperature <= high:
            problems.append(((*place, "temperature"), f"{entry.temperature:g} is not from {low:g} to {high:g}"))
        backbone, contradictions = None, list[tuple[str, str]]()
        try:
            header = _header_of(file)
            if entry.backbone is not None:
                named = backbone_names.get(entry.backbone.sha256, "backbone")
                backbone = _backbone_spec(named, entry.backbone, entry, root)
        except WeightsError as error:
            problems.append(((*place, "file"), str(error)))
            unusable[expert] = str(error)
            specs[expert] = identified(_spec(expert, entry, file, UNREADABLE, PAGE_BYTES))
            continue
        family = None if backbone is None else backbones.setdefault(backbone.sha256, backbone)
        contradictions = list(_header_mistakes(entry, architecture, header))
        if not contradictions:
            contradictions = list(_backbone_mistakes(entry, header, backbone, family))
        problems.extend(((*place, key), message) for key, message in contradictions)
        if not contradictions:
            headers[expert] = header
            spec = _spec(expert, entry, file, LayoutId(header.metadata["layout"]), header.slot_bytes)
            if header.stored_as:
                spec = replace(spec, stored_as=header.stored_as, stored_bytes=header.region_bytes)
            specs[expert] = identified(replace(spec, backbone=family))
    return Catalog(specs, headers, catalog_file.experts, unusable), problems


def _header_of(file: Path) -> WeightsHeader:
    """Read a header. Raises WeightsError, also for forms that only earlier versions computed with."""
    header = read_header(file)
    if "backbone" in header.metadata:
        found, expected = ", ".join(sorted({entry.dtype for entry in header.entries})), "F32"
    else:
        found, expected = header.metadata.get("memory_format", CHANNELS_LAST), CHANNELS_LAST
    if found != expected:
        raise WeightsError(file, f"holds its weights as {found}, expected {expected}; import it again")
    return header


def _files(entry: CatalogEntry) -> tuple[str, ...]:
    return (entry.file,) if entry.backbone is None else (entry.file, entry.backbone.file)


def _backbone_spec(name: str, backbone: BackboneReference, head: CatalogEntry, root: Path) -> ExpertSpec:
    """Return the spec that fills the slot of a head's family. Raises WeightsError.

    Its name has its version, so that heads of two versions are two families.
    """
    file = root / backbone.file
    header = _header_of(file)
    entry = CatalogEntry(
        architecture=head.architecture,
        file=backbone.file,
        input_size=head.input_size,
        normalisation=head.normalisation,
        sha256=backbone.sha256,
    )
    named = ExpertId(f"{name}@{backbone.sha256[:12]}")
    spec = _spec(named, entry, file.resolve(), LayoutId(header.metadata.get("layout", UNREADABLE)), header.slot_bytes)
    if header.stored_as:
        spec = replace(spec, stored_as=header.stored_as, stored_bytes=header.region_bytes)
    return identified(spec)


def _backbone_mistakes(
    entry: CatalogEntry, header: WeightsHeader, backbone: ExpertSpec | None, family: ExpertSpec | None
) -> Iterator[tuple[str, str]]:
    """Yield contradictions between a head and its backbone; `family` is the backbone of the first head with it."""
    trained_on = header.metadata.get("backbone")
    if backbone is None:
        if trained_on is not None:
            yield "backbone", f"{entry.file} is a head: name the file and sha256 of backbone {trained_on[:12]}…"
    elif trained_on is None:
        yield "backbone", f"{entry.file} is a whole network: take `backbone` out"
    elif trained_on != backbone.sha256:
        remedy = "name that one, or train the head again"
        yield "backbone", f"{entry.file} was trained on backbone {trained_on[:12]}…, not {backbone.version}…; {remedy}"
    elif backbone.layout.split("-")[:3] != [entry.architecture, "0", str(entry.input_size)]:
        yield "backbone", f"{backbone.file} is not a backbone of {entry.architecture} for {entry.input_size} pixels"
    elif family is not None and replace(backbone, expert=family.expert) != family:
        yield "normalisation", f"another head of {family.file.name} has another one: make them the same"


def settings_of(entry: CatalogEntry, root: Path) -> str | None:
    """Return the `ExpertSpec.settings` of an entry, whose file is relative to `root`; None for an unknown network."""
    layout, file = UNREADABLE, root / entry.file
    with suppress(WeightsError):
        layout = LayoutId(read_header(file).metadata.get("layout", UNREADABLE))
    if entry.architecture not in ARCHITECTURES:
        return None
    spec = _spec(ExpertId(""), entry, file, layout, 0)
    if entry.backbone is not None:
        spec = replace(spec, backbone=replace(spec, sha256=entry.backbone.sha256))
    return spec.settings


def entry_with(settings: str, file: str, sha256: str) -> CatalogEntry | None:
    """Return the entry of weights that answered with `settings` (ExpertSpec.settings); None if that text is not one."""
    try:
        values = json.loads(settings)
        if backbone := values.get("backbone"):
            values["backbone"] = {"file": backbone_file(backbone), "sha256": backbone}
        fields = {name: value for name, value in values.items() if name in CatalogEntry.model_fields}
        normalisation = {"mean": values["mean"], "std": values["std"]}
        entry = {**fields, "normalisation": normalisation, "file": file, "sha256": sha256}
        return CatalogEntry.model_validate(entry, strict=False)
    except (ValueError, KeyError, AttributeError):  # pydantic's error is a ValueError
        return None


def _lies_in(file: Path, folders: Sequence[Path]) -> bool:
    real = file.resolve()
    return any(real.is_relative_to(folder.resolve()) for folder in folders)


def _entry_mistakes(entry: CatalogEntry) -> Iterator[tuple[str, str]]:
    architecture = ARCHITECTURES.get(entry.architecture)
    if architecture is None:
        near = difflib.get_close_matches(entry.architecture, ARCHITECTURES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(ARCHITECTURES)}"
        yield "architecture", f"unknown architecture {entry.architecture!r}; {hint}"
    elif architecture.task == "detect" and entry.input_size % YOLO_STRIDE_PIXELS:
        yield "input_size", f"{entry.input_size} is not a multiple of {YOLO_STRIDE_PIXELS}, which a detector needs"
    repeated = sorted({label for label in entry.classes if entry.classes.count(label) > 1})
    if repeated:
        yield "classes", f"{', '.join(repeated)} appears more than once"


def _header_mistakes(
    entry: CatalogEntry, architecture: Architecture, header: WeightsHeader
) -> Iterator[tuple[str, str]]:
    metadata = header.metadata
    if metadata.get("architecture") != entry.architecture:
        yield "architecture", f"{entry.file} holds a {metadata.get('architecture')}, not a {entry.architecture}"
        return
    if metadata.get("classes") != json.dumps(list(entry.classes)):
        yield "classes", f"{entry.file} was made for the classes {metadata.get('classes')}, in this order"
        return
    if metadata.get("input_size") != str(entry.input_size):
        yield "input_size", f"{entry.file} was made for {metadata.get('input_size')} pixels, not {entry.input_size}"
        return
    figures, of_file = entry.stored, (header.stored_as, header.region_bytes, header.slot_bytes)
    if figures is not None and (figures.form, figures.bytes, figures.slot_bytes) != of_file:
        how = f"as {of_file[0] or 'computed'}, {of_file[1]} bytes for a slot of {of_file[2]}"
        yield "stored", f"{entry.file} holds its weights {how}; import the expert again, or delete `stored`"
        return
    form = (metadata.get("dtype", ""), metadata.get("memory_format", ""), metadata.get("head", ""))
    layout = layout_id(architecture, len(entry.classes), entry.input_size, *form)
    if metadata.get("layout") != layout:
        yield "file", f"{entry.file} has the layout {metadata.get('layout')}, not {layout}; import the expert again"


def _spec(expert: ExpertId, entry: CatalogEntry, file: Path, layout: LayoutId, weights_bytes: int) -> ExpertSpec:
    architecture = ARCHITECTURES[entry.architecture]
    if isinstance(entry.normalisation, Normalisation):
        mean, (red, green, blue) = entry.normalisation.mean, entry.normalisation.std
        std = (red, green, blue)
    else:
        mean, std = NORMALISATIONS[entry.normalisation]
    return ExpertSpec(
        expert=expert,
        architecture=architecture.name,
        task=architecture.task,
        file=file,
        classes=entry.classes,
        input_size=entry.input_size,
        mean=mean,
        std=std,
        sha256=entry.sha256,
        layout=layout,
        weights_bytes=weights_bytes,
        temperature=entry.temperature,
        confidence_floor=entry.confidence_floor,
        nms_iou=entry.nms_iou,
        max_detections=entry.max_detections,
        pictures=entry.pictures,
    )


def read_catalog(path: Path) -> dict[str, CatalogEntry]:
    """Return a catalog's entries as the file has them, none if there is no such file. Raises CatalogError."""
    try:
        document = read_yaml_text(path.read_bytes().decode("utf-8-sig"), str(path))
        if document.problems:
            raise CatalogError(str(document.problems[0]))
        data = document.data or {}
        return CatalogFile.model_validate({**data, "experts": data.get("experts") or {}}).experts
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CatalogError(f"{path}: is not a catalog of experts: {error}") from None


def add_expert(path: Path, expert: str, entry: Mapping[str, Any]) -> None:
    """Add or replace one entry; the file is written anew, without comments. Raises CatalogError, ValidationError."""
    write_catalog(path, {**read_catalog(path), expert: dict(entry)})


def write_catalog(path: Path, entries: Mapping[str, Mapping[str, Any] | CatalogEntry]) -> None:
    """Check the entries, then replace the catalog file atomically."""
    model = CatalogFile.model_validate({"experts": {name: dict(entry) for name, entry in entries.items()}})
    document = {"experts": {name: rendered(entry) for name, entry in model.experts.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, dump(document))


def dump(document: Any, *, on_one_line: bool = False) -> str:
    """Return `document` as YAML, quoted where any version of YAML might misread it."""
    form: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 2**31 if on_one_line else 120}
    text = yaml.dump(document, Dumper=_Dumper, default_flow_style=on_one_line, **form)
    return text.removesuffix("\n...\n").rstrip("\n") if on_one_line else text


def rendered(entry: CatalogEntry) -> dict[str, Any]:
    """Return an entry as `dump` writes it: without defaults, lists on one line each."""
    return {key: _inline(value) for key, value in entry.model_dump(mode="json", exclude_defaults=True).items()}


def _inline(value: Any) -> Any:
    if isinstance(value, list):
        return _Flow(value)
    return {key: _inline(inner) for key, inner in value.items()} if isinstance(value, dict) else value


class _Flow(list[Any]):
    """A list written on one line."""


class _Dumper(yaml.SafeDumper):
    """Quotes every string that any YAML version might read as something else."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = re.fullmatch(r"[A-Za-z_][\w./ -]*", text, re.ASCII) and not text.endswith(" ")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


def _represent_flow(dumper: yaml.SafeDumper, items: _Flow) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(_Flow, _represent_flow)
