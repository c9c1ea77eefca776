"""What the commands share: a checkpoint's shapes, its model opened in a mode, and progress bars."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import TaskID

from experts.moe.arch import MoeArch, load_config, read_arch
from experts.moe.model.mode import FitProgress
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes import open_mode
from experts.moe.weights.checkpoint import read_checkpoint
from tools.terminal.console import Bars, console


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
