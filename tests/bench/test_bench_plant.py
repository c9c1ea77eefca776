"""The benchmark of a broker's restarts, beside another server on the HTTP port of the line that it measures."""

import socket
from pathlib import Path

import pytest

pytest.importorskip("aiomqtt")

from coserve_client import CameraImage
from tests.bench.broker import mosquitto
from tests.bench.plant import Restarts, broken_promises, restart_a_broker
from tests.lines import a_jpeg, a_line

pytestmark = pytest.mark.test_all

ONE_END = Restarts(persistence=True, restarts=1, rows=120, lost=0, heard=120, missed=0, unretained=0)


@pytest.mark.skipif(mosquitto() is None, reason="needs mosquitto: make system-tools")
def test_it_runs_beside_a_line_that_has_the_http_port(tmp_path: Path, torch_experts_folder: Path) -> None:
    board = {"type": "open-board", "serial": "S1"}
    images = [CameraImage(f"i{n}", a_jpeg(n), board, "R0402", {"designator": f"R{n}"}) for n in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        pages = f"http://127.0.0.1:{taken.getsockname()[1]}"
        config = a_line(tmp_path / "line", torch_experts_folder, endpoints={"http": pages})
        counts = restart_a_broker(config, images, 0, persistence=False)
    assert (counts.rows > 0, counts.lost, counts.missed) == (True, 0, 0)


def test_each_limit_that_was_passed_is_a_sentence() -> None:
    assert broken_promises([ONE_END], {"ratio_dead": 0.98}) == []
    (slow,) = broken_promises([ONE_END], {"ratio_dead": 0.43})
    assert slow == "the rate beside a dead broker is 0.43 of that without, below 0.97"
    lossy = Restarts(persistence=False, restarts=1, rows=120, lost=2, heard=118, missed=0, unretained=0)
    (lost,) = broken_promises([ONE_END, lossy], {})
    assert lost.startswith("2 of 120 rows never came to the subscriber")
    assert lost.endswith("(without persistence)")
