"""Trains the backbone that the heads of a line share, and reads it again for the training of experts."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experts.catalog import CatalogEntry, add_expert, read_catalog
from experts.spec import LayoutId
from experts.stored import thinned
from experts.vision.architectures import ARCHITECTURES, CHANNELS_LAST, FEATURES
from experts.vision.layouts import build_layout, pack
from experts.vision.networks import adapt_backbone
from experts.vision.slot import Slot, loaded_slot
from experts.weights import file_sha256, write_weights
from tools.training import TrainingError, architecture_of, fit, require_expert_id
from tools.training.checkpoint import read_checkpoint
from tools.training.expert_file import (
    STORES,
    entry_of,
    header_of,
    spec_of_entry,
)
from tools.training.labelled import DIGEST_BYTES, held_back, read_labelled

#: The file that training goes on from, beside the backbone's; and in it the digests of the pictures it has seen.
_SUFFIX = ".pt"
_SEEN = "seen"
#: And the sha256 of the backbone's own file.
_OF = "of"
_HELD_BACK_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class BackbonePlan:
    """A backbone's network and training. `start` is a file of torchvision weights to begin with.

    With `vary` copies that differ so keep their label; without it turned and mirrored ones are classes of their own.
    `store` is the form of the file (STORES).
    """

    architecture: str = "resnet18"
    input_size: int = 96
    schedule: fit.Schedule = field(default_factory=lambda: fit.Schedule(40, learning_rate=2e-3))
    threads: int = 1
    start: Path | None = None
    vary: fit.Variation | None = None
    store: str = "float32"


def train_backbone(
    folders: Sequence[Path], out: Path, *, name: str, plan: BackbonePlan, on_progress: fit.OnProgress = lambda _: None
) -> dict[str, Any]:
    """Train on `FOLDER/LABEL/*.png` of every component type, and add the backbone to the catalog of `out`.

    Types and labels together are its classes: it learns what tells parts and their defects apart. A fifth of the
    pictures is held back, so that experts on it can be measured on pictures that it does not know. Without `folders`
    the weights to begin with are the backbone as they are. Raises TrainingError.
    """
    architecture, schedule = plan.architecture, plan.schedule
    architecture_of(architecture, "classify")
    require_expert_id(name)
    torch.set_num_threads(plan.threads)
    torch.manual_seed(schedule.seed)
    pictures, targets, classes, seen = _read_all(folders, plan.input_size)
    outputs = classes * fit.TURNS if plan.vary is None else classes
    network = fit.new_network(architecture, max(outputs, 1))
    known = frozenset() if plan.start is None else _load_start(network, plan.start)
    if folders and plan.vary is None:
        fit.fit_turned(network, pictures, targets, schedule, on_progress)
    elif folders:
        fit.fit_network(network, pictures, targets, schedule, on_progress, plan.vary or fit.Variation())
    entry = write_backbone(network.eval(), architecture, plan.input_size, out, name, known | seen, plan.store)
    add_expert(out / "catalog.yaml", name, entry)
    file = out / entry["file"]
    files = {"file": str(file), "network": str(file.with_suffix(_SUFFIX))}  # experts are trained on from the network
    version = entry["sha256"][:12]
    return {"backbone": name, "version": version, "classes": classes, "pictures": len(targets)} | files


def write_backbone(
    network: nn.Module,
    architecture: str,
    input_size: int,
    out: Path,
    name: str,
    seen: frozenset[bytes] = frozenset(),
    store: str = "float32",
) -> dict[str, Any]:
    """Write the backbone of a trained classifier, and return its catalog entry.

    `seen` are the digests of the pictures that it learned from. The file's name has the version, so that heads of an
    earlier one keep theirs. `store` is the form of the file (STORES); the network beside it, which experts are trained
    from, has the weights as they are stored.
    """
    kind = ARCHITECTURES[architecture]
    metadata = header_of(kind, (), input_size, ("float32", CHANNELS_LAST, FEATURES), "backbone")
    built = build_layout(LayoutId(metadata["layout"]))
    blocks = pack(built, adapt_backbone(network))
    is_thin = store != STORES[-1]
    if is_thin:
        blocks, metadata["stored"] = thinned(blocks, built.form(store)), store
    out.mkdir(parents=True, exist_ok=True)
    part = out / f".{name}.backbone"
    try:
        sha256 = write_weights(part, blocks, metadata)
        file = out / f"{name}@{sha256[:12]}.safetensors"
        part.replace(file)
        entry = entry_of(kind, (), input_size, file, sha256)
        if is_thin:
            network = _with_weights_of(stored_backbone(out, name, entry), network)
        state = {key: value for key, value in network.state_dict().items() if not key.startswith("fc.")}
        digests = torch.tensor([list(digest) for digest in sorted(seen)], dtype=torch.uint8)
        of = torch.frombuffer(bytearray.fromhex(sha256), dtype=torch.uint8)
        torch.save(state | {_SEEN: digests.reshape(len(seen), DIGEST_BYTES), _OF: of}, part)
        part.replace(file.with_suffix(_SUFFIX))
    finally:
        part.unlink(missing_ok=True)
    return entry


def stored_backbone(out: Path, name: str, entry: dict[str, Any]) -> Slot:
    """Return the backbone of a catalog entry in a slot: with the weights of its file, as a line serves it."""
    return loaded_slot(spec_of_entry(out, name, entry))


def _with_weights_of(slot: Slot, network: nn.Module) -> nn.Module:
    """Return a copy of the network that `slot` was stored from, with weights that fold to those of the slot.

    Folding a batch norm scales its convolution's weights, so they change by the same factor before and after it.
    """
    network = copy.deepcopy(network)
    folded, stored = (dict(module.named_parameters()) for module in (adapt_backbone(network), slot.module))
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            before, after = (weights[f"network.{name}.weight"] for weights in (folded, stored))
            module.weight.detach().mul_(torch.where(before == 0, 1.0, after / before))
    return network


def load_backbone(catalog: Path, name: str | None) -> "BackboneInCatalog | None":
    """Return the backbone `name` of a catalog, or its only one; None without a name if there is none.

    `name` may also be another folder of experts, whose only backbone is meant. Raises TrainingError and CatalogError.
    """
    if name is not None and Path(name).is_dir():
        other = Path(name) / "catalog.yaml"
        if (found := load_backbone(other, None)) is None:
            raise TrainingError(f"{other} has no backbone: `coserve train backbone FOLDERS…` makes one")
        return BackboneInCatalog(found.name, found.entry.moved_from(found.folder), found.folder)
    entries = read_catalog(catalog)
    backbones = {key: entry for key, entry in entries.items() if not entry.classes}
    if name is None and len(backbones) > 1:
        raise TrainingError(f"{catalog} has the backbones {', '.join(backbones)}: name one with --backbone")
    if name is None and not backbones:
        return None
    chosen = name or next(iter(backbones))
    if chosen not in backbones:
        others = f"name one of {', '.join(backbones)}, or " if backbones else ""
        remedy = f"{others}make it: `coserve train backbone FOLDERS… --id {chosen}`"
        raise TrainingError(f"{catalog} has no backbone {chosen}: {remedy}")
    return BackboneInCatalog(chosen, backbones[chosen], catalog.parent)


@dataclass(frozen=True, slots=True)
class BackboneInCatalog:
    """A backbone and the folder that its file is relative to."""

    name: str
    entry: CatalogEntry
    folder: Path

    def network(self) -> tuple[nn.Module, frozenset[bytes]]:
        """Return it as a network to train on from, its last layer untrained, and the digests of the pictures that it
        has seen. Raises TrainingError.
        """
        weights = self.folder / self.entry.file
        file = _network_file(weights, self.entry.sha256[:12])
        if not file.is_file():
            raise TrainingError(
                f"{file}: is missing: experts are trained from it; train the backbone again, or copy it"
            )
        if not weights.is_file() or file_sha256(weights) != self.entry.sha256:
            raise TrainingError(f"{weights}: is missing or changed: restore it, or train the backbone again")
        network = fit.new_network(self.entry.architecture, 1)
        seen = _load_start(network, file, self.entry.sha256)
        return network.eval(), seen


def _network_file(weights: Path, version: str) -> Path:
    """Return the network that training wrote beside a backbone's weights; those may since lie in an edition's store."""
    beside = weights.with_suffix(_SUFFIX)
    trained = (file for folder in weights.parents[:3] for file in folder.glob(f"*@{version}{_SUFFIX}"))
    return beside if beside.is_file() else next(trained, beside)


def _read_all(folders: Sequence[Path], input_size: int) -> tuple[fit.Pictures, fit.Targets, int, frozenset[bytes]]:
    """Return the pictures to learn from, their classes, how many there are, and the pictures' digests."""
    pictures: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    seen: set[bytes] = set()
    classes = 0
    for folder in folders:
        data, _ = read_labelled(folder, input_size, min_labels=1)
        learned = ~held_back(data, _HELD_BACK_SHARE)
        pictures.append(data.pictures[learned])
        targets.append(data.targets[learned] + classes)
        seen.update(data.digests[row] for row in np.nonzero(learned)[0])
        classes += len(data.labels)
    if not folders:
        return np.zeros((0, input_size, input_size, 3), np.uint8), np.zeros(0, np.int64), 0, frozenset()
    return np.concatenate(pictures), np.concatenate(targets), classes, frozenset(seen)


