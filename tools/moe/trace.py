"""`coserve moe trace`: record the experts of each token of the corpus, on which predictors and plans are fitted."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tools.moe.corpus import DEFAULT_CHECKPOINT
from tools.terminal.console import console, print_table

if TYPE_CHECKING:
    from experts.moe.gating import ForwardStep, Routing
    from experts.moe.model.runtime import MoeRuntime
    from experts.moe.trace import Trace
    from experts.moe.weights.prepared import PreparedFiles
    from tools.moe.corpus import CorpusDocument
    from tools.moe.text import CorpusText

Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder in Hugging Face format.")]
_BATCH = 8


def trace(
    checkpoint: Checkpoint = DEFAULT_CHECKPOINT,
    prompts: Annotated[int, typer.Option(min=1, help="Of each domain for training; a fifth of it held out.")] = 600,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a prompt; the second half counts as decoded.")] = 256,
) -> None:
    """Run the corpus through the model with all experts in memory, and record the experts of each token.

    Existing traces are not taken again; delete them for others.
    """
    rows = take_traces(checkpoint, prompts, length)
    print_table(f"traces of {checkpoint}", ("trace", "prompts", "tokens", "layers", "experts"), rows)


def take_traces(checkpoint: Path, prompts: int, length: int) -> list[tuple[str, int, int, int, int]]:
    """Write traces of both sides and the popularity of experts; return a row of numbers for each trace."""
    from experts.moe.trace import load_trace, save_popularity
    from experts.moe.weights.prepared import HELD_OUT, POPULARITY, TRAIN, PreparedFiles

    prepared = PreparedFiles(checkpoint)
    sources = {TRAIN: ("text/train", prompts), HELD_OUT: ("text/heldout", max(1, prompts // 5))}
    missing = {name: source for name, source in sources.items() if not prepared.has(name)}
    if missing:
        _take(prepared, missing, length)
    taken = {name: load_trace(prepared, name) for name in sources}
    if not prepared.has(POPULARITY):
        save_popularity(prepared, taken[TRAIN])
    return [(name, trace.prompts, len(trace.token), trace.layers, trace.experts) for name, trace in taken.items()]


def _take(prepared: "PreparedFiles", missing: dict[str, tuple[str, int]], length: int) -> None:
    from experts.moe.trace import join_traces, save_trace
    from tools.moe.checkpoint import open_runtime
    from tools.moe.text import ensure_text, load_text, read_tokenizer

    with closing(open_runtime(prepared.checkpoint, "resident")) as runtime:
        ensure_text(prepared, read_tokenizer(prepared.checkpoint), _corpus)
        for name, (side, prompts) in missing.items():
            text = load_text(prepared, side)
            taken = [_collect(runtime, text, domain, prompts, length) for domain in text.ids]
            save_trace(prepared, name, join_traces(taken))


def _corpus() -> "list[CorpusDocument]":
    from tools.moe.corpus import MAX_CHARACTERS, collect

    with console.status("") as status:
        return collect(MAX_CHARACTERS, status.update)


def _collect(runtime: "MoeRuntime", text: "CorpusText", domain: str, prompts: int, length: int) -> "Trace":
    """Take a trace of `prompts` pieces of one domain, several in a step."""
    import torch
    from rich.progress import track

    from experts.moe.gating import StepRow
    from experts.moe.trace import Trace

    windows = text.windows(domain, length, prompts)
    index: list[torch.Tensor] = []
    weight: list[torch.Tensor] = []
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(_step: "ForwardStep", gate: "Routing", _carried_out: "Routing") -> None:
        layers.append((gate.index.cpu(), gate.weight.cpu()))

    runtime.observers.append(watch)
    for batch in track(windows.split(_BATCH), description=f"{domain}, {len(windows)} prompts", console=console):
        layers.clear()
        rows = [StepRow(f"trace-{row}", domain, length) for row in range(len(batch))]
        with torch.no_grad(), runtime.step(rows):
            runtime.model(batch.to(runtime.model.device), use_cache=False, logits_to_keep=1)
        index.append(torch.stack([experts for experts, _ in layers], dim=1).to(torch.int16))
        weight.append(torch.stack([weights for _, weights in layers], dim=1).to(torch.float16))
    runtime.observers.remove(watch)
    is_decoded = torch.arange(length) >= length // 2
    count = len(windows)
    return Trace(
        index=torch.cat(index) if index else torch.empty(0, runtime.arch.layers, runtime.arch.top_k, dtype=torch.int16),
        weight=torch.cat(weight) if weight else torch.empty(0, runtime.arch.layers, runtime.arch.top_k),
        token=windows.flatten().to(torch.int32),
        decode=is_decoded.repeat(count),
        start=torch.arange(count + 1) * length,
        task=torch.zeros(count, dtype=torch.int16),
        tasks=(domain,),
        experts=runtime.arch.experts,
    )
