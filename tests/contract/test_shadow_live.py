"""Versions in shadow on a real line: they answer beside the one in force, and nothing that befalls them costs it."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from coserve_client import Publisher
from tests.contract.client import Line, everything_is_whole
from tests.lines import COSERVE_RUN, RULES_OF_VERSIONS, a_jpeg
from tests.simulated import DAEMON
from tests.tools.run_commands import coserve
from tools.experts.change import mark_shadow, put, switch
from tools.experts.line import open_line
from tools.experts.look import describe_shadow

pytestmark = pytest.mark.test_all

RULES = RULES_OF_VERSIONS.replace("[ok, bad]", "[ok]")
ASKED = {"images": 8, "agreement": 0.5}


def a_shadowed_line(folder: Path, version_folders: tuple[Path, Path], command: Any = COSERVE_RUN) -> tuple[Line, str]:
    """A line without a daemon yet, and the version of P in shadow: it answers the other way round."""
    line = Line(folder, version_folders[0], RULES, command, memory="100MB")
    experts = open_line(line.config)
    version = put(experts, "P", version_folders[1])
    mark_shadow(experts, "P", version, **ASKED)
    return line, version


def process_of(line: Line) -> psutil.Process | None:
    """Return the process in shadow of this line's daemon, None if there is none."""
    own = [one for one in psutil.process_iter(["cmdline"]) if str(line.config) in (one.info["cmdline"] or ())]
    return next((one for one in own if "daemon.shadow" in one.info["cmdline"]), None)


def urged(line: Line, but: psutil.Process | None = None) -> psutil.Process:
    """Return the process, no longer at idle priority: on a crowded machine a test would wait for it without end."""
    process = line.wait(lambda: (one := process_of(line)) != but and one)
    line.wait(lambda: os.sched_getscheduler(process.pid) == os.SCHED_IDLE)
    os.sched_setscheduler(process.pid, os.SCHED_OTHER, os.sched_param(0))
    with suppress(psutil.AccessDenied):  # a user may not
        process.nice(0)
    return process


def shadow_of(line: Line) -> dict[str, Any]:
    (row,) = line.status()["shadows"]
    return row


def answers(line: Line) -> list[tuple[Any, ...]]:
    return line.rows("SELECT inspection_id, outcome_in_service, outcome, step FROM shadow_answers ORDER BY 1")


@pytest.mark.promise(
    "Versions of experts",
    "A version in shadow changes no verdict and holds no image up, whether its process is killed, stopped or "
    "its weights are damaged; what it missed is counted, and it answers again after a restart",
)
def test_a_shadow_answers_beside_the_version_in_force_until_it_is_promoted(
    tmp_path: Path, version_folders: tuple[Path, Path]
):
    line = Line(tmp_path / "line", version_folders[0], RULES, COSERVE_RUN, memory="100MB")
    with line.service():
        assert process_of(line) is None
        assert "shadows" not in line.status()
        experts = open_line(line.config)
        old = experts.experts()["P"].version or ""
        new = put(experts, "P", version_folders[1])
        assert mark_shadow(experts, "P", new[:6], **ASKED) == new
        process = urged(line)
        ids = [line.send(component="PQ"[number % 4 == 0]) for number in range(12)]
        line.wait(lambda: len(answers(line)) == 9)
        assert shadow_of(line) == {"expert": "P", "version": new, "answers": 9, "dropped": 0, "problem": None}
        process.kill()
        urged(line, but=process)
        ids += [line.send(component="P") for _ in range(3)]
        line.wait(lambda: len(answers(line)) == 12)
        metrics = line.control("metrics")["text"]
        assert "coserve_shadow_answers_total 12.0" in metrics
        assert "coserve_shadow_dropped_total 0.0" in metrics
    # Its state outlives the daemon.
    with line.service():
        urged(line)
        ids.append(line.send(component="P"))
        line.wait(lambda: len(answers(line)) == 13)
        passed, failed = (
            line.rows("SELECT inspection_id FROM inspections WHERE component = 'P' AND verdict = ?", verdict)
            for verdict in ("pass", "fail")
        )
        assert passed, "the pictures are random"
        line.review(inspection_id=passed[0][0], verdict="fail", reviewer="Eva")
        report = describe_shadow(experts, "P")
        assert report is not None
        assert (report["images"], report["eligible"], report["agreement"], report["holds"]) == (13, 13, 0.0, False)
        assert (report["in_force"], report["reviewed"], report["effects"]["escapes_caught"]) == (old, 1, 1)
        assert {(row["in_service"], row["shadow"]): row["images"] for row in report["outcomes"]} == {
            pair: len(rows) for pair, rows in ((("pass", "fail bad"), passed), (("fail bad", "pass"), failed)) if rows
        }
        shown = coserve("experts", "shadow", "P", "--config", line.config, status=1).stdout
        assert "does not hold yet: 13 of 8 images, agreement at least 0.0000 (0.5 is asked)" in shown
        assert "fail bad" in shown
        done = switch(experts, "P", new)
        assert (done["heard"], done["shadow"]) == (True, f"its shadow {report['sentence']}")
        line.wait(lambda: process_of(line) is None)
        assert "shadows" not in line.status()
    assert len(answers(line)) == 13
    verdicts = line.rows(
        "SELECT i.image_id, s.expert_version, s.label, i.verdict FROM inspections i"
        " JOIN stages s ON s.inspection_id = i.inspection_id WHERE i.component = 'P'"
    )
    assert {version for _, version, _, _ in verdicts} == {old}
    assert all((label == "ok") == (verdict == "pass") for _, _, label, verdict in verdicts)
    assert [what for (what,) in line.rows("SELECT what FROM changes WHERE subject = 'P' AND what = 'shadow'")]
    everything_is_whole(line)