def _load_start(network: nn.Module, file: Path, sha256: str | None = None) -> frozenset[bytes]:
    """Load all but the last layer; return the digests of the pictures that the file has seen.

    With `sha256` the file must be the one of that backbone. Raises TrainingError.
    """
    tensors = dict(read_checkpoint(file).tensors)
    digests = tensors.pop(_SEEN, torch.zeros(0, DIGEST_BYTES, dtype=torch.uint8))
    of = bytes(tensors.pop(_OF, torch.zeros(0, dtype=torch.uint8)).flatten().tolist()).hex()
    if digests.dim() != 2 or digests.shape[1] != DIGEST_BYTES or (sha256 is not None and of != sha256):
        raise TrainingError(f"{file}: belongs to another backbone: restore the one of {(sha256 or of)[:12]}")
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise TrainingError(f"{file}: holds weights that are not finite numbers; train the backbone again")
    state = {key: value for key, value in tensors.items() if not key.startswith("fc.")}
    try:
        missing, unexpected = network.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise TrainingError(f"{file}: {str(error).splitlines()[1].strip()}; name its --architecture") from error
    lacking = [key for key in missing if not key.startswith("fc.")]
    if lacking or unexpected:
        what = f"lacks {lacking[0]}" if lacking else f"has {unexpected[0]}, which it should not have"
        raise TrainingError(f"{file}: {what}; name its --architecture")
    return frozenset(bytes(row) for row in digests.numpy())
