"""The figures of `make gpu`, a JSON file for each stage, and the page that shows them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experts.durable import replace_durably

_HEAD = """# What a GPU does

`make gpu` measures CoServe on a machine with an NVIDIA GPU, with experts of random weights that it makes there, and
writes this page. Rates are of that machine; no other page has them.

```bash
make gpu                              # everything, under 25 minutes
make gpu STAGES="load compute"        # some stages, each under 8 minutes; figures replace those of the same stage
make gpu DRY_RUN=build/dry-run.md     # the same steps, tiny, on a simulated GPU: a page that shows no GPU's figures
```

The machine needs Python 3.11 or newer, an NVIDIA driver, 24 GB of RAM and a disk with 16 GB or more; all 360 expert
files take 66 GB, and where the disk has less, several experts read the same file. On a machine without a network that
has Python 3.12 with torch 2.11 or newer, torchvision, NumPy and Pillow, run `make gpu-wheels` on a Linux PC with a
network first and copy the tree with `build/gpu-wheels` (60 MB at most) there. `make gpu` then uses the machine's torch.

A stage keeps its figures in `build/gpu/figures/STAGE.json`, so that stages may run on different days, and figures can
be copied from a machine that is rented for a while. If the GPU disappears, the stage ends with an error that says
so, and the page keeps what was measured before.
"""
NOT_MEASURED = "**No GPU has been measured yet**, so that this page has no figures.\n"


@dataclass(slots=True)
class Table:
    """Rows of figures as the page shows them; `notes` are sentences below."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
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


def page_text(figures: Sequence[StageFigures]) -> str:
    """Return the page with the figures of these stages, in this order."""
    if not figures:
        return f"{_HEAD}\n{NOT_MEASURED}"
    parts = [_HEAD]
    machines: list[dict[str, str]] = []
    for each in figures:
        if each.machine not in machines:
            machines.append(each.machine)
    for number, machine in enumerate(machines, 1):
        parts.append(f"## Machine {number}\n\n" + "\n".join(f"- {name}: {value}" for name, value in machine.items()))
    for each in figures:
        where = f"machine {machines.index(each.machine) + 1}, {each.made}, {each.seconds:.0f} s, `{each.command}`"
        parts.append(f"## {each.stage.capitalize()}\n\n{where}")
        if each.problem:
            parts.append(f"**Not finished**: {each.problem}. What it measured before:")
        parts += [_markdown(table) for table in each.tables]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    text = "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)
    notes = "".join(f"\n\n{note}" for note in table.notes)
    return f"### {table.title}\n\n{text}{notes}"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
