"""The experts of the live benchmark: weights files with random values, made once into a folder.

Each expert is two files of its own bytes: a slot's (`.safetensors`, batch norms folded) and the ordinary one
(`.pt`, the framework's state_dict), so that cold reads are real for every side.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml
from torch import nn

from experts.catalog import CatalogFile, resolve, write_catalog
from experts.spec import ExpertId, ExpertSpec
from experts.vision.architectures import ARCHITECTURES, layout_id
from experts.vision.layouts import build_layout, pack
from experts.vision.networks import adapt, build_original, select_head
from experts.weights import write_weights
from tests.bench.workload import LABELS

#: Experts differ from one another by so much per weight; enough that no two files are alike, and outputs stay finite.
_SPREAD = 0.02
_RECIPE = "recipe.json"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the stock is made of. `input_size` is of both, in pixels."""

    classifiers: int = 60
    detectors: int = 4
    classifier: str = "resnet101"
    detector: str = "yolo11m"
    input_size: int = 128
    dtype: str = "float32"
    seed: int = 5

    def names(self) -> tuple[list[str], list[str]]:
        """Experts' ids: classifiers, detectors."""
        return [f"part-{n:03d}" for n in range(self.classifiers)], [f"solder-{n}" for n in range(self.detectors)]


def ordinary_file(spec: ExpertSpec) -> Path:
    """Where an expert's ordinary state_dict lies."""
    return spec.file.with_suffix(".pt")


def make_stock(folder: Path, recipe: Recipe, advance: Callable[[str], None] = lambda _name: None) -> Path:
    """The stock's catalog; whatever of it is there from before, made to the same recipe, is used as it is."""
    catalog = folder / "catalog.yaml"
    noted = folder / _RECIPE
    wanted = json.dumps(asdict(recipe))
    if catalog.is_file() and noted.is_file() and noted.read_text(encoding="utf-8") == wanted:
        return catalog
    folder.mkdir(parents=True, exist_ok=True)
    noted.unlink(missing_ok=True)
    entries: dict[str, Mapping[str, object]] = {}
    for architecture, names in zip((recipe.classifier, recipe.detector), recipe.names(), strict=True):
        maker = _Maker(architecture, recipe)
        for number, name in enumerate(names):
            entries[name] = maker.make(folder, name, recipe.seed * 10_000 + number)
            advance(name)
    write_catalog(catalog, entries)
    noted.write_text(wanted, encoding="utf-8")
    return catalog


def read_stock(catalog: Path) -> dict[ExpertId, ExpertSpec]:
    """Specs by id. Raises ValueError where files are missing or damaged."""
    model = CatalogFile.model_validate(yaml.safe_load(catalog.read_text(encoding="utf-8")))
    found, problems = resolve(model, catalog.parent)
    if problems:
        raise ValueError(f"{catalog}: {problems[0][1]}; remove the folder to have it made again")
    return dict(found)


class _Maker:
    """Experts of one architecture: built once, varied for each."""

    def __init__(self, architecture: str, recipe: Recipe) -> None:
        self._known = ARCHITECTURES[architecture]
        self._recipe = recipe
        torch.manual_seed(recipe.seed)
        self._original = build_original(self._known, len(LABELS))
        select_head(self._original, end_to_end=False)
        name = layout_id(self._known, len(LABELS), recipe.input_size, recipe.dtype, "channels_last")
        self._layout = build_layout(name)

    def make(self, folder: Path, name: str, seed: int) -> dict[str, object]:
        model = _vary(self._original, seed)
        file = folder / f"{name}.safetensors"
        sha256 = write_weights(file, pack(self._layout, adapt(self._known, model, self._recipe.input_size)), {
            "architecture": self._known.name,
            "classes": json.dumps(list(LABELS)),
            "input_size": str(self._recipe.input_size),
            "normalisation": self._known.normalisation,
            "dtype": self._recipe.dtype,
            "memory_format": "channels_last",
            "head": "plain",
            "layout": self._layout.layout,
            "origin": "coserve bench live: random values",
        })  # fmt: skip
        torch.save(model.state_dict(), file.with_suffix(".pt"))
        return {
            "architecture": self._known.name,
            "file": file.name,
            "classes": list(LABELS),
            "input_size": self._recipe.input_size,
            "normalisation": self._known.normalisation,
            "sha256": sha256,
        }


def _vary(original: nn.Module, seed: int) -> nn.Module:
    model = copy.deepcopy(original)
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1.0 + _SPREAD * (torch.rand(tensor.shape, generator=dice) - 0.5))
    return model
