"""`coserve moe trace`: texts as token ids, and the experts of each token, of which predictors and plans are made."""

import importlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from experts.moe.arch import first_line
from experts.moe.errors import ModelError
from experts.moe.gating import ForwardStep, Routing, StepRow
from experts.moe.library import transformers
from experts.moe.trace import Trace, load_trace, save_popularity, save_trace
from experts.moe.weights.prepared import POPULARITY, PreparedFiles
from experts.moe.weights.prepared import TRAIN as TRACE
from tools.moe.checkpoint import open_runtime
from tools.terminal.console import console

_BATCH = 8
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


def trace_text(checkpoint: Path, texts: Path | None, prompts: int, length: int) -> Trace:
    """Return the trace of the checkpoint, taken now unless it is there. Raises ModelError."""
    prepared = PreparedFiles(checkpoint)
    make_text(prepared, texts)
    if not prepared.has(TRACE):
        take_trace(prepared, TRACE, prompts, length)
    taken = load_trace(prepared, TRACE)
    if not prepared.has(POPULARITY):
        save_popularity(prepared, taken)
    return taken


def make_text(prepared: PreparedFiles, texts: Path | None) -> None:
    """Write the text to trace, unless it is there. Raises ModelError if another one was traced already."""
    if prepared.has(TRAIN) and texts is None:
        return
    text = encode(pythons_manual() if texts is None else read_texts(texts), read_tokenizer(prepared.checkpoint))
    if prepared.has(TRAIN) and load_text(prepared, TRAIN).is_same(text):
        return
    if prepared.has(TRACE):
        raise ModelError(prepared.folder, "has the trace of another text; delete this folder to prepare the model anew")
    save_text(prepared, TRAIN, text)


def take_trace(prepared: PreparedFiles, name: str, prompts: int, length: int) -> None:
    """Save a trace of the text that belongs to it: `traces/train` of `text/train`. Raises ModelError."""
    text = load_text(prepared, name.replace("traces/", "text/"))
    if all(len(ids) < length for ids in text.ids.values()):
        raise ModelError(
            prepared.folder, f"its text has no prompt of {length} tokens; give more, or a smaller --length"
        )
    windows = {task: text.windows(task, length, prompts) for task in text.ids}
    index: list[torch.Tensor] = []
    weight: list[torch.Tensor] = []
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(_step: ForwardStep, gate: Routing, _carried_out: Routing) -> None:
        layers.append((gate.index.cpu(), gate.weight.cpu()))

    with closing(open_runtime(prepared.checkpoint, "resident")) as runtime, torch.no_grad():
        runtime.observers.append(watch)
        for task, pieces in windows.items():
            if not len(pieces):
                continue
            for batch in track(pieces.split(_BATCH), description=f"{task}, {len(pieces)} prompts", console=console):
                layers.clear()
                with runtime.step([StepRow(f"trace-{row}", task, length) for row in range(len(batch))]):
                    runtime.model(batch.to(runtime.model.device), use_cache=False, logits_to_keep=1)
                index.append(torch.stack([experts for experts, _ in layers], dim=1).to(torch.int16))
                weight.append(torch.stack([weights for _, weights in layers], dim=1).to(torch.float16))
    counts = torch.tensor([len(pieces) for pieces in windows.values()])
    trace = Trace(
        index=torch.cat(index),
        weight=torch.cat(weight),
        token=torch.cat([pieces.flatten() for pieces in windows.values()]),
        start=torch.arange(int(counts.sum()) + 1) * length,
        task=torch.arange(len(counts)).repeat_interleave(counts),
        tasks=tuple(windows),
        experts=runtime.arch.experts,
    )
    save_trace(prepared, name, trace)
