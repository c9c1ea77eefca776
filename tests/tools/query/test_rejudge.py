"""`coserve rejudge`: the stored pictures of a line that really ran, through the same and through other experts."""

import csv
import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.client import Line
from tests.lines import COSERVE_RUN, RULES_OF_VERSIONS, a_jpeg
from tests.sql import sql
from tests.tools.run_commands import coserve

RULES = RULES_OF_VERSIONS.replace("[ok, bad]", "[ok]")
PICTURES = 12


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory, version_folders: tuple[Path, Path]) -> Line:
    """A line that judged JPEGs and raw pixels for P and Q, and stopped."""
    keep = {"retention": {"keep": ["pass", "fail", "review", "unknown"]}}
    line = Line(
        tmp_path_factory.mktemp("judged") / "line", version_folders[0], RULES, COSERVE_RUN, memory="100MB", **keep
    )
    with line.service():
        for number in range(PICTURES):
            board = {"type": "free", "serial": f"S{number % 3}", "lot": "L1" if number < 6 else "L2"}
            line.send(a_jpeg(number), board=board, component="Q" if number % 4 == 0 else "P")
        raw = np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8)
        fields = {"encoding": "raw", "dtype": "uint8", "shape": [40, 50, 3], "board": {"type": "free", "serial": "S9"}}
        line.send(raw.tobytes(), **fields)
        line.idle()
        line.wait(lambda: line.rows("SELECT count(*) FROM inspections WHERE image_path IS NULL") == [(0,)])
    return line


@pytest.fixture
def line(judged: Line, tmp_path: Path) -> Line:
    """A copy whose daemon does not run; the database must be as it was, to the byte."""
    shutil.copytree(judged.folder, tmp_path / "line", ignore=shutil.ignore_patterns("run"))
    return Line.at(tmp_path / "line" / "coserve.yaml")


def digest(line: Line) -> str:
    return sha256((line.folder / "inspection.db").read_bytes()).hexdigest()


def rejudge(line: Line, *arguments: str, status: int = 0) -> Any:
    before = digest(line)
    done = coserve("rejudge", line.config, "--json", *arguments, status=status)
    assert digest(line) == before, "the database was written to"
    return json.loads(done.stdout) if status < 2 else done.stderr


def execute(line: Line, statement: str, *values: Any) -> None:
    sql(line.folder, statement, values=values)
    sql(line.folder, "PRAGMA wal_checkpoint(TRUNCATE)")


def swapped(version_folders: tuple[Path, Path]) -> tuple[str, str]:
    return "--expert", f"P={version_folders[1]}"


@pytest.mark.promise(
    "Versions of experts", "Judging stored images again writes nothing, and reports no change if nothing changed"
)
def test_nothing_changed_means_that_nothing_would_change(line: Line):
    report = rejudge(line)
    assert (report["rejudged"], report["unchanged"], report["changed"]) == (PICTURES + 1, PICTURES + 1, 0)
    assert report["list"] == report["changes"] == report["notes"] == []


def test_what_a_guard_sent_to_review_stays_there(line: Line):
    execute(line, "UPDATE inspections SET verdict = 'review', reason = 'picture_quality' WHERE verdict = 'pass'")
    assert rejudge(line)["changed"] == 0


def test_another_version_is_tried_only_on_what_it_would_judge(line: Line, version_folders: tuple[Path, Path]):
    report = rejudge(line, *swapped(version_folders), status=1)
    mine = line.rows("SELECT inspection_id, verdict FROM inspections WHERE component = 'P' ORDER BY inspection_id DESC")
    assert report["rejudged"] == report["changed"] == len(mine) == 10
    assert [(row["inspection_id"], row["verdict"]) for row in report["list"]] == mine
    assert {(row["from"], row["to"]) for row in report["changes"]} <= {("pass", "fail"), ("fail", "pass")}
    assert sum(row["images"] for row in report["changes"]) == len(mine)
    assert report["experts"].keys() == {"P"}


REVIEW = "INSERT INTO reviews (inspection_id, at, reviewer, verdict) VALUES (?, '2026-11-22', 'ines', ?)"
FAILED = "UPDATE inspections SET verdict = 'fail', defect = 'bad' WHERE inspection_id = ?"


def test_changes_are_weighed_against_reviewers(line: Line, version_folders: tuple[Path, Path]):
    passed = "SELECT inspection_id FROM inspections WHERE component = 'P' AND verdict = 'pass' ORDER BY inspection_id"
    first, second, third, fourth, *_ = (inspection_id for (inspection_id,) in line.rows(passed))
    # As an expert before this one would have left them: two failed, one of them rightly.
    for inspection_id, verdict in ((first, "pass"), (second, "fail")):
        execute(line, FAILED, inspection_id)
        execute(line, REVIEW, inspection_id, verdict)
    report = rejudge(line, status=1)
    assert report["effects"] == {"false_calls_gone": 1, "escapes_caught": 0, "new_false_calls": 0, "new_escapes": 1}
    assert {row["inspection_id"]: row["effect"] for row in report["list"]} == {
        first: "false_calls_gone",
        second: "new_escapes",
    }
    # And two that passed, one of them wrongly, before an expert that fails both.
    execute(line, REVIEW, third, "fail")
    execute(line, REVIEW, fourth, "pass")
    report = rejudge(line, *swapped(version_folders), status=1)
    assert report["effects"] == {"false_calls_gone": 0, "escapes_caught": 1, "new_false_calls": 1, "new_escapes": 0}
    assert report["reviewed"] == 4


