"""A checkpoint's shapes, its model opened in a mode, and `coserve moe import`: its experts written as one read each."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import TaskID

from experts.moe.arch import MoeArch, load_config, read_arch
from experts.moe.gating import ExpertKey
from experts.moe.model.mode import FitProgress
from experts.moe.model.runtime import MoeRuntime, read_model
from experts.moe.modes import open_mode
from experts.moe.weights.checkpoint import CheckpointStore, read_checkpoint
from experts.moe.weights.slot_file import SlotFileStore, Source, Storage, write_slot_file
from tools.terminal.console import Bars, console, errors

#: Tokens of the text on which logits are compared.
_PROBE_TOKENS = 64


def open_runtime(checkpoint: Path, mode: str, *, share: float = 1.0) -> MoeRuntime:
    """Open the model in a mode, with memory for `share` of each layer's experts. Raises ModelError."""
    return MoeRuntime.open(checkpoint, open_mode(mode, checkpoint), budget_of(checkpoint, share))


def budget_of(checkpoint: Path, share: float) -> int:
    """Return the bytes of `share` of each layer's experts, whole experts in each layer. Raises ModelError."""
    arch = arch_of(checkpoint)
    return arch.layers * max(1, round(share * arch.experts)) * arch.expert_bytes


def arch_of(checkpoint: Path) -> MoeArch:
    config = load_config(checkpoint)
    return read_arch(checkpoint, config, read_checkpoint(checkpoint, config.model_type).dtype)


@contextmanager
def progress_bars(on: Console = console, *, transient: bool = False) -> Iterator[FitProgress]:
    tasks: dict[str, TaskID] = {}
    with Bars(console=on, transient=transient) as bars:

        def report(part: str, done: int, total: int, note: str = "") -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part, total=total)
            bars.update(tasks[part], completed=done, total=total, description=part + note)

        yield report


def import_checkpoint(folder: Path, storage: Storage) -> dict[str, Any]:
    """Check and import a checkpoint; return the report. Raises ModelError."""
    _, arch, checkpoint = read_model(folder)
    original = CheckpointStore(arch, checkpoint)
    count = len(arch.expert_keys)
    began_s = time.monotonic()
    with progress_bars(errors, transient=True) as progress:

        def on_written(key: ExpertKey) -> None:
            progress("experts", key.layer * arch.experts + key.expert + 1, count)

        file = write_slot_file(original, checkpoint, storage, on_written)
    seconds = round(time.monotonic() - began_s, 2)
    stored = SlotFileStore(arch, checkpoint, storage)
    report: dict[str, Any] = {
        "file": str(file),
        "family": arch.family,
        "layers": arch.layers,
        "experts": arch.experts,
        "storage": storage,
        "slot_bytes": arch.expert_bytes,
        "stored_bytes": stored.stored_bytes,
        "reads_per_expert": {"checkpoint": original.reads, "imported": 1},
        "seconds": seconds,
    }
    if storage != "exact":
        report |= _logit_errors(folder, arch, storage)
    original.close()
    stored.close()
    return report


def _logit_errors(folder: Path, arch: MoeArch, storage: Source) -> dict[str, float]:
    exact, packed = _logits(folder, arch, "checkpoint"), _logits(folder, arch, storage)
    agreed = (exact.argmax(dim=-1) == packed.argmax(dim=-1)).float().mean()
    expected = exact.log_softmax(dim=-1)
    divergence = (expected.exp() * (expected - packed.log_softmax(dim=-1))).sum(dim=-1).mean()
    return {
        "logit_error_max": round(float((packed - exact).abs().max()), 5),
        "logit_error_relative": round(float((packed - exact).norm() / exact.norm()), 5),
        "logit_divergence_nats": round(float(divergence), 6),
        "same_best_token": round(float(agreed), 4),
    }


def _logits(folder: Path, arch: MoeArch, storage: Source) -> torch.Tensor:
    """Return (tokens, vocabulary) float32 logits on seeded tokens, with few experts in memory."""
    slots = min(2 * arch.top_k, arch.experts) * arch.layers
    mode = open_mode("ondemand", folder)
    with closing(MoeRuntime.open(folder, mode, slots * arch.expert_bytes, storage=storage)) as runtime:
        count = min(_PROBE_TOKENS, arch.context_tokens or _PROBE_TOKENS)
        ids = torch.randint(runtime.model.config.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            return runtime.model(input_ids=ids).logits[0].float()
