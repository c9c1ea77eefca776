"""`coserve moe trace`: record the experts of each token of a text, on which predictors and plans are fitted."""

from contextlib import closing
from pathlib import Path

import torch
from rich.progress import track

from experts.moe.errors import ModelError
from experts.moe.gating import ForwardStep, Routing, StepRow
from experts.moe.model.runtime import MoeRuntime
from experts.moe.trace import Trace, join_traces, load_trace, save_popularity, save_trace
from experts.moe.weights.prepared import POPULARITY, PreparedFiles
from experts.moe.weights.prepared import TRAIN as TRACE
from tools.moe.checkpoint import open_runtime
from tools.moe.text import TRAIN, TaskText, encode, load_text, pythons_manual, read_texts, read_tokenizer, save_text
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
    with closing(open_runtime(prepared.checkpoint, "resident")) as runtime:
        taken = [_collect(runtime, text, task, prompts, length) for task in text.ids]
    save_trace(prepared, name, join_traces(taken))


def _collect(runtime: MoeRuntime, text: TaskText, task: str, prompts: int, length: int) -> Trace:
    """Take a trace of `prompts` pieces of one task, several in a step."""
    windows = text.windows(task, length, prompts)
    index: list[torch.Tensor] = []
    weight: list[torch.Tensor] = []
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(_step: ForwardStep, gate: Routing, _carried_out: Routing) -> None:
        layers.append((gate.index.cpu(), gate.weight.cpu()))

    runtime.observers.append(watch)
    for batch in track(windows.split(_BATCH), description=f"{task}, {len(windows)} prompts", console=console):
        layers.clear()
        rows = [StepRow(f"trace-{row}", task, length) for row in range(len(batch))]
        with torch.no_grad(), runtime.step(rows):
            runtime.model(batch.to(runtime.model.device), use_cache=False, logits_to_keep=1)
        index.append(torch.stack([experts for experts, _ in layers], dim=1).to(torch.int16))
        weight.append(torch.stack([weights for _, weights in layers], dim=1).to(torch.float16))
    runtime.observers.remove(watch)
    count = len(windows)
    return Trace(
        index=torch.cat(index) if index else torch.empty(0, runtime.arch.layers, runtime.arch.top_k, dtype=torch.int16),
        weight=torch.cat(weight) if weight else torch.empty(0, runtime.arch.layers, runtime.arch.top_k),
        token=windows.flatten().to(torch.int32),
        start=torch.arange(count + 1) * length,
        task=torch.zeros(count, dtype=torch.int16),
        tasks=(task,),
        experts=runtime.arch.experts,
    )
