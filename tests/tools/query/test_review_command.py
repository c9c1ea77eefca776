"""`coserve review`: through the daemon while one runs, in its place while none does, and never both."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.contract.client import running
from tests.daemon.dashboard.web import Web
from tests.sql import sql
from tools.cli.main import app


def review(config: Path, *arguments: object) -> Any:
    """Run the command in this process: its start is what takes time."""
    done = CliRunner().invoke(app, ["review", *map(str, arguments), "--config", str(config)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def rows(folder: Path) -> list[tuple[Any, ...]]:
    return sql(folder, "SELECT inspection_id, verdict, defect, reviewer, note FROM reviews")


@pytest.fixture
def line(tmp_path: Path) -> Path:
    """A line at rest with three images: a fail, a pass, and one that is not judged yet."""
    web = Web(tmp_path / "line")
    web.add_board(1, "A1", verdict=None)
    web.add_image(1, 1, "fail", defect="D207")
    web.add_image(2, 1, "pass", defect=None)
    web.add_image(3, 1, None, defect=None)
    return web.config


def test_without_a_daemon_the_command_writes_itself(line: Path) -> None:
    done = review(line, 1, "pass", "--note", "a shadow", "--reviewer", "Eva")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "image 1 is pass, says Eva (review 1)" in done.stdout
    assert rows(line.parent) == [(1, "pass", None, "Eva", "a shadow")]


def test_a_decision_that_stands_is_overruled_only_by_who_names_it(line: Path) -> None:
    assert review(line, 1, "pass", "--reviewer", "Eva").exit_code == 0
    refused = review(line, 1, "fail", "--reviewer", "Ben")
    assert refused.exit_code == 1
    assert "Eva decided pass at 2" in refused.stderr
    again = f"coserve review 1 fail --defect D207 --reviewer Ben --config {line} --after 1"
    assert again in refused.stderr
    assert review(line, 1, "fail", "--reviewer", "Ben", "--after", 1).exit_code == 0
    assert [row[1:4] for row in rows(line.parent)] == [("pass", None, "Eva"), ("fail", "D207", "Ben")]


def test_a_whole_board_is_released_and_that_is_undone(line: Path) -> None:
    refused = review(line, 1, "pass", "--board")
    assert (refused.exit_code, "board 1 has no verdict of the line yet" in refused.stderr) == (1, True)
    closed = "completed_at = '2026-11-21', reason = 'time_limit', seq = 9, expected = 9"
    sql(line.parent, f"UPDATE boards SET verdict = 'unknown', {closed}", "UPDATE stream_position SET last_seq = 9")  # noqa: S608
    assert "board 1 is pass, says Eva (review 1)" in review(line, 1, "pass", "--board", "--reviewer", "Eva").stdout
    refused = review(line, 1, "fail", "--board", "--reviewer", "Ben", "--note", "no")
    assert f"coserve review 1 --board fail --note no --reviewer Ben --config {line} --after 1" in refused.stderr
    assert "board 1 is fail again, says daemon" in review(line, "--undo", 1, "--board", "--reviewer", "Ben").stdout
    gone = review(line, 7, "pass", "--board")
    assert (gone.exit_code, "there is no board 7: it never existed, or was pruned" in gone.stderr) == (1, True)


def test_a_defect_is_named_by_label_or_code_and_an_unknown_code_is_refused(line: Path) -> None:
    rules = "boards: {}\ndefects: {tombstone: D105, wrong_part: D106}\n"
    insert = "INSERT INTO rules_versions VALUES ('ffff', 'ff', '2026-11-22T00:00:00.000Z', ?)"
    sql(line.parent, insert, values=[rules])

    def stored(*arguments: object) -> str:
        written = review(line, 1, "fail", "--json", "--defect", *arguments)
        assert written.exit_code == 0, written.stderr
        assert review(line, "--undo", 1).exit_code == 0
        return json.loads(written.stdout)["defect"]

    assert [stored(name) for name in ("tombstone", "wrong part", "Wrong part (D106)", "d105", "D106")] == [
        *("D105", "D106", "D106", "D105", "D106")
    ]
    assert stored("D207") == "D207"  # no rules have it, but the line has given it
    refused = review(line, 1, "fail", "--defect", "D999")
    assert refused.exit_code == 2
    assert "expected one of tombstone (D105), wrong part (D106); a new code goes with --new-code" in refused.stderr
    assert stored("D999", "--new-code") == stored("D999") == "D999"


def test_a_board_is_named_by_its_serial(line: Path) -> None:
    closed = "verdict = 'fail', completed_at = '2026-11-21', reason = 'complete', seq = 9"
    sql(line.parent, f"UPDATE boards SET {closed}", "UPDATE stream_position SET last_seq = 9")  # noqa: S608
    columns = "board_type, attempt, first_seen_at, expected, inspected, rules_version, verdict, edition"
    add = f"INSERT INTO boards (board_id, serial, {columns}) SELECT ?, ?, {columns} FROM boards WHERE board_id = 1"  # noqa: S608
    for values in ((7, "1"), (8, "42")):
        sql(line.parent, add, values=values)
    assert "board 1 is pass, says Eva" in review(line, "A1", "pass", "--board", "--reviewer", "Eva").stdout
    assert "board 1 is fail again" in review(line, "--undo", "A1", "--board").stdout
    assert "board 8 is pass" in review(line, 42, "pass", "--board").stdout
    unclear = review(line, 1, "pass", "--board")
    assert (unclear.exit_code, "is the board_id of one board and the serial of another" in unclear.stderr) == (2, True)
    assert "board 7 is pass" in review(line, 1, "pass", "--board", "--type", "mainboard-a").stdout
    for missing in ("A9", "9" * 30, "²"):
        gone = review(line, missing, "pass", "--board")
        assert (gone.exit_code, f"no board with serial {missing}" in gone.stderr) == (1, True)


def test_what_waits_is_listed_and_undoing_makes_it_wait_again(line: Path) -> None:
    assert [row["inspection_id"] for row in json.loads(review(line, "--list", "--json").stdout)] == [1]
    assert "A1 #1" in review(line, "--list").stdout
    assert review(line, 1, "unknown").exit_code == 0
    assert "nothing waits" in review(line, "--list").stdout
    undone = review(line, "--undo", 1)
    assert "image 1 is fail D207 again" in undone.stdout
    assert json.loads(review(line, "--list", "--json").stdout)[0]["serial"] == "A1"
    assert review(line, "--undo", 1).exit_code == 1
    assert "nothing to undo" in review(line, "--undo", 1).stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "name an image and a verdict"),
        ((1,), 2, "which verdict?"),
        ((1, "pass", "--defect", "D1"), 2, "only a fail has one"),
        (("--undo", 1, "--note", "x"), 2, "takes no verdict"),
        ((99, "pass"), 1, "there is no image 99"),
        ((3, "pass"), 1, "has no verdict of the line yet"),
        ((1, "pass", "--after", 7), 1, "has no review 7"),
    ],
)
def test_wrong_use_is_2_and_a_no_is_1_each_with_its_reason(
    line: Path, arguments: tuple[object, ...], status: int, message: str
) -> None:
    refused = review(line, *arguments)
    assert (refused.exit_code, refused.stdout) == (status, "")
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert rows(line.parent) == []


def test_while_a_daemon_runs_it_is_the_one_that_writes(tmp_path: Path, experts_folder: Path) -> None:
    with running(tmp_path / "line", experts_folder) as line:
        line.result(line.send(component="V"))
        assert review(line.config, 1, "fail", "--defect", "D301", "--reviewer", "Eva").exit_code == 0
        assert "Eva decided fail D301" in review(line.config, 1, "pass").stderr
        assert "image 1 is review again" in review(line.config, "--undo", 1).stdout
        assert rows(line.folder)[0][1:4] == ("fail", "D301", "Eva")
