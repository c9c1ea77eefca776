"""The figures of `make gpu`, a JSON file for each stage, and the section of docs/benchmarks.md that shows them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experts.durable import replace_durably

BEGIN, END = "<!-- make gpu writes from here -->", "<!-- to here -->"
NOT_MEASURED = "**No GPU has been measured yet.**"


@dataclass(slots=True)
class Table:
    """Rows of figures by the names of their columns; `notes` are sentences below."""

    title: str
    rows: Sequence[Mapping[str, Any]]
    notes: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class StageFigures:
    """The tables of one stage. `machine` and `made` say where and when; `problem` is why it ended early, if it did."""

    stage: str
    command: str
    machine: dict[str, str]
    made: str
    seconds: float = 0.0
    problem: str = ""
    tables: list[Table] = field(default_factory=list[Table])


class FigureFiles:
    """The files of a folder. A stage's file is replaced when the stage has ended; until then it has another name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, figures: StageFigures) -> None:
        """Keep the figures that a stage has so far."""
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_durably(self._unfinished(figures.stage), json.dumps(asdict(figures), indent=1) + "\n")

    def finish(self, stage: str) -> None:
        """Let what was kept last replace the stage's figures."""
        self._unfinished(stage).replace(self._folder / f"{stage}.json")

    def read(self, stage: str) -> StageFigures | None:
        """Return the figures of the last run that ended, else of one that did not end, else None."""
        for file in (self._folder / f"{stage}.json", self._unfinished(stage)):
            if file.is_file():
                values = json.loads(file.read_text(encoding="utf-8"))
                tables = [Table(**table) for table in values.pop("tables")]
                figures = StageFigures(**values, tables=tables)
                if file == self._unfinished(stage) and not figures.problem:
                    figures.problem = "it was stopped"
                return figures
        return None

    def _unfinished(self, stage: str) -> Path:
        return self._folder / f"{stage}.unfinished.json"


def write_section(page: Path, figures: Sequence[StageFigures]) -> None:
    """Replace what stands between the two marks of `page`; a file that does not exist gets the section alone."""
    before, after = around_section(page)
    replace_durably(page, f"{before}{BEGIN}\n\n{section_text(figures)}\n{END}{after}")


def around_section(page: Path) -> tuple[str, str]:
    """Return the text before and after the two marks of `page`. A page without them is a ValueError."""
    text = page.read_text(encoding="utf-8") if page.is_file() else f"{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{page} lacks the lines {BEGIN} and {END}: put them where the section belongs")
    return before, after


def section_text(figures: Sequence[StageFigures]) -> str:
    """Return the figures of these stages, in this order."""
    parts: list[str] = []
    machines: list[dict[str, str]] = []
    for each in figures:
        if each.machine not in machines:
            machines.append(each.machine)
    for number, machine in enumerate(machines, 1):
        parts.append(f"### Machine {number}\n\n" + "\n".join(f"- {name}: {value}" for name, value in machine.items()))
    for each in figures:
        where = f"machine {machines.index(each.machine) + 1}, {each.made}, {each.seconds:.0f} s, `{each.command}`"
        parts.append(f"### {each.stage.capitalize()}\n\n{where}")
        if each.problem:
            parts.append(f"**Not finished**: {each.problem}. What it measured before:")
        parts += [_markdown(table) for table in each.tables]
    return "\n\n".join(part.rstrip() for part in parts or [NOT_MEASURED]) + "\n"


def _markdown(table: Table) -> str:
    columns = [name.replace("_", " ") for name in table.rows[0]]
    lines = [columns, ["---"] * len(columns), *(row.values() for row in table.rows)]
    text = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
    notes = "".join(f"\n\n{note}" for note in table.notes)
    return f"#### {table.title}\n\n{text}{notes}"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
