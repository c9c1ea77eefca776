"""Output of commands: tables for people, JSON for programs, one sentence for an error."""

import errno
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from daemon.units import printable


class _Printer(Console):
    """A console on which text from outside is no markup and does not steer the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render as rich does; only its own control codes reach the terminal."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else "\n".join(map(printable, segment.text.split("\n")))
            yield segment._replace(text=text)


console = _Printer(markup=False, highlight=False, soft_wrap=True, emoji=False)
errors = _Printer(markup=False, stderr=True, highlight=False, soft_wrap=True, emoji=False)

PROGRAM = "coserve"
#: A wider cell is folded before a column is left out.
_FOLDED_WIDTH = 24
#: Characters that rich puts around each column.
_BORDER_WIDTH = 3
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
_CONFIG_HELP = "The line's coserve.yaml, as an argument or as --config; default: ./coserve.yaml, else the service's."
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help=_CONFIG_HELP, show_default=False)]
ConfigOption = Annotated[
    Path, typer.Option("--config", metavar="CONFIG", envvar="COSERVE_CONFIG", help=_CONFIG_HELP, show_default=False)
]


_LOCAL, _SERVICE = Path("coserve.yaml"), Path("/etc/coserve/coserve.yaml")
DEFAULT_CONFIG = _SERVICE if _SERVICE.is_file() and not _LOCAL.is_file() else _LOCAL


def fail(message: str, status: int) -> NoReturn:
    """Print the error on stderr and exit with `status` (1: the answer is no, 2: wrong use)."""
    sys.stdout.flush()
    errors.print(f"coserve: {message}", style="red" if errors.is_terminal else None)
    raise SystemExit(status)


_A_LINE = "name the line's coserve.yaml, or make a small line with `coserve demo`"


def need_file(path: Path, remedy: str = _A_LINE) -> None:
    """Exit with status 2 if there is no such file."""
    if path.is_dir():
        fail(f"{path} is a folder: {remedy}", status=2)
    if not path.is_file():
        fail(f"no file {path}: {remedy}", status=2)


def need_folder(path: Path, remedy: str = "name another, or make it") -> None:
    if not path.is_dir():
        fail(f"no folder {path}: {remedy}", status=2)


class CommandError(Exception):
    """Ends a command with one sentence and an exit status, as `fail` does."""

    status = 1

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = self.status if status is None else status


@contextmanager
def exit_on(*errors: type[Exception], status: int = 1) -> Iterator[None]:
    """End the command with the text of any of `errors`."""
    try:
        yield
    except errors as error:
        fail(str(error), status)


@contextmanager
def os_errors_end(path: Path) -> Iterator[None]:
    """End the command on an OSError. A full disk names `path`, which was written, not a file that was read."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise CommandError(f"{path}: {error.strerror}; make room, or name another disk") from error
        raise CommandError(f"{error.filename or path}: {error.strerror or error}") from error


def print_step(name: str) -> None:
    """Tell a person at a terminal what a long command does now."""
    if errors.is_terminal:
        errors.print(f"{name} …")


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, non-ASCII as it is if printable."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    print("".join(sign if sign == "\n" or sign.isprintable() else json.dumps(sign)[1:-1] for sign in text))


def say(answer: Any, sentence: str, *, as_json: bool) -> None:
    """Print the answer for programs, or the sentence for people."""
    if as_json:
        print_json(answer)
    else:
        console.print(sentence)


def end_with(
    file: object, problems: Sequence[Any], facts: Mapping[str, Any], sound: str = "", more: str = "", *, as_json: bool
) -> NoReturn:
    """Print every problem of a file, or that it has none and `sound`; then `more`. Exit with status 1 for problems."""
    if as_json:
        print_json({"ok": not problems, "problems": list(map(str, problems)), **facts})
    else:
        text = "\n".join(map(str, problems)) or f"{file}: No mistakes found{sound}"
        console.print(f"{text}\n{more}" if more else text)
    raise SystemExit(1 if problems else 0)