def test_other_rules_are_compiled_and_judged_by(line: Line, tmp_path: Path):
    rules = tmp_path / "strict.yaml"
    rules.write_text(RULES.replace("review_below: 0.0", "review_below: 1.0"), encoding="utf-8")
    report = rejudge(line, "--rules", str(rules), status=1)
    assert report["changed"] == PICTURES + 1
    assert {row["to"] for row in report["changes"]} == {"review"}
    rules.write_text(RULES.replace("[ok]", "[okay]"), encoding="utf-8")
    assert "has no label `okay`" in rejudge(line, "--rules", str(rules), status=2)


def test_a_sample_is_drawn_at_random_the_same_each_time_and_said_in_every_output(
    line: Line, version_folders: tuple[Path, Path], tmp_path: Path
):
    options = (*swapped(version_folders), "--sample", "4", "--csv", str(tmp_path / "changes.csv"))
    report = rejudge(line, *options, status=1)
    assert rejudge(line, *options, status=1) == report
    assert report["rejudged"] == 4
    assert report["sample"] == {"images": 4, "of": 10, "changed_low": pytest.approx(0.397635), "changed_high": 1.0}
    ids = [row["inspection_id"] for row in report["list"]]
    newest = line.rows("SELECT inspection_id FROM inspections WHERE component = 'P' ORDER BY 1 DESC LIMIT 4")
    assert ids == sorted(ids, reverse=True)
    assert ids != [inspection_id for (inspection_id,) in newest]
    sentence = "a random sample, 4 of 10 images: of all 39.8% to 100.0% would change (95 % interval), that is 4 to 10"
    assert sentence in report["notes"]
    assert {row["sample"] for row in csv.DictReader((tmp_path / "changes.csv").read_text().splitlines())} == {"4 of 10"}
    printed = coserve("rejudge", line.config, *options, status=1).stdout
    assert sentence in " ".join(printed.split())
    assert rejudge(line, "--sample", "1000")["sample"] is None


def test_pictures_that_are_gone_altered_or_outside_are_told_and_never_a_change(
    line: Line, version_folders: tuple[Path, Path]
):
    paths = dict(line.rows("SELECT inspection_id, image_path FROM inspections WHERE component = 'P'"))
    pruned, gone, altered, outside, unjudged, *_ = sorted(paths)
    execute(line, "UPDATE inspections SET image_path = NULL WHERE inspection_id = ?", pruned)
    (line.folder / paths[gone]).unlink()
    (line.folder / paths[altered]).write_bytes(a_jpeg(99))
    execute(line, "UPDATE inspections SET image_path = '../../etc/passwd' WHERE inspection_id = ?", outside)
    late = "UPDATE inspections SET verdict = 'unknown', reason = 'deadline' WHERE inspection_id = ?"
    execute(line, late, unjudged)
    report = rejudge(line, *swapped(version_folders), status=1)
    assert (report["changed"], report["unread"], report["pruned"], report["unjudged"]) == (5, 3, 1, 1)
    assert not {gone, altered, outside, pruned, unjudged} & {row["inspection_id"] for row in report["list"]}
    assert any("3 pictures could not be judged again" in note for note in report["notes"])


def test_what_is_different_from_then_is_named_rules_version_and_settings(
    line: Line, version_folders: tuple[Path, Path], tmp_path: Path
):
    assert rejudge(line)["differences"] == []
    line.change_entry("P", temperature=5)
    assert rejudge(line)["differences"] == [], "an edit is not in force before a reload"
    coserve("reload", "--config", line.config)
    images = dict(sql(line.folder, "SELECT expert, count(*) FROM stages GROUP BY expert"))
    assert rejudge(line)["differences"] == [{"what": "P temperature 1.0 → 5.0", "images": images["P"]}]
    assert f"P temperature 1.0 → 5.0 │ {images['P']}" in coserve("rejudge", line.config).stdout
    (tmp_path / "rules.yaml").write_text(RULES.replace("pass: [ok]", "pass: [bad]"), encoding="utf-8")
    report = rejudge(line, "--rules", str(tmp_path / "rules.yaml"), "--csv", str(tmp_path / "changes.csv"), status=1)
    names = {row["what"].split(" ")[0]: row["images"] for row in report["differences"]}
    assert names == {"P": images["P"], "rules": images["P"] + images["Q"]}
    (change, *_) = [row for row in report["list"] if row["component"] == "P"]
    assert change["differs"].startswith("rules ")
    assert change["differs"].endswith("; P temperature 1.0 → 5.0")
    with (tmp_path / "changes.csv").open(encoding="utf-8", newline="") as file:
        assert {row["differs"] for row in csv.DictReader(file)} == {row["differs"] for row in report["list"]}
    coserve("experts", "rollback", "P", "--config", line.config)
    done = coserve("rejudge", line.config, "--json", "--expert", f"P={version_folders[1]}", status=1)
    (difference,) = json.loads(done.stdout)["differences"]
    assert difference["what"].startswith("P version ")
    assert difference["images"] == images["P"]
