"""Whole lines on real networks: what they compute, the memory that they share, and outputs that are not numbers."""

import struct
from pathlib import Path

import pytest

from experts.weights import read_header
from tests.contract.client import Line, everything_is_whole, sha256
from tests.contract.odd_daemons import ODD_DAEMON
from tests.lines import COSERVE_RUN


def _break_outputs(line: Line, expert: str) -> None:
    """Weights that are numbers, whose outputs are not: an import would refuse them."""
    file = line.catalog.with_name(f"{expert}.safetensors")
    header, data = read_header(file), bytearray(file.read_bytes())
    file.unlink()  # a link to the session's file
    for entry in header.entries:
        if entry.dtype == "F32" and len(entry.shape) > 1:
            first, last = header.data_start + entry.begin, header.data_start + entry.end
            data[first:last] = struct.pack("<f", 1e30) * ((last - first) // 4)
    file.write_bytes(data)
    line.change_entry(expert, sha256=sha256(data))


@pytest.mark.test_all
def test_outputs_that_are_not_numbers_cost_their_own_images_only(tmp_path: Path, torch_experts_folder: Path) -> None:
    line = Line(tmp_path, torch_experts_folder, command=COSERVE_RUN, memory="140MB")
    _break_outputs(line, "QFP64")
    with line.service():
        broken = line.result(line.send(component="F", board={"type": "named", "serial": "N1"}, designator="F1"))
        assert (broken["verdict"], broken["reason"]) == ("unknown", "expert_failed")
        assert "not finite" in line.status()["last_error"]
        assert line.result(line.send())["verdict"] == "pass"


@pytest.mark.test_all
def test_loads_that_hang_cost_their_own_images_only(tmp_path: Path, torch_experts_folder: Path) -> None:
    limits = {"hang_after": "4s"}
    line = Line(tmp_path, torch_experts_folder, command=(ODD_DAEMON, "dying-disk"), memory="140MB", limits=limits)
    with line.service() as service:
        weights = line.weights("C0603")
        dying = weights.with_name(f"{weights.name}.dies")
        line.control("unload", expert="C0603")
        dying.touch()
        waits = line.send(component="V")
        line.wait(lambda: "load_hung" in line.log())
        assert {line.result(line.send())["verdict"] for _ in range(2)} == {"pass"}, "the disk's channel goes on"
        assert line.status()["state"] == "degraded"
        assert line.result(line.send(component="V", deadline_ms=100))["reason"] == "deadline"
        dying.unlink()
        assert line.result(waits)["verdict"] in {"review", "pass"}
        line.wait(lambda: "hung_load_ended" in line.log())
        assert service.stop() == 0
        service.start()
    everything_is_whole(line)
