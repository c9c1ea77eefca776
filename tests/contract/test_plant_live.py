"""A whole line with a hub: its results arrive while the hub is away and back, and decisions go both ways."""

from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Line
from tests.daemon.consumers.plant.hub_database import HubDatabase
from tests.daemon.storage.database.postgresql_server import WANTED, Server, programs
from tests.waiting import until

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)


def consumer(line: Line) -> dict[str, Any]:
    (row,) = line.status()["consumers"]
    return row


@pytest.mark.promise(
    "Delivery to the plant",
    "A hub that was away or restored from a backup gets what it lacks, and the line judges meanwhile",
)
def test_a_line_judges_on_without_its_hub_which_gets_everything_and_decides_too(
    postgresql: Server, tmp_path: Path, experts_folder: Path
) -> None:
    hub = HubDatabase(postgresql, "live")
    plant = {"kind": "plant", "database": hub.url}
    line = Line(tmp_path / "line", experts_folder, line="line-7", consumers={"hub": plant})
    with line.service():
        line.send(board={"type": "pair", "serial": "A0"})
        line.send(board={"type": "pair", "serial": "A0"})
        until(lambda: hub.ask("SELECT verdict FROM boards") == [{"verdict": "pass"}])
        postgresql.stop()
        for number in range(4):
            line.send(board={"type": "pair", "serial": f"B{number // 2}"})
        line.idle()
        until(lambda: consumer(line)["state"] == "waiting")
        assert line.status()["state"] == "ready"
        postgresql.start()
        until(lambda: consumer(line)["behind"] == 0 and consumer(line)["state"] == "connected")
        assert [row["board_serial"] for row in hub.ask("SELECT board_serial FROM boards ORDER BY seq")] == [
            *("A0", "B0", "B1")
        ]
        ask = (
            "INSERT INTO review_requests (line, epoch, inspection_id, verdict, defect, reviewer, newest)"
            " SELECT line, epoch, %s, 'fail', 'D1', 'Eva', %s FROM lines"
        )
        hub.ask(ask, 1, None)
        until(lambda: hub.ask("SELECT reviewer FROM reviews") == [{"reviewer": "Eva"}])
        assert line.rows("SELECT reviewer, verdict, defect FROM reviews") == [("Eva", "fail", "D1")]
        assert hub.value("SELECT final_verdict FROM boards WHERE board_serial = 'A0'") == "fail"
        hub.ask(ask.replace("'D1', 'Eva'", "'D2', 'Ben'"), 1, None)  # has not seen Eva's
        until(lambda: hub.value("SELECT count(*) FROM review_requests WHERE state = 'refused'") == 1)
        assert "Eva" in hub.value("SELECT answer FROM review_requests WHERE state = 'refused'")
    hub.engine.dispose()
