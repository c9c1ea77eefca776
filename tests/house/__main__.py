"""`python -m tests.house`: print the table; with `--picture FILE` draw the rooms and their arrows instead."""

import argparse
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.house.counts import (
    Source,
    arrows,
    circles,
    classes_that_define,
    files_naming,
    flat_files,
    names_in_several_files,
    simulated_clocks,
    sources,
)
from tests.house.one_image import files_crossed
from tests.house.picture import draw
from tests.house.times import read_times


@dataclass(frozen=True)
class Row:
    """A figure: what it was on 2026-11-22, its goal, what it is now, and details for `--verbose`."""

    name: str
    before: str
    goal: str
    now: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Kind:
    """A kind of which there are several, by one that exists: `word` names it, its code is in `place`.

    To add another, its file or folder is made, and the other files that name it are opened: its registry, at best.
    """

    name: str
    before: str
    word: str
    place: str


_KINDS = (
    _Kind("consumer", "9", "mqtt", "daemon/consumers/mqtt"),
    _Kind("network family", "8", "resnet", "experts/vision/networks.py"),
    _Kind("mode", "5", "emoe", "experts/moe/modes/emoe"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="list what was counted below each figure")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the rooms and their arrows as SVG, count nothing"
    )
    options = parser.parse_args()
    if options.picture:
        options.picture.write_text(draw(arrows(sources())), encoding="utf-8")
        return
    with ProcessPoolExecutor(1) as other_core:
        rows = _rows(sources(), other_core.submit(files_crossed))
    table = Table("", "2026-11-22", "goal", "now")
    for row in rows:
        table.add_row(row.name, row.before, row.goal, row.now)
        if options.verbose:
            for detail in row.details:
                table.add_row(f"    {detail}", "", "", "")
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def _rows(files: list[Source], crossed: Future[list[str]]) -> list[Row]:
    knots = [" ↔ ".join(knot) for knot in circles(arrows(files))]
    return [
        _lines("Python lines in the wheel", "72.2k", "≤ 60k", (file for file in files if file.is_product)),
        _lines("all Python lines, tests included", "120.6k", "≤ 108k", files),
        Row("flat files in daemon/", "97", "≤ 12", str(flat_files(files, "daemon"))),
        _list("circles between rooms", "a knot of 8", "0", knots),
        _list("files that one image crosses (on simulated devices)", "62", "≤ 35", crossed.result()),
        _list("class names in more than one file", "113", "≤ 30", names_in_several_files(files)),
        _list("classes that define submit", "21", "≤ 5", classes_that_define(files, "submit")),
        _list("simulated clocks", "3", "1", simulated_clocks(files)),
        *(_kind(kind, files) for kind in _KINDS),
        *_times(),
    ]


def _lines(name: str, before: str, goal: str, files: Iterable[Source]) -> Row:
    return Row(name, before, goal, f"{sum(file.lines for file in files) / 1000:.1f}k")


def _list(name: str, before: str, goal: str, details: list[str]) -> Row:
    return Row(name, before, goal, str(len(details)), tuple(details))


def _kind(kind: _Kind, files: list[Source]) -> Row:
    others = [path for path in files_naming(files, [kind.word]) if not path.startswith(kind.place)]
    details = [kind.place, *others, "its test"]
    return _list(f"files opened to add a {kind.name}, its test included", kind.before, "≤ 3", details)


def _times() -> list[Row]:
    times = read_times()
    goals = {"test-fast": ("none", "≤ 1 min"), "test": ("55 min", "≤ 12 min"), "test-all": ("55 min", "≤ 60 min")}
    return [
        Row(f"make {command}", before, goal, f"{times[command] / 60:.1f} min" if command in times else "not run here")
        for command, (before, goal) in goals.items()
    ]


if __name__ == "__main__":
    main()
