"""What is prepared once for a checkpoint (traces, predictors, united experts, plans) and lies in its folder `coserve/`.

Each file carries the stamp of the checkpoint that it was made from; another checkpoint's files are refused.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from experts.moe.errors import ModelError

FOLDER = "coserve"
TRAIN = "traces/train"
HELD_OUT = "traces/heldout"
POPULARITY = "popularity"

# Which command makes a part, by the first word of its name; said where a part is missing.
_MADE_BY = {
    "text": "coserve moe fixture",
    "traces": "coserve moe trace",
    "popularity": "coserve moe trace",
    "duoserve": "coserve moe fit",
    "emoe": "coserve moe fit",
    "united": "coserve moe unite",
    "plan": "coserve moe plan",
}
_SAMPLE_BYTES = 1 << 16


def stamp_of(checkpoint: Path) -> str:
    """A name for these exact weights: sha256 over the configuration and samples of each weights file.

    Reads 192 KiB of each file, so that 90 GB are stamped in milliseconds. Raises ModelError where no weights are.
    """
    weights = sorted(checkpoint.glob("*.safetensors"))
    config = checkpoint / "config.json"
    if not weights or not config.is_file():
        raise ModelError(checkpoint, "no checkpoint in Hugging Face format here: needs config.json and *.safetensors")
    digest = hashlib.sha256(config.read_bytes())
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


class PreparedFiles:
    """The prepared files of one checkpoint; names are paths below its folder without suffix: `traces/train`."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.folder = checkpoint / FOLDER
        self.stamp = stamp_of(checkpoint)

    def path(self, name: str, suffix: str = ".safetensors") -> Path:
        """Where the part lies, whether it is there or not."""
        return self.folder / f"{name}{suffix}"

    def has(self, name: str) -> bool:
        """Whether tensors of this name are there and were made from these weights."""
        try:
            with safe_open(self.path(name), framework="pt") as file:
                return (file.metadata() or {}).get("stamp") == self.stamp
        except (OSError, SafetensorError):
            return False

    def save(self, name: str, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, Any] | None = None) -> Path:
        """Write tensors and `notes` (JSON values), whole or not at all; returns the file."""
        file = self.path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(file.name + ".part")
        metadata = {"stamp": self.stamp, "notes": json.dumps(dict(notes or {}))}
        save_file({key: value.contiguous() for key, value in tensors.items()}, part, metadata=metadata)
        part.chmod(0o644)  # the library writes for the owner alone; the service is another user
        part.rename(file)
        return file

    def load(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors and notes of a part. Raises ModelError where it is missing, broken or of other weights."""
        file = self.path(name)
        if not file.is_file():
            raise ModelError(file, f"not made yet; make it with `{self._command(name)}`")
        try:
            with safe_open(file, framework="pt") as opened:
                metadata: dict[str, str] = opened.metadata() or {}
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  (no mapping)
        except (OSError, SafetensorError) as error:
            raise ModelError(file, f"cannot be read ({error}); make it again with `{self._command(name)}`") from error
        if metadata.get("stamp") != self.stamp:
            raise ModelError(file, f"made from other weights; make it again with `{self._command(name)}`")
        return tensors, json.loads(metadata.get("notes", "{}"))

    def save_json(self, name: str, value: Mapping[str, Any]) -> Path:
        """Write a JSON object with the stamp beside its keys, whole or not at all; returns the file."""
        file = self.path(name, ".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(file.name + ".part")
        part.write_text(json.dumps({"stamp": self.stamp, **value}, indent=1), encoding="utf-8")
        part.rename(file)
        return file

    def load_json(self, name: str) -> dict[str, Any]:
        """The object that `save_json` wrote, without its stamp. Raises ModelError as `load` does."""
        file = self.path(name, ".json")
        if not file.is_file():
            raise ModelError(file, f"not made yet; make it with `{self._command(name)}`")
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(file, f"cannot be read ({error}); make it again with `{self._command(name)}`") from error
        if not isinstance(value, dict) or value.pop("stamp", None) != self.stamp:
            raise ModelError(file, f"made from other weights; make it again with `{self._command(name)}`")
        return value

    def _command(self, name: str) -> str:
        first = re.split("[/-]", name, maxsplit=1)[0]
        return f"{_MADE_BY.get(first, 'coserve moe')} {self.checkpoint}"
