"""The daemon as a process that is killed, cut off and refused by its disk: nothing accepted is lost."""

import re
import shutil
from pathlib import Path

import pytest

from tests.contract.client import Line
from tests.faults.faults_rounds import FaultLine, kill_at_point, kill_at_random, refuse
from tests.lines import a_jpeg
from tests.simulated import DAEMON

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc")


@pytest.mark.promise(
    "Nothing accepted is lost",
    "An image that was answered `accepted` gets exactly one result, even if the daemon is killed at any moment",
)
def test_killed_at_five_random_moments_a_line_loses_nothing_and_doubles_nothing(
    tmp_path: Path, experts_folder: Path
) -> None:
    with FaultLine(tmp_path, experts_folder, seed=1, command=DAEMON) as line:
        for _ in range(5):
            kill_at_random(line, longest_s=2.5)
        tally = line.finish()
    assert tally.promises_broken == []
    assert tally.images_accepted > 0


@pytest.mark.promise(
    "Nothing accepted is lost",
    "The same holds for a power cut at a sync, during a write, and before or after an answer; data that was "
    "not synced may be missing, partly written, or garbage",
)
def test_a_power_cut_at_a_sync_a_torn_write_or_an_answer_takes_nothing_that_was_accepted(
    tmp_path: Path, experts_folder: Path
) -> None:
    with FaultLine(tmp_path, experts_folder, seed=2, command=DAEMON) as line:
        assert kill_at_point(line, "sync@/inspection.db-wal$:kill-before:40", "nothing", traffic_s=90.0)
        assert kill_at_point(line, "write@.journal$:kill-short:20", "garbage", traffic_s=90.0)
        assert kill_at_point(line, "send@intake.sock$:kill-after:60", "some", traffic_s=90.0)
        tally = line.finish()
    assert tally.promises_broken == []
    assert tally.images_accepted > 0


@pytest.mark.promise(
    "Nothing accepted is lost",
    "If the disk refuses writes or syncs, publishers get `busy`; the line continues by itself when the disk "
    "works again",
)
def test_a_disk_that_refuses_is_heard_as_busy_and_the_line_goes_on_by_itself_once_it_takes_again(
    tmp_path: Path, experts_folder: Path
) -> None:
    with FaultLine(tmp_path, experts_folder, seed=3, command=DAEMON) as line:
        run = line.run()
        run.wait_ready()
        for rule in ("sync@.journal$:eio", "write@.journal$:enospc", "sync@/inspection.db-wal$:eio:3+"):
            refuse(line, run, rule, for_s=0.5)
        run.kill()
        calls = run.calls()
        line.end_of(run, "SIGKILL", "nothing")
        tally = line.finish()
    assert tally.promises_broken == []
    assert tally.faults.keys() == {"sync eio", "write enospc"}
    for failed in (call for call in calls if call.call == "sync" and call.error and call.path.endswith(".journal")):
        later = [call for call in calls if call.path == failed.path and call.began_ns > failed.ended_ns]
        assert not [call for call in later if call.call in {"write", "sync"}], "a segment is used after its sync failed"


@pytest.mark.promise(
    "Nothing accepted is lost",
    "Bytes that were cut at any offset or have a flipped bit are detected, cost only their own images, and the "
    "log says where",
)
def test_bytes_that_were_altered_or_cut_cost_their_own_images_and_the_log_says_where(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = Line(tmp_path / "line", experts_folder)
    service = line.service()
    service.start()
    with line.held("QFP64"), line.peer() as peer:
        for number in range(16):
            peer.send(line.inspect(component="F"), a_jpeg(number))
        assert all(peer.take()["type"] == "accepted" for _ in range(16))
        service.kill()
    waiting = line.rows(
        "SELECT inspection_id, segment, offset, length FROM pending WHERE task = 'judge' ORDER BY offset"
    )
    assert len(waiting) == 16
    flipped, cut = waiting[1], waiting[-1]
    segment = line.folder / "journal" / f"segment-{cut[1]:08d}.journal"
    data = bytearray(segment.read_bytes())
    data[flipped[2] + flipped[3] // 2] ^= 1
    segment.write_bytes(data[: cut[2] + cut[3] - 1])
    with line.service():
        line.idle()
        log = (line.folder / "daemon.log").read_text(encoding="utf-8")
    rows = line.rows("SELECT inspection_id, verdict, reason FROM inspections")
    assert {row for row in rows if row[1] != "fail"} == {(key[0], "unknown", "bad_image") for key in (flipped, cut)}
    for key, reason in ((flipped, "the checksum does not match"), (cut, "cut")):
        assert re.search(rf'event=image_damaged .*segment={key[1]} offset={key[2] - 16} reason="{reason}', log)
