"""Reads a trained network's file as people save it. Knows it by its content, not its name, and runs nothing of it.

torch's restricted unpickler (`weights_only`) makes tensors and plain values only. Every other class that a file names,
an argparse.Namespace beside the weights or a whole network, becomes a stand-in: an empty class of ours that keeps what
was pickled, so that a refusal can say what the file holds. Nothing that a file names is imported or called.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeGuard

import torch
from safetensors import safe_open

from experts.vision.architectures import ARCHITECTURES, Architecture
from experts.vision.frameworks import torchvision
from experts.vision.networks import weight_shapes
from tools.training import TrainingError

_SAVE = 'where it was trained, save its weights with torch.save(model.state_dict(), "weights.pth") and import that file'
#: Files without weights of torch's: their first bytes, what they are and what to do.
_FOREIGN = (
    (rb"\x08[\x01-\x1f][\x12\x1a\x22\x28\x32\x3a\x42]", f"is an ONNX graph, not a network's weights: {_SAVE}"),
    (rb"\x89HDF", "is a file of Keras or HDF5, not weights of torch: train a network of torchvision or ultralytics"),
    (rb"version https://git-lfs", "is a pointer of Git LFS: fetch the file itself with `git lfs pull`"),
    (rb"\s*<[!?a-zA-Z]", "is a web page or XML, not a network: download the file itself"),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf|Rar!|.{257}ustar", "is a packed archive: unpack it and import the file in it"),
)
_TORCHSCRIPT = (
    "is a TorchScript program, not a network's weights: "
    'run python -c \'import torch; torch.save(torch.jit.load("{name}").state_dict(), "weights.pth")\''
    " and import weights.pth"
)
_ALONE = (
    'where it was trained, run python -c \'import torch; torch.save(torch.load("{name}", weights_only=False){what},'
    ' "weights.pth")\' and import weights.pth'
)
#: Parts of names that wrappers of torch put between a network's own (DDP, AveragedModel, torch.compile, FSDP).
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_AVERAGED = re.compile(r"(?<![a-z])(ema|swa|averaged?)(?![a-z])", re.IGNORECASE)
#: Where checkpoints keep the weights to take, if there are several; and the names of the classes.
_STATE_KEYS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "weights", "params")
_NAME_KEYS = ("class_to_idx", "idx_to_class", "classes", "class_names", "names")
_DEEPEST = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a file, named without wrappers. `pickled` is the class of a network that was pickled whole.

    `names` are those of the classes, as the file has them under the key `names_from`; `note` says which weights of
    several were taken; `end_to_end` whether a detector answers with its end-to-end head, if it says so.
    """

    tensors: Mapping[str, torch.Tensor]
    pickled: str | None = None
    names: Any = None
    names_from: str = ""
    note: str | None = None
    end_to_end: bool | None = None


class _StandIn:
    """In place of any class or function that a pickle names: takes whatever was pickled, and does nothing."""

    state: Any = None

    def __new__(cls, *_args: object) -> Self:
        return object.__new__(cls)

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state

    @property
    def attributes(self) -> Mapping[str, Any]:
        return self.state if isinstance(self.state, Mapping) else {}


def read_checkpoint(file: Path) -> Checkpoint:
    """Raises TrainingError, which says what the file is instead and what to do."""
    try:
        with file.open("rb") as opened:
            head = opened.read(512)
    except FileNotFoundError as error:
        raise TrainingError(f"{file}: there is no such file") from error
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read ({error.strerror or error})") from error
    is_safetensors = head[6:9] == b"\0\0{"
    foreign = next((text for start, text in _FOREIGN if re.match(start, head, re.DOTALL)), None)
    if foreign is not None and not is_safetensors:
        raise TrainingError(f"{file}: {foreign}")
    try:
        if is_safetensors:
            with safe_open(file, "pt") as whole:
                return Checkpoint(_unwrapped({name: whole.get_tensor(name) for name in whole.keys()}))  # noqa: SIM118
        return _checkpoint_of(file, _unpickled(file))
    except TrainingError:
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"is a pickled program{f' that names {named[1]}' if named else ''}, not weights alone"
        raise TrainingError(f"{file}: {what}: {_SAVE}") from error
    except Exception as error:  # damaged bytes cause any
        what = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise TrainingError(f"{file}: is damaged, cut or not written by torch.save ({what}): copy it again") from error


def _unpickled(file: Path) -> Any:
    names: list[str] = []
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as packed:
            members = packed.namelist()
        if any(member.endswith("/constants.pkl") for member in members):
            raise TrainingError(f"{file}: {_TORCHSCRIPT.format(name=file.name)}")
        if not any(member.endswith("/data.pkl") for member in members):
            has_some = any(Path(member).suffix in {".pt", ".pth", ".ckpt", ".safetensors"} for member in members)
            remedy = "unpack it and import the file in it" if has_some else _SAVE
            raise TrainingError(f"{file}: is a zip without weights of torch: {remedy}")
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
    stand_ins: list[Any] = [(type(name, (_StandIn,), {}), name) for name in names]
    with torch.serialization.safe_globals(stand_ins), file.open("rb") as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickles that are not torch's
        return torch.load(opened, map_location="cpu", weights_only=True)


