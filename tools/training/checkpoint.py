"""Reads a trained network's file as people save it. Knows it by its content, not its name, and runs nothing of it.

torch's restricted unpickler (`weights_only`) makes tensors and plain values only. Every other class that a file names,
an argparse.Namespace beside the weights or a whole network, becomes a stand-in: an empty class of ours that keeps what
was pickled, so that a refusal can say what the file holds. Nothing that a file names is imported or called.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from safetensors import safe_open

from experts.vision.architectures import ARCHITECTURES, Architecture
from experts.vision.networks import weight_shapes
from routing_rules.load import read_yaml_text
from tools.terminal.console import CommandError
from tools.training import TrainingError, class_names

_SAVE = 'where it was trained, save its weights with torch.save(model.state_dict(), "weights.pth") and import that file'
_RUN = "run python -c 'import torch; torch.save({0}.state_dict(), \"weights.pth\")' and import weights.pth"
#: Files that hold no torch weights, by their first bytes.
_FOREIGN = {
    rb"\x08[\x01-\x1f][\x12\x1a\x22\x28\x32\x3a\x42]": "an ONNX graph",
    rb"\x89HDF": "a file of Keras or HDF5",
    rb"version https://git-lfs": "a pointer of Git LFS (`git lfs pull` fetches the file)",
    rb"\s*<[!?a-zA-Z]": "a web page or XML",
}
#: Parts of names that wrappers of torch put between a network's own (DDP, AveragedModel, torch.compile, FSDP).
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_AVERAGED = re.compile(r"(?<![a-z])(ema|swa|averaged?)(?![a-z])", re.IGNORECASE)
#: Where checkpoints keep the weights to take, if there are several; and the names of the classes.
_STATE_KEYS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "weights", "params")
_NAME_KEYS = ("class_to_idx", "label2id", "idx_to_class", "id2label", "classes", "class_names", "names")
#: Keys that may also name something else.
_PERHAPS_NAME_KEYS = ("categories", "labels")
_DEEPEST = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a file, named without wrappers. `pickled` is the class of a network that was pickled whole, and
    `place` the key under which the file has it.

    `names` are those of the classes, as the file has them under the key `names_from`; `note` says which weights of
    several were taken; `end_to_end` whether a detector answers with its end-to-end head, if it says so.
    """

    tensors: Mapping[str, torch.Tensor]
    pickled: str = ""
    place: str = ""
    names: Any = None
    names_from: str = ""
    note: str | None = None
    end_to_end: bool | None = None


class _StandIn:
    """In place of any class or function that a pickle names: takes whatever was pickled, and does nothing."""

    attributes: Mapping[str, Any] = MappingProxyType({})

    def __new__(cls, *_args: object) -> Self:
        return object.__new__(cls)

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, Mapping):
            self.attributes = state


def read_checkpoint(file: Path) -> Checkpoint:
    """Raises TrainingError, which says what the file is instead and what to do."""
    try:
        with file.open("rb") as opened:
            head = opened.read(512)
        if head[6:9] == b"\0\0{":
            with safe_open(file, "pt") as whole:
                texts = whole.metadata() or {}  # JSON, which is YAML
                names_from, names = _class_names_in({key: read_yaml_text(texts[key], "").data for key in texts})
                tensors = {name: whole.get_tensor(name) for name in whole.keys()}  # noqa: SIM118
                return Checkpoint(_unwrapped(tensors), names=names, names_from=names_from)
        return _checkpoint_of(file, _unpickled(file, head))
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read ({error.strerror or error})") from error
    except TrainingError:
        raise
    except Exception as error:  # damaged bytes cause any
        if isinstance(error, pickle.UnpicklingError) and (named := re.search(r"GLOBAL (\S+)", str(error))):
            what = f"is a pickled program that names {named[1]}, not weights alone"
            raise TrainingError(f"{file}: {what}: {_SAVE}") from error
        what = "is no whole file of torch.save or safetensors (packed, cut, damaged?): unpack it, copy it again"
        raise TrainingError(f"{file}: {what}, or {_SAVE}") from error


def _unpickled(file: Path, head: bytes) -> Any:
    if foreign := next((what for start, what in _FOREIGN.items() if re.match(start, head)), None):
        raise TrainingError(f"{file}: is {foreign}, not weights of torch: {_SAVE}")
    names: list[str] = []
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as packed:
            if any(member.endswith("/constants.pkl") for member in packed.namelist()):
                remedy = _RUN.format(f'torch.jit.load("{file.name}")')
                raise TrainingError(f"{file}: is a TorchScript program, not a network's weights: {remedy}")
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    stand_ins: list[Any] = [(type(name, (_StandIn,), {}), name) for name in names]
    with torch.serialization.safe_globals(stand_ins), file.open("rb") as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickles that are not torch's
        return torch.load(opened, map_location="cpu", weights_only=True)