def test_a_stopped_shadow_holds_nothing_up_and_what_it_misses_is_counted(
    tmp_path: Path, version_folders: tuple[Path, Path]
):
    line, _ = a_shadowed_line(tmp_path / "line", version_folders, DAEMON)
    with line.service():
        process = urged(line)
        line.send()
        line.wait(lambda: shadow_of(line)["answers"] == 1)
        process.send_signal(signal.SIGSTOP)
        with Publisher(line.intake, source="camera") as publisher:
            for number in range(1500):
                publisher.send(f"{number}", a_jpeg(number % 4), board={"type": "free", "serial": "S1"}, component="P")
            assert publisher.finish().as_dict()["accepted"] == 1500
        line.idle()
        line.wait(lambda: shadow_of(line)["dropped"] > 0)
        assert shadow_of(line)["answers"] == 1
        process.send_signal(signal.SIGCONT)
        line.wait(lambda: sum(shadow_of(line)[name] for name in ("answers", "dropped")) == 1501)
        assert shadow_of(line)["answers"] > 1
    assert line.rows("SELECT count(*) FROM shadow_answers WHERE expert = 'P'")[0][0] > 1
    everything_is_whole(line)


@pytest.mark.parametrize("how", ["altered", "gone", "other network"])
def test_a_shadow_that_cannot_be_used_says_so_once_and_costs_the_line_nothing(
    tmp_path: Path, version_folders: tuple[Path, Path], how: str
):
    line, version = a_shadowed_line(tmp_path / "line", version_folders)
    experts = line.folder / "experts"
    weights = next((experts / "weights").glob(f"*/{version}*"))
    if how == "altered":
        content = bytearray(weights.read_bytes())
        content[-1000] ^= 1
        weights.unlink()
        weights.write_bytes(content)
    elif how == "gone":
        weights.unlink()
    else:
        candidates = experts / "candidates.json"
        candidates.write_text(candidates.read_text(encoding="utf-8").replace("resnet18", "resnet34"), encoding="utf-8")
    reason = {"altered": "sha256", "gone": "there is no such weights file", "other network": "holds a resnet18"}[how]
    with line.service():
        urged(line)
        line.result(line.send())
        line.wait(lambda: shadow_of(line)["problem"])
        assert reason in shadow_of(line)["problem"]
        line.result(line.send())
        report = describe_shadow(open_line(line.config), "P")
        assert report is not None
        assert reason in report["problem"]
        assert (report["images"], report["holds"]) == (0, False)
        line.wait(lambda: shadow_of(line)["dropped"])
    assert line.log().count("event=shadow_failed") == 1
    assert line.rows("SELECT count(*) FROM inspections WHERE verdict IN ('pass', 'fail')") == [(2,)]
    assert answers(line) == []