def _checkpoint_of(file: Path, content: Any) -> Checkpoint:
    beside = content if isinstance(content, Mapping) else {}
    places = [beside, *(value for value in beside.values() if isinstance(value, Mapping))]
    held = (
        (key, place[key]) for key in _NAME_KEYS for place in places if isinstance(place.get(key), dict | list | tuple)
    )
    names_from, names = next(held, ("", None))
    if found := dict(_state_dicts(content)):
        most = max(map(len, found.values()))
        found = {path: tensors for path, tensors in found.items() if 2 * len(tensors) >= most}
        averaged = [path for path in found if _AVERAGED.search(path)]
        usual = [path for path in found if path.split(".")[-1] in _STATE_KEYS]
        chosen = averaged[0] if averaged else usual[0] if usual else next(iter(found))
        if len(found) > 1 and not averaged and not usual:
            what = "".join(f'["{key}"]' for key in chosen.split("."))
            remedy = _ALONE.format(name=file.name, what=what)
            raise TrainingError(f"{file}: holds several networks ({', '.join(found)}): for {chosen}, {remedy}")
        note = f"{file.name} holds {', '.join(found)}: {chosen} was taken" if len(found) > 1 else None
        return Checkpoint(_unwrapped(found[chosen]), names=names, names_from=names_from, note=note)
    whole = next((each for each in (content, beside.get("ema"), *beside.values()) if _is_network(each)), None)
    if whole is None:
        held = f"a {type(content).__name__}" if isinstance(content, _StandIn) else "no state_dict"
        raise TrainingError(f"{file}: holds {held}: {_SAVE}")
    if "names" in whole.attributes:
        names, names_from = whole.attributes["names"], "names"
    parts = dict(_parts(whole))
    tensors = _unwrapped({name: tensor for at, part in parts.items() for name, tensor in _tensors_of(part, at)})
    heads = [part.attributes["_end2end"] for part in parts.values() if "_end2end" in part.attributes]
    end_to_end = bool(heads[-1]) if heads else None
    return Checkpoint(tensors, type(whole).__name__, names=names, names_from=names_from, end_to_end=end_to_end)


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


def _is_network(content: Any) -> TypeGuard[_StandIn]:
    return isinstance(content, _StandIn) and "_modules" in content.attributes


def _parts(network: _StandIn, prefix: str = "") -> Iterator[tuple[str, _StandIn]]:
    """Yield a pickled network and all parts of it, with what their tensors' names begin with."""
    yield prefix, network
    for name, part in network.attributes["_modules"].items():
        if _is_network(part):
            yield from _parts(part, f"{prefix}{name}.")


def _tensors_of(part: _StandIn, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for kind in ("_parameters", "_buffers"):
        for name, tensor in part.attributes.get(kind, {}).items():
            is_kept = name not in part.attributes.get("_non_persistent_buffers_set", ())
            if isinstance(tensor, torch.Tensor) and is_kept:
                yield f"{prefix}{name}", tensor.detach()


def _unwrapped(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): tensor for name, tensor in tensors.items()
    }


def weights_for(kind: Architecture, checkpoint: Checkpoint, file: Path) -> dict[str, torch.Tensor]:
    """Return the weights under the names of the framework's `kind`, of a state_dict or an ultralytics detector.

    Raises TrainingError, which says what the file holds instead and what to do.
    """
    pickled = checkpoint.pickled or ""
    framework, of = pickled.partition(".")[0], pickled.rpartition(".")[2]
    if framework == "models":
        where = f"the old YOLOv5's or YOLOv7's own repository ({pickled})"
        remedy = "train it again, with `coserve train detector DATA.YAML --architecture yolov5n` or ultralytics"
        raise TrainingError(f"{file}: comes from {where}, which ultralytics cannot open: {remedy}")
    if framework == "ultralytics" and of != "DetectionModel":
        remedy = "train a detection model on boxes, with `coserve train detector DATA.YAML` or `yolo detect train`"
        if of == "ClassificationModel":
            remedy = "train a classifier on its pictures with `coserve train classifier FOLDER`"
        raise TrainingError(f"{file}: holds ultralytics' {of}, whose answers no expert gives: {remedy}")
    expected = weight_shapes(kind.source)
    weights = _named_as(expected, checkpoint.tensors)
    if (misfit := _misfit(expected, weights)) is not None:
        raise TrainingError(f"{file}: {_other_network(kind, checkpoint.tensors, misfit)}")
    channels = weights[next(iter(expected))].shape[1]
    if channels not in {1, 3}:
        raise TrainingError(f"{file}: its first layer takes {channels} channels, pictures have 3: train it on these")
    strange = [name for name in weights if kind.family == "resnet" and name[:3] == "fc." and name not in expected]
    if strange or (kind.family == "resnet" and "fc.weight" not in weights):
        held = f"is {', '.join(sorted(strange))}" if strange else "is missing"
        remedy = "one Linear is taken, alone or in a Sequential after Dropout: train it with that"
        raise TrainingError(f"{file}: its last layer (fc) {held}; {remedy}")
    if pickled and framework != "ultralytics":
        remedy = _ALONE.format(name=file.name, what=".state_dict()")
        raise TrainingError(f"{file}: holds a whole pickled network ({pickled}), not weights alone: {remedy}")
    if kind.family == "resnet":
        weights.setdefault("fc.bias", weights["fc.weight"].new_zeros(len(weights["fc.weight"])))
    return weights


