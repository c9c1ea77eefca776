"""Texts of tasks as token ids of one tokenizer: what traces, predictors and plans are made from."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experts.moe.arch import first_line
from experts.moe.errors import ModelError
from experts.moe.library import transformers
from experts.moe.weights.prepared import PreparedFiles

TRAIN = "text/train"
#: The task of files that lie in no folder of their own.
_ANY_TASK = "text"


@dataclass(frozen=True, slots=True)
class TaskText:
    """Token ids of each task, (N,) int64, its files one after the other."""

    ids: dict[str, torch.Tensor]

    def windows(self, task: str, length: int, count: int) -> torch.Tensor:
        """Return at most `count` pieces, (n, length) int64, spread evenly over the task without overlap."""
        whole = self.ids[task]
        fits = len(whole) // length
        places = torch.linspace(0, fits - 1, min(count, fits)).long() if fits else torch.empty(0, dtype=torch.long)
        return whole[: fits * length].view(-1, length)[places]

    def is_same(self, other: "TaskText") -> bool:
        same_tasks = self.ids.keys() == other.ids.keys()
        return same_tasks and all(torch.equal(ids, other.ids[task]) for task, ids in self.ids.items())


def read_texts(folder: Path) -> dict[str, list[str]]:
    """Return each task's texts: a folder in `folder`, with all files below it. Raises ModelError."""
    texts: dict[str, list[str]] = {}
    try:
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            first, *deeper = file.relative_to(folder).parts
            texts.setdefault(first if deeper else _ANY_TASK, []).append(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(folder, f"cannot be read as text ({error}); give a folder of UTF-8 files") from error
    if not texts:
        raise ModelError(folder, "has no files; give a folder with a folder of text files for each task")
    return texts


def pythons_manual() -> dict[str, list[str]]:
    """Return the texts of Python's own `help()`, which every installation has, as one task."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return {_ANY_TASK: [topics[name] for name in sorted(topics)]}


def encode(texts: Mapping[str, Sequence[str]], tokenizer: Any) -> TaskText:
    """Return token ids; files end with the tokenizer's end of text, if it has one."""
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids: dict[str, torch.Tensor] = {}
    for task, files in texts.items():
        encoded = tokenizer(list(files), add_special_tokens=False)["input_ids"] if files else []
        parts = [torch.tensor(tokens + end, dtype=torch.int64) for tokens in encoded]
        ids[task] = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    return TaskText(ids)


def save_text(prepared: PreparedFiles, name: str, text: TaskText) -> None:
    prepared.save(name, {task: ids.to(torch.int32) for task, ids in text.ids.items()}, {"domains": list(text.ids)})


def load_text(prepared: PreparedFiles, name: str) -> TaskText:
    """Read what `save_text` wrote. Raises ModelError if it is missing or of another checkpoint."""
    tensors, notes = prepared.load(name)
    return TaskText({task: tensors[task].long() for task in notes["domains"]})


def training_windows(prepared: PreparedFiles, length: int, count: int) -> Mapping[str, torch.Tensor]:
    text = load_text(prepared, TRAIN)
    return {task: text.windows(task, length, count) for task in text.ids}


def read_tokenizer(folder: Path) -> Any:
    try:
        return transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        message = f"its tokenizer cannot be read ({first_line(error)}); restore tokenizer.json"
        raise ModelError(folder, message) from error
