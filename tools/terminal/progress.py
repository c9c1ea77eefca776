"""Progress bars of commands that take minutes; plain lines off a terminal, such as in a log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from tools.terminal.console import errors

#: Seconds between two lines off a terminal.
_LINE_EVERY_S = 60.0


class Bars(Progress):
    """rich's bars on a terminal. Elsewhere a line when a task is added, and about one a minute while they move."""

    def __init__(self, *, console: Console, transient: bool = False) -> None:
        self._prints_lines = not console.is_interactive
        super().__init__(console=console, transient=transient, disable=self._prints_lines)
        self._began_s = self._last_line_s = self.get_time()

    @classmethod
    def get_default_columns(cls) -> tuple[ProgressColumn, ...]:
        return TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()

    def add_task(self, description: str, *arguments: Any, **fields: Any) -> TaskID:
        if self._prints_lines and description:
            self.print(description, markup=False)
        return super().add_task(description, *arguments, **fields)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._print_line()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print_line()

    def _print_line(self) -> None:
        with self._lock:
            now_s = self.get_time()
            if not self._prints_lines or now_s - self._last_line_s < _LINE_EVERY_S:
                return
            self._last_line_s = now_s
            unfinished = ", ".join(_in_words(task) for task in self.tasks if not task.finished)
            if unfinished:
                self.print(f"after {(now_s - self._began_s) / 60:.0f} min: {unfinished}", markup=False)


@contextmanager
def share_bar(title: str) -> Iterator[Callable[..., None]]:
    """Yield a function that moves a bar on stderr to a share from 0 to 1, and may give it another title."""
    with Bars(console=errors) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda share, title=title: bar.update(task, completed=share, description=title)


def _in_words(task: Task) -> str:
    return f"{task.description} {task.percentage:.0f} %" if task.total else task.description
