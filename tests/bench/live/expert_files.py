"""The experts and the pictures of the live benchmark: random weights in files of their own, and rendered parts.

Each expert is two files of its own bytes: a slot's (`.safetensors`, batch norms folded) and the ordinary one
(`.pt`, the framework's state_dict), so that cold reads are real for every side.
"""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import cv2
import torch
import yaml
from torch import nn

from experts.catalog import CatalogFile, resolve, write_catalog
from experts.reading import FileReader
from experts.spec import ExpertId, ExpertSpec
from experts.vision.architectures import ARCHITECTURES
from experts.vision.networks import build_original, select_head
from tests.bench.live.image_trace import LABELS
from tests.experts.direct import DirectReader
from tests.experts.paced import PacedReader
from tools.camera.render import board_types, render_board
from tools.training.expert_file import Form
from tools.training.importer import import_model
from tools.training.proof import pattern_images

#: Experts differ from one another by so much per weight; enough that no two files are alike, and outputs stay finite.
_SPREAD = 0.02
_RECIPE = "recipe.json"
_SEED = 5
WIDTH_PX = 160
_JPEG_QUALITY = 90
_DEFECT_RATE = 0.08

Disk = Literal["cold", "paced"]
DISKS: tuple[Disk, ...] = ("cold", "paced")
PLAIN = "float32"
#: The paper's SATA SSD.
PACED_BYTES_PER_S = 530e6


def reader_of(disk: Disk) -> FileReader:
    """Return a reader past the page cache; "paced" also sleeps, so that it is no faster than the paper's SSD."""
    return DirectReader() if disk == "cold" else PacedReader(DirectReader(), PACED_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class ExpertRecipe:
    """Numbers and architectures of the experts. `input_size` is of both architectures, in pixels."""

    classifiers: int = 60
    detectors: int = 4
    classifier: str = "resnet101"
    detector: str = "yolo11m"
    input_size: int = 128
    #: Form of the slots' files (`coserve import --store`); ordinary files are made beside plain ones only.
    store: str = PLAIN

    @property
    def classifier_names(self) -> list[str]:
        return [f"part-{number:03d}" for number in range(self.classifiers)]

    @property
    def detector_names(self) -> list[str]:
        return [f"solder-{number}" for number in range(self.detectors)]


def ordinary_file(spec: ExpertSpec) -> Path:
    """Return the path of an expert's ordinary state_dict."""
    return spec.file.with_suffix(".pt")


def make_experts(folder: Path, recipe: ExpertRecipe, on_expert: Callable[[str], None] = lambda _name: None) -> Path:
    """Return the catalog of the experts in `folder`; files made to the same recipe before are used as they are."""
    catalog, recipe_file = folder / "catalog.yaml", folder / _RECIPE
    recipe_text = json.dumps(asdict(recipe))
    if catalog.is_file() and recipe_file.is_file() and recipe_file.read_text(encoding="utf-8") == recipe_text:
        return catalog
    folder.mkdir(parents=True, exist_ok=True)
    recipe_file.unlink(missing_ok=True)
    entries: dict[str, dict[str, object]] = {}
    form = Form(tolerance=math.inf, origin="coserve bench live: random values", store=recipe.store)
    for architecture, names in ((recipe.classifier, recipe.classifier_names), (recipe.detector, recipe.detector_names)):
        torch.manual_seed(_SEED)
        original = build_original(ARCHITECTURES[architecture], len(LABELS))
        select_head(original, end_to_end=False)
        for number, name in enumerate(names):
            model = _varied(original, _SEED * 10_000 + number)
            report = import_model(
                model, architecture, LABELS, recipe.input_size, folder, expert=name, images=pattern_images(1), form=form
            )
            if recipe.store == PLAIN:
                torch.save(model.state_dict(), ordinary_file(report.spec))
            entries[name] = report.entry
            on_expert(name)
    write_catalog(catalog, entries)
    recipe_file.write_text(recipe_text, encoding="utf-8")
    return catalog


def read_experts(catalog: Path) -> dict[ExpertId, ExpertSpec]:
    """Return specs by id. Raises ValueError where files are missing or damaged."""
    model = CatalogFile.model_validate(yaml.safe_load(catalog.read_text(encoding="utf-8")))
    specs, problems = resolve(model, catalog.parent)
    if problems:
        raise ValueError(f"{catalog}: {problems[0][1]}; remove the folder to have it made again")
    return dict(specs)


def _varied(original: nn.Module, seed: int) -> nn.Module:
    model = copy.deepcopy(original)
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1.0 + _SPREAD * (torch.rand(tensor.shape, generator=dice) - 0.5))
    return model


def make_pictures(count: int, seed: int) -> list[tuple[bytes, bytes]]:
    """Return `count` rendered parts as JPEG files, each in two widths: one that stops and one that goes on.

    Random weights give random verdicts, so the trace's coin decides which images go on to a detector. Sides see only
    images, therefore the width carries it: images that go on are `WIDTH_PX` + 1 pixels wide, the others `WIDTH_PX`.
    """
    kinds = sorted(board_types())
    pictures: list[tuple[bytes, bytes]] = []
    board = 0
    while len(pictures) < count:
        for placement in render_board(kinds[board % len(kinds)], seed + board, _DEFECT_RATE).placements:
            crop = cv2.cvtColor(placement.pixels, cv2.COLOR_RGB2BGR)
            pictures.append((_jpeg(crop, WIDTH_PX), _jpeg(crop, WIDTH_PX + 1)))
        board += 1
    return pictures[:count]


def goes_on(width_px: int) -> bool:
    """Return True if an image of this width goes on to its detector."""
    return width_px != WIDTH_PX


def _jpeg(crop: cv2.typing.MatLike, width_px: int) -> bytes:
    resized = cv2.resize(crop, (width_px, WIDTH_PX), interpolation=cv2.INTER_CUBIC)
    _, encoded = cv2.imencode(".jpg", resized, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
    return encoded.tobytes()
