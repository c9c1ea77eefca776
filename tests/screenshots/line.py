"""The line that the pictures show: a copy of the demo's, with boards of three lots, and some of its images reviewed."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from sqlalchemy import Row, text

from coserve_client import Publisher, publish_images
from daemon.config.settings import load_config
from daemon.storage.database.connections import open_for_reading
from daemon.wire.control import ask
from tests.ports import free_port
from tools.camera.render import render_board
from tools.camera.render.images import board_plan, images_of
from tools.setup.service import Service

#: Lot, station, and seed of the boards that are published first.
LOTS = (("L2411", "AOI-1", 31), ("L2412", "AOI-2", 32), ("L2413", "AOI-1", 33))
REVIEWERS = ("m.keller", "a.okafor")
_ANSWER_S = 10.0
#: Share of parts with a defect: about every eighth board has one.
_DEFECT_RATE = 0.003
#: Images that may wait before the next board is published: a board is judged long before its time limit.
_FEW_WAITING = 150
#: Images a second while the pictures are taken.
_RATE = "20"


@dataclass(frozen=True, slots=True)
class ShownLine:
    """A running line with its dashboard."""

    config: Path
    url: str

    def rows(self, sql: str) -> Sequence[Row[Any]]:
        engine = open_for_reading(load_config(self.config).database)
        try:
            with engine.connect() as connection:
                return connection.execute(text(sql)).all()
        finally:
            engine.dispose()

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        return ask(load_config(self.config).endpoints.control, kind, timeout_s=_ANSWER_S, **fields)

    def publish(self, boards: int) -> None:
        """Boards of every lot, and every image judged."""
        with Publisher(load_config(self.config).endpoints.intake[0], "camera-1") as publisher:
            for lot, station, seed in LOTS:
                for serial, kind, board_seed in board_plan(boards, seed, lot):
                    images = images_of(render_board(kind, board_seed, _DEFECT_RATE), serial, lot)
                    publish_images(publisher, (replace(one, board={**one.board, "station": station}) for one in images))
                    self._wait_for_backlog(_FEW_WAITING)
        self._wait_for_backlog(0)

    def _wait_for_backlog(self, at_most: int) -> None:
        while self.ask("status")["backlog"] > at_most:
            time.sleep(0.2)

    def review(self) -> None:
        """People have looked at some of what failed, and disagree with every fourth."""
        unsure = self.rows(
            "SELECT inspection_id, verdict, defect FROM inspections WHERE verdict IN ('fail', 'review')"
            " ORDER BY inspection_id"
        )
        for number, row in enumerate(unsure[::3]):
            inspection_id, verdict, defect = row.inspection_id, row.verdict, row.defect
            decided = "pass" if number % 4 == 0 or verdict == "review" else "fail"
            found = {"defect": defect} if decided == "fail" and defect else {}
            reviewer = REVIEWERS[number % 2]
            self.ask("review", inspection_id=inspection_id, verdict=decided, reviewer=reviewer, newest=None, **found)

    @contextmanager
    def camera(self) -> Iterator[None]:
        """A camera that goes on publishing while pages are looked at."""
        words = ["camera", str(self.config), "--render", "200", "--rate", _RATE, "--lot", "L2414", "--serials", "N"]
        words += ["--seed", "34"]
        process = subprocess.Popen(
            [sys.executable, "-m", "tools", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def copy_of(demo: Path, folder: Path) -> ShownLine:
    """The demo's line in `folder` (weights are linked), on a port and sockets of its own, every picture kept."""
    (folder / "experts").mkdir(parents=True)
    for file in (demo / "experts").iterdir():
        if file.is_file():
            shutil.copy(file, folder / "experts") if file.suffix == ".yaml" else _link(file, folder / "experts")
    shutil.copy(demo / "rules.yaml", folder)
    url = f"http://127.0.0.1:{free_port()}"
    settings = yaml.safe_load((demo / "coserve.yaml").read_text(encoding="utf-8"))
    settings["endpoints"] = {
        "intake": ["ipc://run/intake.sock"],
        "results": "ipc://run/results.sock",
        "control": "ipc://run/control.sock",
        "http": url,
    }
    settings["retention"] = {"keep": ["pass", "fail", "review", "unknown"], "free": "1GB"}
    settings["plant"] = {"shifts": {"early": "06:00", "late": "14:00", "night": "22:00"}, "yield_goal": 0.8}
    (folder / "coserve.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return ShownLine(folder / "coserve.yaml", url)


def _link(file: Path, folder: Path) -> None:
    try:
        (folder / file.name).hardlink_to(file)
    except OSError:  # another disk
        shutil.copy(file, folder)


@contextmanager
def running(line: ShownLine) -> Iterator[None]:
    """The line while it runs."""
    with Service(line.config, line.config.with_name("daemon.log")):
        yield