Column = str | tuple[str, str | Callable[[Mapping[str, Any]], Any]]


def print_rows(
    title: str, rows: Sequence[Mapping[str, Any]], columns: Iterable[Column], *, as_json: bool = False, **options: Any
) -> None:
    """Print `rows` with `print_table`, or as JSON; a column is a key, or its heading and a key or function of a row."""
    if as_json:
        print_json(rows)
        return
    pairs = [(column.replace("_", " "), column) if isinstance(column, str) else column for column in columns]
    cells = [[row[cell] if isinstance(cell, str) else cell(row) for _, cell in pairs] for row in rows]
    print_table(title, [heading for heading, _ in pairs], cells, **options)


def print_table(
    title: str | Callable[[Sequence[str]], str],
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    unbroken: Sequence[str] = (),
    more: str | None = None,
) -> None:
    """Print a table for a person: long cells wrap, None or an empty list is a dash, control characters are replaced.

    Columns in `unbroken` stay on one line, so that they can be copied. With `more`, the last columns are left out if
    the terminal is too narrow, and named together with `more`, the way to see them. A title may depend on the columns
    that are shown.
    """
    cells = [[_cell_text(cell) for cell in row] for row in rows]
    width = len(columns) if more is None else _columns_that_fit(columns, cells)
    title = title if isinstance(title, str) else title(columns[:width])
    table = Table(title=Text(title, style="table.title"), title_justify="left")
    for name in columns[:width]:
        table.add_column(name, overflow="fold", no_wrap=name in unbroken)
    for row in cells:
        table.add_row(*map(Text, row[:width]))  # brackets in it are text, not markup
    console.print(table)
    if width < len(columns):
        console.print(f"Not shown: {', '.join(columns[width:])} ({more})")


def _cell_text(cell: Any) -> str:
    if isinstance(cell, list | tuple):
        cell = ", ".join(map(str, cell)) or None
    return "–" if cell is None else printable(str(cell))


def _columns_that_fit(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> int:
    width = 1
    for at, name in enumerate(columns):
        longest = max((cell_len(row[at]) for row in cells), default=0)
        width += max(len(name), min(longest, _FOLDED_WIDTH)) + _BORDER_WIDTH
        if width > console.width:
            return max(1, at)
    return len(columns)


def as_typed(words: str) -> str:
    """Return a command line that can be pasted where this one was started: `coserve check line/coserve.yaml`."""
    return f"{_program()} {words}"


def _program() -> str:
    """Return `coserve` if the PATH leads to it; else the started file, or the one beside its Python."""
    started = Path(sys.argv[0])
    if started.name != PROGRAM:
        started = Path(sys.executable).with_name(PROGRAM)
        if started.is_relative_to(Path.cwd()):
            started = started.relative_to(Path.cwd())
    on_path = shutil.which(PROGRAM)
    if not started.is_file() or (on_path is not None and started.samefile(on_path)):
        return PROGRAM
    return shlex.quote(str(started))


def quiet_start(process_env: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child process that is one of our own commands."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **(process_env or {})}


class Bars(Progress):
    """Progress bars of a command that takes minutes, on a terminal only."""

    def __init__(self, *, console: Console, transient: bool = False) -> None:
        super().__init__(console=console, transient=transient, disable=not console.is_interactive)

    @classmethod
    def get_default_columns(cls) -> tuple[ProgressColumn, ...]:
        return TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()


@contextmanager
def share_bar(title: str) -> Iterator[Callable[..., None]]:
    """Yield a function that moves a bar on stderr to a share from 0 to 1, and may give it another title."""
    with Bars(console=errors) as bar:
        if not errors.is_interactive:
            errors.print(title)
        task = bar.add_task(title, total=1.0)
        yield lambda share, title=title: bar.update(task, completed=share, description=title)
