"""The daemon as a process that is killed, cut off and refused by its disk: nothing accepted is lost."""

import shutil
from pathlib import Path

import pytest

from tests.faults.faults_rounds import FaultLine, kill_at_point, kill_at_random, refuse

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc")


def test_killed_at_five_random_moments_a_line_loses_nothing_and_doubles_nothing(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = FaultLine(tmp_path, experts_folder, seed=1)
    for _ in range(5):
        kill_at_random(line, longest_s=4.5)
    tally = line.finish()
    assert tally.broken == []
    assert tally.accepted > 0


def test_a_power_cut_at_a_sync_a_torn_write_or_an_answer_takes_nothing_that_was_accepted(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = FaultLine(tmp_path, experts_folder, seed=2)
    assert kill_at_point(line, "sync@/inspection.db-wal$:kill-before:40", "nothing")
    assert kill_at_point(line, "write@.journal$:kill-short:20", "garbage")
    assert kill_at_point(line, "send@intake.sock$:kill-after:60", "some")
    tally = line.finish()
    assert tally.broken == []
    assert tally.accepted > 0


def test_a_disk_that_refuses_is_heard_as_busy_and_the_line_goes_on_by_itself_once_it_takes_again(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = FaultLine(tmp_path, experts_folder, seed=3)
    run = line.run()
    run.wait_ready()
    for rule in ("sync@.journal$:eio", "write@.journal$:enospc", "sync@/inspection.db-wal$:eio:3+"):
        refuse(line, run, rule, for_s=0.5)
    run.kill()
    calls = run.calls()
    line.end_of(run, "SIGKILL", "nothing")
    for failed in (call for call in calls if call.call == "sync" and call.error and call.path.endswith(".journal")):
        later = [call for call in calls if call.path == failed.path and call.began_ns > failed.ended_ns]
        assert not [call for call in later if call.call in {"write", "sync"}], "a segment is used after its sync failed"
    tally = line.finish()
    assert tally.broken == []
    assert tally.faults.keys() == {"sync eio", "write enospc"}
