"""`python -m tests.screenshots`: the pictures of the documentation, in real Chromium, of a copy of the demo's line."""

import io
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from PIL import Image
from playwright.sync_api import sync_playwright
from sqlalchemy import text

from coserve_client import Publisher, publish_images
from daemon.config.settings import load_config
from daemon.storage.database.connections import open_for_reading
from daemon.wire.control import ask
from tests import ROOT
from tests.ports import free_port
from tests.waiting import until
from tools.camera.render import render_board
from tools.camera.render.images import board_plan, images_of
from tools.setup.service import Service

if TYPE_CHECKING:
    from playwright.sync_api import Page

#: Name, path and size of each picture: docs/img/dashboard-NAME-WIDTH.png.
PAGES = (
    ("line", "/", 1280, 800),
    ("kiosk", "/?kiosk", 1920, 1080),
    ("board", "/boards/{board}", 1280, 800),
    ("review", "/review", 1280, 800),
    ("defects", "/defects", 1280, 800),
    ("machine", "/machine", 1280, 800),
)
#: Lot, station, and seed of the boards that are published first.
LOTS = (("L2411", "AOI-1", 31), ("L2412", "AOI-2", 32), ("L2413", "AOI-1", 33))
REVIEWERS = ("m.keller", "a.okafor")
#: Share of parts with a defect: about every eighth board has one.
_DEFECT_RATE = 0.003
#: Images that may wait before the next board is published: a board is judged long before its time limit.
_FEW_WAITING = 150
#: A page draws its charts and gets its first events.
_SETTLE_MS = 1500
_WORST = """
SELECT board_id FROM inspections LEFT JOIN detections USING (inspection_id) WHERE verdict = 'fail'
GROUP BY board_id ORDER BY count(DISTINCT inspection_id) DESC, count(detection_id) DESC, board_id LIMIT 1
"""
_UNSURE = "SELECT inspection_id, verdict, defect FROM inspections WHERE verdict IN ('fail', 'review') ORDER BY 1"


class ShownLine:
    """A copy of the demo's line in `folder`, with ports of its own, every picture kept, shifts and a goal."""

    def __init__(self, demo: Path, folder: Path) -> None:
        shutil.copytree(demo / "experts", folder / "experts")
        shutil.copy(demo / "rules.yaml", folder)
        self.url = f"http://127.0.0.1:{free_port()}"
        settings = yaml.safe_load((demo / "coserve.yaml").read_text(encoding="utf-8"))
        sockets = {name: f"ipc://run/{name}.sock" for name in ("results", "control")}
        settings["endpoints"] = {"intake": ["ipc://run/intake.sock"], "http": self.url, **sockets}
        settings["retention"] = {"keep": ["pass", "fail", "review", "unknown"], "free": "1GB"}
        settings["plant"] = {"shifts": {"early": "06:00", "late": "14:00", "night": "22:00"}, "yield_goal": 0.8}
        self.file = folder / "coserve.yaml"
        self.file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        self.config = load_config(self.file)

    def rows(self, sql: str) -> list[Any]:
        engine = open_for_reading(self.config.database)
        try:
            with engine.connect() as connection:
                return list(connection.execute(text(sql)))
        finally:
            engine.dispose()

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        return ask(self.config.endpoints.control, kind, timeout_s=10.0, **fields)

    def publish(self, boards: int) -> None:
        """Publish boards of every lot, and wait until every image is judged."""
        with Publisher(self.config.endpoints.intake[0], "camera-1") as publisher:
            for lot, station, seed in LOTS:
                for serial, kind, board_seed in board_plan(boards, seed, lot):
                    images = images_of(render_board(kind, board_seed, _DEFECT_RATE), serial, lot)
                    publish_images(publisher, (replace(one, board={**one.board, "station": station}) for one in images))
                    until(lambda: self.ask("status")["backlog"] <= _FEW_WAITING)
        until(lambda: self.ask("status")["backlog"] == 0)

    def review(self) -> None:
        """Decide about every third image that did not pass, and disagree with every fourth of these."""
        for number, row in enumerate(self.rows(_UNSURE)[::3]):
            decided = "pass" if number % 4 == 0 or row.verdict == "review" else "fail"
            found = {"defect": row.defect} if decided == "fail" and row.defect else {}
            fields = {"inspection_id": row.inspection_id, "verdict": decided, "reviewer": REVIEWERS[number % 2]}
            self.ask("review", **fields, newest=None, **found)

    def answers(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=5).close()  # noqa: S310 - our own http
        except OSError:
            return False
        return True


def take(line: ShownLine, folder: Path, say: Callable[[str], None]) -> None:
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, path, width, height in PAGES:
            page = browser.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce")
            answer = page.goto(line.url + path.format(board=line.rows(_WORST)[0].board_id))
            assert answer, path
            assert answer.status == 200, path
            if name == "review":
                give_name(page)
            page.wait_for_timeout(_SETTLE_MS)
            file = folder / f"dashboard-{name}-{width}.png"
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
            say(f"{file}  {file.stat().st_size / 1000:.0f} kB")
        browser.close()


def give_name(page: "Page") -> None:
    page.get_by_label("Name").fill(REVIEWERS[0])
    page.get_by_role("button", name="Begin").click()


def main(
    demo: Annotated[Path, typer.Option("--dir", help="The demo's folder (made if it is not there).")] = Path("demo"),
    out: Annotated[Path, typer.Option(help="Where the pictures go.")] = ROOT / "docs" / "img",
    boards: Annotated[int, typer.Option(min=14, help="Boards of each of three lots.")] = 24,
) -> None:
    """Take the pictures while a camera goes on publishing."""
    from tools.demo.line import make_line

    make_line(demo)
    with tempfile.TemporaryDirectory(prefix="coserve-shots-") as scratch:
        line = ShownLine(demo, Path(scratch) / "line")
        with Service(line.file, line.file.with_name("daemon.log")):
            line.publish(boards)
            line.review()
            until(line.answers)
            words = ["camera", str(line.file), "--render", "200", "--rate", "20", "--lot", "L2414", "--serials", "N"]
            camera = subprocess.Popen(
                [sys.executable, "-m", "tools", *words, "--seed", "34"], stdout=subprocess.DEVNULL
            )
            try:
                take(line, out, typer.echo)
            finally:
                camera.terminate()
                camera.wait()


if __name__ == "__main__":
    typer.run(main)
