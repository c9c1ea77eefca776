"""Progress bars of commands that prepare a language model."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import TaskID

from experts.moe.model.mode import FitProgress
from tools.terminal.console import console
from tools.terminal.progress import Bars


@contextmanager
def progress_bars(on: Console = console, *, transient: bool = False) -> Iterator[FitProgress]:
    tasks: dict[str, TaskID] = {}
    with Bars(console=on, transient=transient) as bars:

        def report(part: str, done: int, total: int, note: str = "") -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part, total=total)
            bars.update(tasks[part], completed=done, total=total, description=part + note)

        yield report
