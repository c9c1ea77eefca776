"""`python -m tests.house`: print the table; with `--picture FILE` or `--image FILE` draw a picture instead."""

import argparse
import sys
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from typer.main import get_command

from tests import ROOT
from tests.house.counts import Source, arrows, commands, crowded_rooms, keys, sources
from tests.house.one_image import Crossing, crossing
from tests.house.picture import draw, draw_image
from tests.house.times import read_times
from tools.cli.main import app


@dataclass(frozen=True)
class Row:
    """A figure: what it was on 2026-11-27, its goal, what it is now, and details for `--verbose`."""

    name: str
    before: str
    goal: str
    now: str
    details: tuple[str, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--verbose", action="store_true", help="list what was counted below each figure")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the rooms and their arrows as SVG, count nothing"
    )
    parser.add_argument("--image", type=Path, metavar="FILE", help="draw the way of one image as SVG")
    options = parser.parse_args()
    if options.picture:
        options.picture.write_text(draw(arrows(sources())), encoding="utf-8")
        return
    if options.image:
        options.image.write_text(draw_image(crossing()), encoding="utf-8")
        return
    with ProcessPoolExecutor(1) as other_core:
        rows = _rows(sources(), other_core.submit(crossing))
    table = Table("", "2026-11-27", "goal", "now")
    for row in rows:
        table.add_row(row.name, row.before, row.goal, row.now)
        if options.verbose:
            for detail in row.details:
                table.add_row(f"    {detail}", "", "", "")
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def _rows(files: list[Source], crossed: Future[Crossing]) -> list[Row]:
    pages = [page.stat().st_size for page in (ROOT / "docs").glob("*.md")]
    return [
        _lines(
            "Python lines of daemon, experts, routing_rules, tools",
            "75.7k",
            "≤ 66.5k",
            (f for f in files if not f.is_test),
        ),
        _lines("of these, packed into the wheel", "75.7k", "", (file for file in files if file.is_product)),
        _lines(
            "Python lines under tests/", "76.2k", "≤ 58k", (file for file in files if file.path.startswith("tests/"))
        ),
        _list("rooms over 15 files", "4", "0", crowded_rooms(files)),
        _list("files that one image crosses (on simulated devices)", "37", "≤ 24", crossed.result().files),
        _list("threads that one image crosses", "7", "≤ 5", crossed.result().threads),
        _list("kinds of value that are made for each image", "", "≤ 9", crossed.result().kinds),
        _list("commands", "72", "≤ 66", commands(get_command(app))),
        _list("keys of coserve.yaml", "92", "≤ 80", keys()),
        Row("documentation", "27 pages, 475 kB", "≤ 15, ≤ 220 KiB", f"{len(pages)} pages, {sum(pages) / 1024:.0f} KiB"),
        *_times(),
    ]


def _lines(name: str, before: str, goal: str, files: Iterable[Source]) -> Row:
    return Row(name, before, goal, f"{sum(file.lines for file in files) / 1000:.1f}k")


def _list(name: str, before: str, goal: str, details: list[str]) -> Row:
    return Row(name, before, goal, str(len(details)), tuple(details))


def _times() -> list[Row]:
    times = read_times()
    goals = {"test-fast": ("2 min", "≤ 1 min"), "test": ("55 min", "≤ 12 min"), "test-all": ("55 min", "≤ 60 min")}
    return [
        Row(f"make {command}", before, goal, f"{times[command] / 60:.1f} min" if command in times else "not run here")
        for command, (before, goal) in goals.items()
    ]


if __name__ == "__main__":
    main()