def _checkpoint_of(file: Path, content: Any) -> Checkpoint:
    beside = content if isinstance(content, Mapping) else {}
    names_from, names = _class_names_in(content)
    if found := dict(_state_dicts(content)):
        most = max(map(len, found.values()))
        found = {path: tensors for path, tensors in found.items() if 2 * len(tensors) >= most}
        averaged = [path for path in found if _AVERAGED.search(path)]
        usual = [path for path in found if path.split(".")[-1] in _STATE_KEYS]
        chosen = [*averaged, *usual, *found][0]
        note = f"{file.name} holds {', '.join(found)}: {chosen} was taken" if len(found) > 1 else None
        return Checkpoint(_unwrapped(found[chosen]), names=names, names_from=names_from, note=note)
    networks = {
        place: value
        for place, value in {"": content, **beside}.items()
        if isinstance(value, _StandIn) and "_modules" in value.attributes
    }
    if not networks:
        raise TrainingError(f"{file}: holds no state_dict: {_SAVE}")
    place = "ema" if "ema" in networks else next(iter(networks))
    if "names" in networks[place].attributes:
        names, names_from = networks[place].attributes["names"], "names"
    parts = dict(_parts(networks[place]))
    tensors = {
        f"{prefix}{name}": tensor.detach()
        for prefix, part in parts.items()
        for kind in ("_parameters", "_buffers")
        for name, tensor in part.get(kind, {}).items()
        if isinstance(tensor, torch.Tensor) and name not in part.get("_non_persistent_buffers_set", ())
    }
    end_to_end = next((bool(part["_end2end"]) for part in parts.values() if "_end2end" in part), None)
    pickled = type(networks[place]).__name__
    return Checkpoint(_unwrapped(tensors), pickled, place, names, names_from, end_to_end=end_to_end)


def _class_names_in(content: Any) -> tuple[str, Any]:
    """Return the key of the classes' names wherever a checkpoint keeps them, and its value; "" and None without."""
    held: dict[str, Any] = {}
    places: list[tuple[Any, int]] = [(content, 0)]
    for place, depth in places:
        values = place.attributes if isinstance(place, _StandIn) else place
        if isinstance(values, Mapping) and depth <= _DEEPEST + 1:
            named = {str(key).lower(): value for key, value in values.items()}
            held = {key: value for key, value in named.items() if not isinstance(value, int | float | None)} | held
            places += [(value, depth + 1) for value in values.values()]
    for key in _NAME_KEYS:
        if key in held:
            return key, held[key]
    for key in _PERHAPS_NAME_KEYS:
        with suppress(CommandError):
            class_names(held.get(key), key)
            return key, held[key]
    return "", None


def _state_dicts(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield every state_dict in a checkpoint with the keys that lead to it: a mapping with tensors named `….weight`."""
    if not isinstance(content, Mapping):
        return
    tensors = {str(key): value for key, value in content.items() if isinstance(value, torch.Tensor)}
    if any(key.endswith("weight") for key in tensors):
        yield ".".join(path), tensors
    elif len(path) < _DEEPEST:
        for key, value in content.items():
            yield from _state_dicts(value, (*path, str(key)))


def _parts(network: _StandIn, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the attributes of a pickled network and of all parts of it, with what their tensors' names begin with."""
    yield prefix, network.attributes
    for name, part in network.attributes.get("_modules", {}).items():
        if isinstance(part, _StandIn):
            yield from _parts(part, f"{prefix}{name}.")


def _unwrapped(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): tensor for name, tensor in tensors.items()
    }


