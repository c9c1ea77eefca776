"""`python -m tests.screenshots`: start a copy of the demo's line, fill it, and take a picture of each page."""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tests import ROOT
from tests.screenshots.line import REVIEWERS, ShownLine, copy_of, running
from tests.screenshots.pictures import Page, ScreenshotError, chromium, take, wait_for_pages
from tools.terminal.console import console, fail

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab

_WORST = """
SELECT board_id FROM inspections LEFT JOIN detections USING (inspection_id) WHERE verdict = 'fail'
GROUP BY board_id ORDER BY count(DISTINCT inspection_id) DESC, count(detection_id) DESC, board_id LIMIT 1
"""
_BUSIEST = "SELECT expert FROM stages WHERE step = 0 GROUP BY expert ORDER BY count(*) DESC, expert LIMIT 1"


def say_who(tab: "Tab") -> None:
    """Nobody decides without a name."""
    tab.get_by_label("Name").fill(REVIEWERS[0])
    tab.get_by_role("button", name="Begin").click()


def pages(line: ShownLine) -> list[Page]:
    """What is shown: a board with detections, and the expert that has judged most."""
    (board,) = line.rows(_WORST)[0]
    (expert,) = line.rows(_BUSIEST)[0]
    return [
        Page("line", "/"),
        Page("line", "/", dark=True),
        Page("kiosk", "/?kiosk"),
        Page("board", f"/boards/{board}"),
        Page("review", "/review", begin=say_who),
        Page("defects", "/defects"),
        Page("experts", "/experts"),
        Page("expert", f"/experts/{expert}"),
        Page("machine", "/machine"),
    ]


def main(
    demo: Annotated[Path, typer.Option("--dir", help="The demo's folder (made if it is not there).")] = Path("demo"),
    out: Annotated[Path, typer.Option(help="Where the pictures go.")] = ROOT / "docs" / "img",
    boards: Annotated[int, typer.Option(min=4, help="Boards of each of three lots.")] = 24,
) -> None:
    """Pictures of every page at 1920, 1280 and 390 pixels, from a copy of the demo's line.

    Example: python -m tests.screenshots --dir demo --out docs/img
    """
    from tools.demo.line import make_line

    make_line(demo)
    try:
        with tempfile.TemporaryDirectory(prefix="coserve-shots-") as scratch, chromium() as browser:
            line = copy_of(demo, Path(scratch) / "line")
            with running(line):
                line.publish(boards)
                line.review()
                wait_for_pages(line.url)
                with line.camera():
                    made = take(browser, line.url, pages(line), out)
    except ScreenshotError as error:
        fail(str(error), status=1)
    for file in made:
        console.print(f"{file}  {file.stat().st_size / 1000:.0f} kB", markup=False)


if __name__ == "__main__":
    sys.exit(typer.run(main))
