"""`coserve report` where a model is configured and no daemon listens: the template, at once, and why."""

import json
import socket
from pathlib import Path

import yaml

from tests.daemon.dashboard.web import Web
from tests.tools.run_commands import coserve


def test_the_verdict_is_the_one_after_review_with_who_gave_it_and_the_lines_beside_it(tmp_path: Path) -> None:
    web = Web(tmp_path / "line")
    web.add_board(1, "B-1", "fail", expected=1, inspected=1)
    web.add_image(1, 1, "fail")
    assert "FAILED: 1 of 1 positions inspected.\n" in coserve("report", "B-1", "--config", web.config).stdout
    web.add_review(1, "pass", reviewer="Eva")
    after = coserve("report", "B-1", "--config", web.config).stdout
    assert "passed: 1 of 1 positions inspected; decided by Eva at " in after
    assert "the line's verdict was fail." in " ".join(after.split())
    report = json.loads(coserve("report", "B-1", "--config", web.config, "--json").stdout)
    assert (report["verdict"], report["daemon_verdict"], report["decided_by"]) == ("pass", "fail", "Eva")


def test_defects_have_names_notes_are_told_and_a_person_is_not_contradicted(tmp_path: Path) -> None:
    web = Web(tmp_path / "line")
    rules = "boards: {}\ndefects: {wrong_part: D106}\n"
    web.sql("INSERT INTO rules_versions VALUES ('ffff', 'ff', '2026-11-22T00:00:00.000Z', :text)", text=rules)
    web.add_board(1, "B-1", "fail", expected=2, inspected=2)
    web.add_image(1, 1, "fail", defect="D106")
    web.add_image(2, 1, "fail", defect="D106")
    web.add_stage(2, label="wrong_part", confidence=1.0)

    def text() -> str:
        return " ".join(coserve("report", "B-1", "--config", web.config).stdout.split())

    assert "R1 (R0402) failed: wrong part (D106)." in text()
    web.add_review(2, "unknown", reviewer="Ben", note="blurred")
    assert (
        "R2 (R0402) cannot be judged, says Ben (“blurred”): the line's verdict was fail wrong part (D106);"
        " R0402 saw wrong_part (1.00)." in text()
    )
    web.add("reviews", board_id=1, at="2026-11-23T00:00:00.000Z", reviewer="Eva", verdict="pass", note="by hand")
    released = text()
    assert "passed: 2 of 2 positions inspected; decided by Eva at 2026-11-23 00:00:00 UTC (“by hand”)" in released
    assert "R1 (R0402) failed by the line: wrong part (D106)." in released


def test_after_a_kill_of_the_daemon_the_template_answers_and_says_what_to_do(tmp_path: Path) -> None:
    web = Web(tmp_path / "line")
    web.add_board(1, "B-1")
    web.add_image(1, 1)
    settings = yaml.safe_load(web.config.read_text(encoding="utf-8"))
    settings["models"] = {"writer": {"checkpoint": "model", "memory": "1MB"}}
    web.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    (web.folder / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as old_socket:
        old_socket.bind(str(web.folder / "run/intake.sock"))
    report = json.loads(coserve("report", "B-1", "--config", web.config, "--wait", "2", "--json").stdout)
    assert report["by"] == "template"
    assert report["why_not_the_model"].startswith("model writer: no daemon answers at ipc://")
    assert report["why_not_the_model"].endswith(f"start it with `coserve run {web.config}`")