def weights_for(kind: Architecture, checkpoint: Checkpoint, file: Path) -> dict[str, torch.Tensor]:
    """Return the weights under the names of the framework's `kind`, of a state_dict or an ultralytics detector.

    Raises TrainingError, which says what the file holds instead and what to do.
    """
    framework, of = checkpoint.pickled.partition(".")[0], checkpoint.pickled.rpartition(".")[2]
    if framework == "models":
        where = f"the old YOLOv5's or YOLOv7's own repository ({checkpoint.pickled})"
        remedy = "train it again, with `coserve train detector DATA.YAML --architecture yolov5n` or ultralytics"
        raise TrainingError(f"{file}: comes from {where}, which ultralytics cannot open: {remedy}")
    if framework == "ultralytics" and of != "DetectionModel":
        remedy = "a detector (`coserve train detector DATA.YAML`) or a classifier (`coserve train classifier FOLDER`)"
        raise TrainingError(f"{file}: holds ultralytics' {of}, whose answers no expert gives: train {remedy}")
    expected = weight_shapes(kind.source)
    weights = _named_as(expected, checkpoint.tensors)
    if (misfit := _misfit(expected, weights)) is not None:
        raise TrainingError(f"{file}: {_other_network(kind, checkpoint.tensors, misfit)}")
    channels = weights[next(iter(expected))].shape[1]
    if channels not in {1, 3}:
        raise TrainingError(f"{file}: its first layer takes {channels} channels, pictures have 3: train it on these")
    if kind.family == "resnet":
        last = {name for name in weights if name.startswith("fc.")}
        if not {"fc.weight"} <= last <= {"fc.weight", "fc.bias"}:
            remedy = "one Linear (fc) is taken, alone or in a Sequential after Dropout: train it with that"
            raise TrainingError(f"{file}: its last layer is {', '.join(sorted(last)) or 'missing'}; {remedy}")
        weights.setdefault("fc.bias", weights["fc.weight"].new_zeros(len(weights["fc.weight"])))
    if checkpoint.pickled and framework != "ultralytics":
        key = f'["{checkpoint.place}"]' if checkpoint.place else ""
        remedy = _RUN.format(f'torch.load("{file.name}", weights_only=False){key}')
        what = f"holds a whole pickled network ({checkpoint.pickled}), not weights alone"
        raise TrainingError(f"{file}: {what}: where it was trained, {remedy}")
    return weights


def _named_as(expected: Mapping[str, torch.Size], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the part of a network (`model.`, `net.`, `ema_model.`) that has most of the names."""
    first = next(iter(expected))
    prefixes = sorted({name.removesuffix(first) for name in tensors if f".{name}".endswith(f".{first}")}, key=len)
    matches = {prefix: sum(f"{prefix}{name}" in tensors for name in expected) for prefix in prefixes}
    best = max(prefixes, key=lambda prefix: (matches[prefix], bool(_AVERAGED.search(prefix))), default="")
    named = {name.removeprefix(best): tensor for name, tensor in tensors.items() if name.startswith(best)}
    named = {name: tensor for name, tensor in named.items() if name in expected or tensor.is_floating_point()}
    inside = {name.removesuffix("weight") for name in named if re.fullmatch(r"fc\..+\.weight", name)}
    linear = [layer for layer in inside if named[f"{layer}weight"].dim() == 2]
    if len(linear) == 1:  # in a Sequential
        named = {re.sub(rf"^{re.escape(linear[0])}", "fc.", name): tensor for name, tensor in named.items()}
    return named


def _misfit(expected: Mapping[str, torch.Size], weights: Mapping[str, torch.Tensor]) -> str | None:
    """Return the first difference, None without. The last layer depends on the classes, and is not compared."""
    first, *_, end = expected
    last = re.match(r"(model\.\d+|\w+)\.", end)[0]  # pyright: ignore[reportOptionalSubscript]
    for name, shape in expected.items():
        if name.startswith(last) or name.endswith("num_batches_tracked"):
            continue
        if name not in weights:
            return f"{name} is missing among {', '.join(list(weights)[:3])} …"
        found, after = weights[name].shape, 2 if name == first else 1  # whose channels weights_for compares
        if (*found[:1], *found[after:]) != (*shape[:1], *shape[after:]):
            sizes = (" x ".join(map(str, each)) or "one number" for each in (found, shape))
            return f"{name} is {', expected '.join(sizes)}"
    more = next((name for name in weights if name not in expected and not name.startswith(last)), None)
    return None if more is None else f"{more} is one too many"


def _other_network(kind: Architecture, tensors: Mapping[str, torch.Tensor], misfit: str) -> str:
    """Say which network has these tensors, and what to do."""
    family = "yolo" if any(re.search(r"(^|\.)model\.\d+\.", name) for name in tensors) else "resnet"
    for other in ARCHITECTURES.values():
        if other.family == family and other != kind:
            expected = weight_shapes(other.source)
            if _misfit(expected, _named_as(expected, tensors)) is None:
                return f"holds the weights of a {other.name}, not of a {kind.name}: name --architecture {other.name}"
    return f"its weights are not those of a {kind.name}: {misfit}; train a {kind.name} that is not changed"