def _named_as(expected: Mapping[str, torch.Size], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the part of a network (`model.`, `net.`, `ema_model.`) that has most of the names."""
    first = next(iter(expected))
    prefixes = sorted({name.removesuffix(first) for name in tensors if f".{name}".endswith(f".{first}")}, key=len)
    matches = {prefix: sum(f"{prefix}{name}" in tensors for name in expected) for prefix in prefixes}
    best = max(prefixes, key=lambda prefix: (matches[prefix], bool(_AVERAGED.search(prefix))), default="")
    named = {name.removeprefix(best): tensor for name, tensor in tensors.items() if name.startswith(best)}
    named = {
        name: tensor
        for name, tensor in named.items()
        if name in expected or not (tensor.dim() == 0 or name.endswith("num_batches_tracked"))
    }
    inside = {name.rpartition(".")[0] for name in named if re.fullmatch(r"fc\.\w[\w.]*\.(weight|bias)", name)}
    if len(inside) == 1 and named.get(f"{(layer := inside.pop())}.weight", torch.zeros(1)).dim() == 2:
        named = {
            re.sub(rf"^{re.escape(layer)}\.", "fc.", name): tensor for name, tensor in named.items()
        }  # a Sequential
    return named


def _misfit(expected: Mapping[str, torch.Size], weights: Mapping[str, torch.Tensor]) -> str | None:
    """Return the first difference, None without. The last layer depends on the classes, and is not compared."""
    first, *_, end = expected
    last = end.split(".")[0] if not end.startswith("model.") else ".".join(end.split(".")[:2])
    for name, shape in expected.items():
        if name.startswith(f"{last}.") or name.endswith("num_batches_tracked"):
            continue
        if name not in weights:
            return f"{name} is missing among {', '.join(list(weights)[:3])} …"
        found = weights[name].shape
        is_first = name == first and len(found) == len(shape)
        if found != shape and not (is_first and (found[0], *found[2:]) == (shape[0], *shape[2:])):
            return f"{name} is {_by(found)}, expected {_by(shape)}"
    more = next((name for name in weights if name not in expected and not name.startswith(f"{last}.")), None)
    return None if more is None else f"{more} is one too many"


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _other_network(kind: Architecture, tensors: Mapping[str, torch.Tensor], misfit: str) -> str:
    """Say which network has these tensors, and what to do."""
    family = "yolo" if any(re.search(r"(^|\.)model\.\d+\.", name) for name in tensors) else "resnet"
    others = {each.source: each.name for each in ARCHITECTURES.values() if each.family == family and each != kind}
    if family == "resnet":
        more = torchvision().models.list_models(torchvision().models, include="*resne*")
        others |= {name: "" for name in more if name not in ARCHITECTURES}
    for source, name in others.items():
        expected = weight_shapes(source)
        if _misfit(expected, _named_as(expected, tensors)) is None:
            if name in ARCHITECTURES:
                return f"holds the weights of a {name}, not of a {kind.name}: name --architecture {name}"
            known = ", ".join(each.name for each in ARCHITECTURES.values() if each.family == family)
            return f"holds the weights of a {source}, which no expert can be: train one of {known}"
    return f"its weights are not those of a {kind.name}: {misfit}; train a {kind.name} that is not changed"


def class_names(value: Any) -> tuple[list[Any], str | None]:
    """Return the names of classes in the network's order, and what is wrong with them.

    They come as a list, by number ({0: "ok"}; keys may be text), or as numbers by name, as torchvision's class_to_idx.
    """
    if isinstance(value, Mapping):
        numbers = [number for number in value.values() if type(number) is int]
        if all(isinstance(key, str) for key in value) and sorted(numbers) == list(range(len(value))):
            value = sorted(value, key=value.__getitem__)
        else:
            by_number = {int(key): name for key, name in value.items() if re.fullmatch(r"\d+", str(key))}
            is_whole = by_number.keys() == {*range(len(value))}
            value = [by_number[number] for number in sorted(by_number)] if is_whole else None
    if not value or not all(isinstance(name, str | int | float) for name in value):
        return [], "cannot be read as names of classes"
    return [*value], next(_mistakes(value), None)


def _mistakes(names: Sequence[Any]) -> Iterator[str]:
    for number, name in enumerate(names):
        if isinstance(name, bool):
            yield f"names class {number} {name}, which YAML makes of NO, off or yes without quotes"
        if not 0 < len(str(name).strip()) <= 128:
            yield f"names class {number} {str(name)[:20]!r}; a name has 1 to 128 characters"
        if (first := [*map(str, names)].index(str(name))) < number:
            yield f"names classes {first} and {number} both {name}"
