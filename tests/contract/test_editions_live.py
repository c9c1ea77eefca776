"""Editions of a running line: which one judges a board, what a start runs, what a kill or damage leaves."""

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experts.editions.folder import EditionFolder
from tests.contract.client import Line, everything_is_whole
from tests.contract.odd_daemons import ODD_DAEMON
from tests.contract.test_protocol import a_start, refusal
from tests.lines import a_jpeg
from tests.simulated import DAEMON, a_classifier
from tests.tools.run_commands import coserve, paused_coserve
from tests.waiting import PATIENCE_S

LABELS = ("ok", "odd", "bad")
RENAMED = ("good", "strange", "poor")
RULES = """\
boards:
  free: {extras: allow, components: {P: 1000}}
  pair: {components: {P: [P1, P2]}}
classifiers:
  P: {expert: R0402, pass: [ok, odd, bad], review_below: 0.85}
  V: {expert: C0603, pass: [ok, odd, bad], review_below: 0.0}
"""


def a_line(folder: Path, experts: Path, *command: str) -> Line:
    return Line(folder / "line", experts, RULES, command or DAEMON)


def change(line: Line, number: int) -> None:
    """Edit rules and catalog, so that both tell for which edition it is done."""
    line.write_rules(f"{RULES.replace('0.85', '0.0')}# {number}\n")
    line.change_entry("R0402", temperature=1 + number / 10)


def confidence(number: int) -> float:
    """Return the confidence of an answer in the edition that `change` made."""
    return 0.9 ** (1 + number / 10 if number > 1 else 1)


def judged(line: Line, serial: str) -> set[tuple[Any, ...]]:
    """Return edition, label, confidence and verdict of a board's images once it is complete."""
    line.boards(serial)
    images = [m for m in line.stream() if m["topic"] == f"inspection/pair/{serial}/"]
    assert {m["edition"] for m in images} == {line.boards(serial)[0]["edition"]}
    stages = [(m, m["stages"][0]) for m in images]
    return {(m["edition"], stage["label"], round(stage["confidence"], 2), m["verdict"]) for m, stage in stages}


def send(line: Line, serial: str, *designators: str) -> None:
    for designator in designators:
        line.send(a_jpeg(7), board={"type": "pair", "serial": serial}, designator=designator)


@pytest.mark.promise("Versions of experts", "A board is judged by the rules and experts that were in force as it began")
def test_a_board_is_judged_to_its_end_by_the_rules_and_experts_in_which_it_began(
    tmp_path: Path, experts_folder: Path
) -> None:
    """Labels are renamed and a temperature rises: rules of one edition refuse, or doubt, answers of the other."""
    line = a_line(tmp_path, experts_folder)
    service = line.service()
    service.start()
    send(line, "over", "P1")
    send(line, "killed", "P1")
    entry = a_classifier(line.catalog.parent, "renamed", RENAMED)
    line.change_entry("R0402", **entry, temperature=2.0)
    line.write_rules(RULES.replace("ok, odd, bad], review_below: 0.85", f"{', '.join(RENAMED)}], review_below: 0.85"))
    answer = line.control("reload")
    assert (answer["edition"], [row["expert"] for row in answer["changed_experts"]]) == (2, ["R0402"])
    assert "temperature 1.0 → 2.0" in answer["changed_experts"][0]["what"]
    send(line, "over", "P2")
    send(line, "new", "P1", "P2")
    ((_, old, *_),) = over = judged(line, "over")
    new = RENAMED[LABELS.index(old)]
    assert over == {(1, old, 0.9, "pass")}
    assert judged(line, "new") == {(2, new, 0.81, "review")}
    service.kill()
    with line.service():
        send(line, "killed", "P2")
        assert judged(line, "killed") == {(1, old, 0.9, "pass")}
        assert line.status()["edition"] == 2
    rows = "SELECT b.edition, s.expert_version, count(*) FROM stages s JOIN inspections USING (inspection_id) "
    versions = line.rows(f"{rows} JOIN boards b USING (board_id) GROUP BY 1, 2 ORDER BY 1")
    assert [(number, count) for number, _, count in versions] == [(1, 4), (2, 2)]
    assert versions[1][1] == entry["sha256"][:12]
    everything_is_whole(line)


def pairs() -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield boards of two images each, one after another."""
    for number in itertools.count():
        board = {"type": "pair", "serial": f"load-{number // 2}"}
        yield a_jpeg(1), {"board": board, "component": "P", "designator": f"P{number % 2 + 1}"}


def assert_no_mix(line: Line) -> list[int]:
    """Every answer is that of its board's edition, rules and expert; return the editions that judged."""
    rows = line.rows(
        "SELECT i.edition, b.edition, i.rules_version, b.rules_version, e.rules_version, i.verdict, s.confidence"
        " FROM inspections i JOIN boards b USING (board_id) JOIN editions e ON e.edition = b.edition"
        " LEFT JOIN stages s USING (inspection_id)"
    )
    for image, board, *rules, verdict, answered in rows:
        assert (image, len(set(rules)), verdict) == (board, 1, "pass")
        assert answered == pytest.approx(confidence(board))
    return sorted({board for _, board, *_ in rows})


