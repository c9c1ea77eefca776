"""`coserve moe trace`: record the experts of each token of a text, on which predictors and plans are fitted."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tools.terminal.console import console, print_table

if TYPE_CHECKING:
    from experts.moe.gating import ForwardStep, Routing
    from experts.moe.model.runtime import MoeRuntime
    from experts.moe.trace import Trace
    from experts.moe.weights.prepared import PreparedFiles
    from tools.moe.text import TaskText

Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder in Hugging Face format.")]
_BATCH = 8


def trace(
    checkpoint: Checkpoint,
    texts: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A folder of text files for each task; without it Python's own manual."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 600,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a prompt.")] = 256,
) -> None:
    """Run text through the model with all experts in memory, and record the experts of each token.

    Existing traces are not taken again.

    Example: coserve moe trace models/olmoe --texts texts
    """
    from experts.moe.trace import load_trace, save_popularity
    from experts.moe.weights.prepared import POPULARITY, TRAIN, PreparedFiles

    prepared = PreparedFiles(checkpoint)
    make_text(prepared, texts)
    if not prepared.has(TRAIN):
        take_trace(prepared, TRAIN, prompts, length)
    taken = load_trace(prepared, TRAIN)
    if not prepared.has(POPULARITY):
        save_popularity(prepared, taken)
    row = (", ".join(taken.tasks), taken.prompts, len(taken.token), taken.layers, taken.experts)
    print_table(f"trace of {checkpoint}", ("tasks", "prompts", "tokens", "layers", "experts"), [row])


def make_text(prepared: "PreparedFiles", texts: Path | None) -> None:
    """Write the text to trace, unless it is there. Raises ModelError if another one was traced already."""
    from experts.moe.errors import ModelError
    from experts.moe.weights.prepared import TRAIN as TRACE
    from tools.moe.text import TRAIN, encode, load_text, pythons_manual, read_texts, read_tokenizer, save_text

    if prepared.has(TRAIN) and texts is None:
        return
    text = encode(pythons_manual() if texts is None else read_texts(texts), read_tokenizer(prepared.checkpoint))
    if prepared.has(TRAIN) and load_text(prepared, TRAIN).is_same(text):
        return
    if prepared.has(TRACE):
        raise ModelError(prepared.folder, "has the trace of another text; delete this folder to prepare the model anew")
    save_text(prepared, TRAIN, text)


def take_trace(prepared: "PreparedFiles", name: str, prompts: int, length: int) -> None:
    """Save a trace of the text that belongs to it: `traces/train` of `text/train`. Raises ModelError."""
    from experts.moe.errors import ModelError
    from experts.moe.trace import join_traces, save_trace
    from tools.moe.checkpoint import open_runtime
    from tools.moe.text import load_text

    text = load_text(prepared, name.replace("traces/", "text/"))
    if all(len(ids) < length for ids in text.ids.values()):
        raise ModelError(
            prepared.folder, f"its text has no prompt of {length} tokens; give more, or a smaller --length"
        )
    with closing(open_runtime(prepared.checkpoint, "resident")) as runtime:
        taken = [_collect(runtime, text, task, prompts, length) for task in text.ids]
    save_trace(prepared, name, join_traces(taken))


def _collect(runtime: "MoeRuntime", text: "TaskText", task: str, prompts: int, length: int) -> "Trace":
    """Take a trace of `prompts` pieces of one task, several in a step."""
    import torch
    from rich.progress import track

    from experts.moe.gating import StepRow
    from experts.moe.trace import Trace

    windows = text.windows(task, length, prompts)
    index: list[torch.Tensor] = []
    weight: list[torch.Tensor] = []
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(_step: "ForwardStep", gate: "Routing", _carried_out: "Routing") -> None:
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
