"""The line that the pictures show: a copy of the demo's, with boards of three lots, and some of its images reviewed."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from coserve_client import Publisher, publish_images
from tests.contract.client import Line
from tests.lines import COSERVE_RUN
from tests.ports import free_port
from tools.camera.render import render_board
from tools.camera.render.images import board_plan, images_of

#: Lot, station, and seed of the boards that are published first.
LOTS = (("L2411", "AOI-1", 31), ("L2412", "AOI-2", 32), ("L2413", "AOI-1", 33))
REVIEWERS = ("m.keller", "a.okafor")
#: Share of parts with a defect: about every eighth board has one.
_DEFECT_RATE = 0.003
#: Images that may wait before the next board is published: a board is judged long before its time limit.
_FEW_WAITING = 150
#: Images a second while the pictures are taken.
_RATE = "20"


class ShownLine(Line):
    """A copy of the demo's line with its dashboard."""

    @property
    def url(self) -> str:
        return self.endpoints["http"]

    def publish(self, boards: int) -> None:
        """Boards of every lot, and every image judged."""
        with Publisher(self.intake, "camera-1") as publisher:
            for lot, station, seed in LOTS:
                for serial, kind, board_seed in board_plan(boards, seed, lot):
                    images = images_of(render_board(kind, board_seed, _DEFECT_RATE), serial, lot)
                    publish_images(publisher, (replace(one, board={**one.board, "station": station}) for one in images))
                    self.wait(lambda: self.status()["backlog"] <= _FEW_WAITING)
        self.idle()

    def review(self) -> None:
        """People have looked at some of what failed, and disagree with every fourth."""
        unsure = self.rows(
            "SELECT inspection_id, verdict, defect FROM inspections WHERE verdict IN ('fail', 'review')"
            " ORDER BY inspection_id"
        )
        for number, (inspection_id, verdict, defect) in enumerate(unsure[::3]):
            decided = "pass" if number % 4 == 0 or verdict == "review" else "fail"
            found = {"defect": defect} if decided == "fail" and defect else {}
            reviewer = REVIEWERS[number % 2]
            self.control(
                "review", inspection_id=inspection_id, verdict=decided, reviewer=reviewer, newest=None, **found
            )

    @contextmanager
    def publishing(self) -> Iterator[None]:
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
    """The demo's line in `folder` on a port and sockets of its own, every picture kept."""
    (folder / "experts").mkdir(parents=True)
    for file in (demo / "experts").iterdir():
        if file.is_file():
            shutil.copy(file, folder / "experts")
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
    return ShownLine.at(folder / "coserve.yaml", COSERVE_RUN)