@pytest.mark.promise("Versions of experts", "Ten reloads in a row under load lose nothing and mix nothing")
def test_ten_reloads_under_load_lose_nothing_and_mix_nothing(tmp_path: Path, experts_folder: Path) -> None:
    line = a_line(tmp_path, experts_folder)
    with line.service():
        with line.camera(pairs()) as account:
            for number in range(1, 11):
                send(line, f"over-{number}", "P1")
                change(line, number + 1)
                assert line.control("reload")["edition"] == number + 1
                send(line, f"over-{number}", "P2")
        line.idle()
        assert line.rows("SELECT count(*) FROM inspections") == [(account.sent + 20,)]
        assert assert_no_mix(line)[:10] == [*range(1, 11)]
        assert line.control("reload", now=True)["edition"] == 12
        line.wait(lambda: line.rows("SELECT count(*) FROM editions WHERE ended_at IS NULL") == [(0,)])

        def is_there_once() -> bool:
            resident = line.status()["executors"][0]["resident"]
            return len(resident) == len(set(resident))

        line.wait(is_there_once)
    everything_is_whole(line)


@pytest.mark.promise("Versions of experts", "A reload that is killed leaves the edition before or the new one, whole")
@pytest.mark.parametrize(("step", "in_force"), [("add", 1), ("point", 2), ("adopt", 2)])
def test_a_daemon_that_is_killed_at_a_reload_goes_on_with_one_whole_edition(
    tmp_path: Path, experts_folder: Path, step: str, in_force: int
) -> None:
    line = a_line(tmp_path, experts_folder, ODD_DAEMON, step)
    coserve("reload", "--config", line.config)
    with line.service() as service:
        line.result(line.send(component="V"))
        with line.held("C0603"):
            waiting = [line.send(component="V") for _ in range(5)]
            change(line, 2)
            line.forget("V", "C0603")
            assert service.process is not None
            service.process.send_signal(signal.SIGHUP)
            assert service.process.wait(PATIENCE_S) == -signal.SIGKILL
    line.command = DAEMON
    with line.service():
        assert line.status()["edition"] == in_force
        waiting.append(line.send(board={"type": "free", "serial": "fresh"}))
        assert [line.result(image)["edition"] for image in waiting] == [1] * 5 + [in_force]
        assert line.control("reload")["edition"] == (2 if in_force == 2 else 3), "a number is never used twice"
    assert_no_mix(line)
    everything_is_whole(line)


def test_a_command_that_is_killed_before_it_tells_the_daemon_leaves_it_as_it_is(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = a_line(tmp_path, experts_folder)
    with line.service():
        change(line, 2)
        patch = "from tools.experts.line import ExpertsLine\nExpertsLine.adopt = stop"
        with paused_coserve(patch, "reload", "--config", str(line.config)) as command:
            sentence = f"process {command.pid} is making an edition: try again when it is done"
            assert line.control("reload")["reason"] == sentence
            assert sentence in coserve("reload", "--config", line.config, status=1).stderr
            command.kill()
        assert line.result(line.send())["edition"] == 1
        line.wait(lambda: "edition 2 is in force in" in line.status().get("files", ""))
        assert line.status()["files"].endswith("but the line judges by edition 1: coserve reload")
        assert line.control("reload")["edition"] == 2


@pytest.mark.promise("Containment", "A start runs what was in force, whatever was saved since, and says so")
def test_a_start_runs_the_edition_in_force_whatever_the_files_hold(tmp_path: Path, experts_folder: Path) -> None:
    line = a_line(tmp_path, experts_folder)
    coserve("reload", "--config", line.config)
    rules = line.folder / "rules.yaml"
    saved: dict[str, tuple[str | None, str]] = {
        "edited": (f"{RULES}# a remark\n", "rules.yaml: edited, not in force: coserve reload"),
        "broken": ("boards: [", "edition 1 stays in force: mend the file, then coserve reload"),
        "missing": (None, "edition 1 stays in force: mend the file, then coserve reload"),
    }
    for name, (text, words) in saved.items():
        rules.unlink()
        if text is not None:
            rules.write_text(text, encoding="utf-8")
        before = len(line.log()) if name != "edited" else 0
        with line.service():
            assert line.result(line.send())["verdict"] == "pass", name
            assert line.status()["files"].endswith(words), name
            assert line.status()["edition"] == 1
            assert "event=files_not_in_force" in line.log()[before:]
        if text is None:
            rules.touch()


def test_a_daemon_that_may_not_write_beside_the_catalog_adopts_what_a_command_made(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = a_line(tmp_path, experts_folder, ODD_DAEMON, "read-only")
    reason = refusal(a_start(line.config, command=line.command))
    assert "no edition is in force yet, and only" in reason
    assert "coserve reload" in reason
    coserve("reload", "--config", line.config)
    with line.service():
        change(line, 2)
        answer = line.control("reload")
        assert answer["code"] == "not_in_force"
        assert "edited, not in force: coserve reload" in answer["reason"]
        assert line.result(line.send())["edition"] == 1
        assert "edition 2 is in force" in coserve("reload", "--config", line.config).stdout
        assert line.result(line.send(board={"type": "free", "serial": "S2"}))["edition"] == 2
        assert line.control("reload")["edition"] == 2


@pytest.mark.promise("Containment", "A damaged edition stops no running line, and a start names it in one line")
def test_a_damaged_edition_stops_no_running_line_and_a_start_names_it(tmp_path: Path, experts_folder: Path) -> None:
    line = a_line(tmp_path, experts_folder)
    folder = EditionFolder(line.catalog)
    with line.service():
        damages = {folder.file(1): "is cut off or damaged", folder.pointer: "holds no number of an edition"}
        for place, words in damages.items():
            before = place.read_text(encoding="utf-8")
            place.chmod(0o644)
            place.write_text(before[:-2], encoding="utf-8")
            answer = line.control("reload")
            assert answer["type"] == "error", words
            assert words in answer["reason"]
            assert words in refusal(a_start(line.config))
            assert line.result(line.send())["edition"] == 1
            place.write_text(before, encoding="utf-8")
        assert line.control("reload")["edition"] == 1
