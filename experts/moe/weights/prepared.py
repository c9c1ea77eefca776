"""Files prepared once for a checkpoint (traces, predictors, united experts, plans), in its folder `coserve/`.

Each file carries the stamp of its checkpoint; files of another checkpoint are refused.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from experts.moe.errors import ModelError
from experts.moe.folder import open_part

FOLDER = "coserve"
TRAIN = "traces/train"
POPULARITY = "popularity"

# The command that makes a file, by the first word of its name; a mode's own files come from `coserve moe fit`.
_COMMANDS = {"text": "trace", "traces": "trace", "popularity": "trace", "united": "unite", "plan": "plan"}
_SAMPLE_BYTES = 1 << 16


def stamp_of(checkpoint: Path) -> str:
    """Return a name for these exact weights: sha256 over the configuration and samples of each weights file.

    Reads 192 KiB of each file, so that 90 GB are stamped in milliseconds. Raises ModelError if there are no weights.
    """
    weights = sorted(checkpoint.glob("*.safetensors"))
    config = checkpoint / "config.json"
    if not weights or not config.is_file():
        raise ModelError(checkpoint, "is not a checkpoint in Hugging Face format: needs config.json and *.safetensors")
    digest = hashlib.sha256(config.read_bytes())
    for file in weights:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open_part(file) as stream:
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

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        """Return True if tensors of this name exist and were made from these weights."""
        try:
            with safe_open(self.path(name), framework="pt") as file:
                return (file.metadata() or {}).get("stamp") == self.stamp
        except (OSError, SafetensorError):
            return False

    def is_made(self, name: str, made: Mapping[str, Any]) -> bool:
        """Return True if tensors of this name exist whose note `made` is equal."""
        return self.has(name) and self.load(name)[1].get("made") == made

    def save(self, name: str, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, Any] | None = None) -> Path:
        """Write tensors and `notes` (JSON values), whole or not at all; return the file."""
        file = self.path(name)
        part = file.with_name(file.name + ".part")
        file.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"stamp": self.stamp, "notes": json.dumps(dict(notes or {}))}
        save_file({key: value.contiguous() for key, value in tensors.items()}, part, metadata=metadata)
        part.chmod(0o644)  # the library writes for the owner alone; the service is another user
        return part.rename(file)

    def load(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the tensors and notes. Raises ModelError if they are missing, broken or of other weights."""
        file = self.path(name)
        if not file.is_file():
            raise ModelError(file, f"not made yet; make it with `{self._command(name)}`")
        try:
            with safe_open(file, framework="pt") as opened:
                metadata: dict[str, str] = opened.metadata() or {}
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  (not a mapping)
        except (OSError, SafetensorError) as error:
            raise self._make_again(name, f"cannot be read ({error})") from error
        if metadata.get("stamp") != self.stamp:
            raise self._make_again(name, "made from other weights")
        return tensors, json.loads(metadata.get("notes", "{}"))

    @contextmanager
    def reading(self, name: str) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
        """Yield what `load` returns. Raises ModelError also if the body misses a part of it."""
        loaded = self.load(name)
        try:
            yield loaded
        except (KeyError, TypeError) as error:
            raise self._make_again(name, f"is not complete ({error})") from error

    def _make_again(self, name: str, problem: str) -> ModelError:
        return ModelError(self.path(name), f"{problem}; make it again with `{self._command(name)}`")

    def _command(self, name: str) -> str:
        first_word = re.split("[/-]", name, maxsplit=1)[0]
        return f"coserve moe {_COMMANDS.get(first_word, 'fit')} {self.checkpoint}"
