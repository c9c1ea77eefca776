"""`coserve moe trace`: record the experts of each token of a text, on which predictors and plans are fitted."""

from contextlib import closing
from pathlib import Path

import torch
from rich.progress import track

from experts.moe.errors import ModelError
from experts.moe.gating import ForwardStep, Routing, StepRow
from experts.moe.trace import Trace, load_trace, save_popularity, save_trace
from experts.moe.weights.prepared import POPULARITY, PreparedFiles
from experts.moe.weights.prepared import TRAIN as TRACE
from tools.moe.checkpoint import open_runtime
from tools.moe.text import TRAIN, encode, load_text, pythons_manual, read_texts, read_tokenizer, save_text
from tools.terminal.console import console

_BATCH = 8


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
