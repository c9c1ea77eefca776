"""Progress bars of commands that take minutes; where nobody draws bars (a log, ssh without a terminal), plain lines."""

from typing import Any

from rich.console import Console
from rich.progress import GetTimeCallable, Progress, ProgressColumn, Task, TaskID

#: Off a terminal, seconds between two lines about what goes on.
_EVERY_S = 60.0


class Bars(Progress):
    """rich's bars on a terminal. Elsewhere a line when a task is added, and about one a minute while they move."""

    def __init__(
        self,
        *columns: str | ProgressColumn,
        console: Console,
        transient: bool = False,
        get_time: GetTimeCallable | None = None,
    ) -> None:
        speaks = not console.is_interactive
        super().__init__(*columns, console=console, transient=transient, get_time=get_time, disable=speaks)
        self._speaks = speaks
        self._began_s = self._said_s = self.get_time()

    def add_task(self, description: str, *arguments: Any, **fields: Any) -> TaskID:
        """As rich's."""
        if self._speaks and description:
            self.print(description, markup=False)
        return super().add_task(description, *arguments, **fields)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """As rich's."""
        super().update(task_id, **changes)
        self._say_at_times()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """As rich's."""
        super().advance(task_id, advance)
        self._say_at_times()

    def _say_at_times(self) -> None:
        with self._lock:
            now_s = self.get_time()
            if not self._speaks or now_s - self._said_s < _EVERY_S:
                return
            self._said_s = now_s
            told = ", ".join(_told(task) for task in self.tasks if not task.finished)
            if told:
                self.print(f"after {(now_s - self._began_s) / 60:.0f} min: {told}", markup=False)


def _told(task: Task) -> str:
    return f"{task.description} {task.percentage:.0f} %" if task.total else task.description
