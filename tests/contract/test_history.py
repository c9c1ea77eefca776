"""Who changed what and when, which run judged an image, and which history of results a `seq` belongs to."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from coserve_client import Results
from experts.weights import file_sha256
from tests.contract.client import RULES, Line
from tests.lines import RULES_OF_VERSIONS
from tests.simulated import a_classifier
from tests.tools.run_commands import coserve

IN_FORCE = ("start", "reload")


@pytest.fixture
def line(tmp_path: Path, experts_folder: Path) -> Line:
    return Line(tmp_path / "line", experts_folder)


@pytest.fixture
def real(tmp_path: Path, version_folders: tuple[Path, Path]) -> Line:
    """Return a line whose weights are networks, which `coserve experts put` tries out."""
    return Line(tmp_path / "line", version_folders[0], RULES_OF_VERSIONS)


def done(*words: str, user: str = "anna", status: int = 0) -> str:
    """Return what a command in the name of `user` says, as sudo names the person behind root."""
    ran = coserve(*words, status=status, SUDO_USER=user)
    return ran.stderr if status else ran.stdout


def changes(line: Line, *kinds: str) -> list[tuple[Any, ...]]:
    rows = line.rows("SELECT who, what, subject, old, new, note FROM changes ORDER BY change_id")
    return [row for row in rows if row[1] in kinds]


def another_version(line: Line, expert: str) -> Path:
    """Return the weights of another version of `expert`, in a folder with a catalog."""
    folder = line.folder.parent / f"new-{expert}-{time.monotonic_ns()}"
    folder.mkdir()
    catalog = yaml.safe_load((line.folder / "experts/catalog.yaml").read_text(encoding="utf-8"))
    entry = catalog["experts"][expert]
    weights = bytearray((line.folder / "experts" / entry["file"]).read_bytes())
    weights[-4:-2] = os.urandom(2)  # not the exponent: the number stays finite
    (folder / "w.safetensors").write_bytes(weights)
    entry |= {"file": "w.safetensors", "sha256": file_sha256(folder / "w.safetensors")}
    (folder / "catalog.yaml").write_text(yaml.safe_dump({"experts": {expert: entry}}), encoding="utf-8")
    return folder


def version(line: Line, expert: str) -> str:
    catalog = yaml.safe_load((line.folder / "experts/catalog.yaml").read_text(encoding="utf-8"))
    return catalog["experts"][expert]["sha256"][:12]


def put_in_force(line: Line, number: int) -> None:
    """Give an expert other weights in the catalog, as a person with an editor does."""
    line.change_entry("R0402", **a_classifier(line.catalog.parent, f"R0402-{number}", ("ok", "odd", "bad")))


def periods(line: Line) -> dict[str, list[tuple[str, str | None]]]:
    """Return (since, version) by subject, in order of time."""
    told: dict[str, list[tuple[str, str | None]]] = {}
    for subject, at, new in line.rows(
        "SELECT subject, at, new FROM changes WHERE what IN ('start', 'reload') AND subject <> 'CoServe'"
        " ORDER BY change_id"
    ):
        told.setdefault(subject, []).append((at, new))
    return told


def in_force(told: Sequence[tuple[str, str | None]], at: str) -> set[str | None]:
    """Return the versions that were in force in the millisecond `at`."""
    ends = [since for since, _ in told[1:]] + ["9999"]
    return {new for (since, new), until_at in zip(told, ends, strict=True) if since <= at <= until_at}


def assert_every_version_was_in_force(line: Line) -> int:
    """Recompute from `changes` alone which versions were in force; return the number of rows that were compared."""
    told = periods(line)
    boards = line.rows("SELECT rules_version, first_seen_at FROM boards")
    for rules, at in boards:
        assert rules in in_force(told["rules"], at), (rules, at, told["rules"])
    answers = line.rows(
        "SELECT s.expert, s.expert_version, b.first_seen_at FROM stages s JOIN inspections USING (inspection_id)"
        " JOIN boards b USING (board_id)"
    )
    for expert, answered, at in answers:
        assert answered in in_force(told[expert], at), (expert, answered, at)
    return len(boards) + len(answers)


@contextmanager
def running(line: Line) -> Iterator[Any]:
    with line.service() as service:
        yield service
        line.idle()


def test_a_start_tells_what_is_in_force_and_a_stop_ends_its_run(line: Line) -> None:
    with running(line):
        line.send()
    told = changes(line, "start", "stop")
    subjects = {row[2]: row[4] for row in told}
    assert subjects["rules"] == line.rows("SELECT DISTINCT rules_version FROM boards")[0][0]
    assert {name: subjects[name] for name in ("R0402", "C0603")} == {n: version(line, n) for n in ("R0402", "C0603")}
    assert told[-1][1:3] == ("stop", "CoServe")
    with running(line):
        line.send()
    assert [row[2] for row in changes(line, "start")][len(told) - 1 :] == ["CoServe"]  # nothing else is different
    runs = line.rows("SELECT run_id, ended_at IS NOT NULL, version, epoch FROM runs")
    assert [run[:2] for run in runs] == [(1, 1), (2, 1)]
    assert len({run[3] for run in runs}) == 1
    assert line.rows("SELECT run_id FROM inspections ORDER BY seq") == [(1,), (2,)]
    explained = json.loads(done("explain", "2", "--config", str(line.config), "--json"))
    assert explained["run"]["run_id"] == 2
    assert any("in run 2 since" in words for words in explained["words"])


@pytest.mark.promise(
    "Versions of experts",
    "`changes` shows when each rules version and expert version was in force, also after a kill, and every row "
    "of the results agrees with it",
)
def test_every_period_of_rules_and_experts_can_be_told_from_changes(line: Line) -> None:
    with running(line):
        for number in range(12):
            for image in range(5):
                line.send(board={"type": "free", "serial": f"S{number}-{image}"})
            if number % 3 == 0:
                line.write_rules(f"{RULES}# {number}\n")
            if number % 3 == 1:
                put_in_force(line, number)
            if number % 3 != 2:
                assert line.control("reload", who="ben", note=f"step {number}")["type"] == "ok"
    service = line.service()
    line.write_rules(f"{RULES}# while it was stopped\n")
    done("reload", "--config", str(line.config), user="ben")
    service.start()
    line.send()
    line.idle()
    service.kill()  # what came into force is told all the same
    put_in_force(line, 12)
    done("reload", "--config", str(line.config))
    with running(line):
        line.send()
        line.send(board={"type": "free", "serial": "S2"})
    assert assert_every_version_was_in_force(line) > 120
    rules = [row for row in changes(line, *IN_FORCE) if row[2] == "rules"]
    assert len(rules) == 6
    assert rules[1][0] == "ben"
    assert rules[1][5] == "step 0"
    assert [row[3] for row in rules[1:]] == [row[4] for row in rules[:-1]]
    assert len(periods(line)["R0402"]) == 6


@pytest.mark.test_all
def test_two_persons_are_told_apart_with_their_notes(line: Line) -> None:
    config = ("--config", str(line.config))
    with running(line):
        done("pin", "R0402", *config, "--note", "night shift", user="anna")
        done("limits", "--backlog-images", "77", *config, user="ben")
        done("limits", *config, user="ben")  # only a question
        done("drain", *config, user="ben")
        done("drain", "--off", *config, user="anna")
        done("pin", "R0402", "--off", *config, user="anna")
        done("db", "prune", *config, "--note", "disk", user="ben")
        line.control("unload", expert="R0402")  # a client of before
        done("pin", "nobody", *config, status=1)
        assert "--note" in done("pin", "R0402", *config, "--note", "a\tb", status=2)
    done("db", "prune", *config, user="anna")  # without a daemon
    kinds = ("pin", "unpin", "unload", "limits", "drain", "prune")
    told = changes(line, *kinds)
    assert told == [
        ("anna", "pin", "R0402", None, "cpu", "night shift"),
        ("ben", "limits", "backlog_images", "20000", "77", None),
        ("ben", "drain", "intake", None, "on", None),
        ("anna", "drain", "intake", None, "off", None),
        ("anna", "unpin", "R0402", None, None, None),
        ("ben", "prune", "results", None, None, "disk"),
        ("unknown", "unload", "R0402", None, None, None),
        ("anna", "prune", "results", None, None, None),
    ]
    shown = json.loads(done("changes", *config, "--subject", "R0402", "--since", "today", "--json"))
    assert [row["what"] for row in shown] == ["unload", "unpin", "pin", "start"]
    assert "night" in done("changes", *config, "--subject", "R0402")


@pytest.mark.test_all
def test_versions_put_and_promoted_without_a_daemon_are_told_once(real: Line) -> None:
    line = real
    config = ("--config", str(line.config))
    with running(line):
        line.send()
    old = version(line, "P")
    done("experts", "put", "P", str(another_version(line, "P")), *config, user="anna")
    new = json.loads(done("experts", "show", "P", *config, "--json"))["versions"][-1]["version"]
    done("experts", "promote", "P", new, *config, "--note", "trained on lot 7", user="anna")
    for _ in range(2):
        with running(line):
            line.send()
            done("experts", "put", "Q", str(another_version(line, "Q")), *config, user="ben")
    with running(line):
        done("experts", "rollback", "P", *config, "--note", "worse", user="ben")
    steps = changes(line, "put", "promote", "rollback")
    assert [row[:3] for row in steps] == [
        ("anna", "put", "P"),
        ("anna", "promote", "P"),
        ("ben", "put", "Q"),
        ("ben", "put", "Q"),
        ("ben", "rollback", "P"),
    ]
    assert steps[1][3:] == (old, new, "trained on lot 7")
    assert steps[4][3:] == (new, old, "worse")
    assert [row[0] for row in changes(line, "reload")] == ["ben"]
    assert assert_every_version_was_in_force(line) > 3


def put_back(copy: Path, line: Line) -> None:
    for file in line.folder.glob("inspection.db-*"):
        file.unlink()
    shutil.copyfile(copy, line.folder / "inspection.db")


def some_results(line: Line, count: int, serial: str = "S1") -> None:
    for _ in range(count):
        line.send(board={"type": "free", "serial": serial})
    line.idle()


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "A client of results misses no result when a line is restored, and takes none for an earlier one",
)
def test_a_client_starts_over_after_a_restore_and_loses_nothing(line: Line, tmp_path: Path) -> None:
    position = tmp_path / "position"

    def read(count: int) -> list[dict[str, Any]]:
        with Results(line.results, line.intake, since=0, position=position) as results:
            return [dict(result) for result in (results.take(20.0) for _ in range(count)) if result is not None]

    service = line.service()
    service.start()
    some_results(line, 3)
    done("db", "backup", str(tmp_path / "older.db"), "--config", str(line.config))
    some_results(line, 4)
    assert [result["seq"] for result in read(7)] == list(range(1, 8))
    service.stop()
    put_back(tmp_path / "older.db", line)
    with running(line):
        some_results(line, 6)  # the numbers grow past the position
        again = read(9)
    assert [result["seq"] for result in again] == list(range(1, 10))
    stored = line.rows("SELECT seq, image_id FROM inspections ORDER BY seq")
    assert [(result["seq"], result["id"]) for result in again] == stored


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "A restored line knows every version that judged and can put it in force again; who restored it and why is "
    "recorded once",
)
def test_a_restored_line_knows_the_versions_that_judged_and_who_restored_it(real: Line, tmp_path: Path) -> None:
    line = real
    config = ("--config", str(line.config))
    old = version(line, "P")
    with running(line):
        some_results(line, 2)
        done("experts", "put", "P", str(another_version(line, "P")), *config)
        new = json.loads(done("experts", "show", "P", *config, "--json"))["versions"][-1]["version"]
        done("experts", "promote", "P", new, *config)
        some_results(line, 1, "S2")
        report = json.loads(done("backup", str(line.config), str(tmp_path / "line.tar"), "--json"))
        assert report["versions"] == 1
        assert report["versions_bytes"] > 1_000_000
        first = line.status()["epoch"]
    done("restore", str(tmp_path / "line.tar"), str(tmp_path / "restored"), "--note", "new PC", user="carla")
    back = Line.at(tmp_path / "restored/coserve.yaml")
    back.count = line.count
    shown = json.loads(done("experts", "show", "P", "--config", str(back.config), "--json"))
    states = {row["version"]: (row["state"], row["verdicts"]) for row in shown["versions"]}
    assert states == {old: ("kept", 2), new: ("in force", 1)}
    assert [step["did"] for step in shown["steps"]][-2:] == ["put", "promote"]
    for _ in range(2):
        with running(back):
            assert back.status()["epoch"] != first
            back.send()
    restores = changes(back, "restore")
    assert [row[:3] for row in restores if row[2] == "line"] == [("carla", "restore", "line")]
    assert [row[5] for row in restores if row[2] == "line"] == ["new PC"]
    done("experts", "promote", "P", old, "--config", str(back.config))


@pytest.mark.promise(
    "Versions of experts",
    "Changes made without a daemon are recorded once, each with its author; retention deletes none; a refused "
    "reload is recorded with its reason, and changes nothing",
)
def test_changes_outlive_retention_and_a_refused_reload_is_one_and_puts_nothing_in_force(line: Line) -> None:
    settings = yaml.safe_load(line.config.read_text(encoding="utf-8"))
    settings["retention"] = {"results_for": "1ms", "good_examples": 0}
    line.config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with running(line):
        line.send(board={"type": "pair", "serial": "D1"})
        line.send(board={"type": "pair", "serial": "D1"})
        line.write_rules("boards: {}\nnonsense: 1\n")
        assert line.control("reload", who="ben")["type"] == "error"
        assert line.control("reload", who="b\nen")["code"] == "bad_field"
        assert line.control("reload", note="x" * 200)["code"] == "bad_field"
    (refused,) = changes(line, "reload", "reload_refused")
    assert refused[:5] == ("ben", "reload_refused", "files", None, None)
    assert "rules.yaml" in refused[5]
    assert "event=reload_refused" in line.log()
    line.write_rules(RULES)
    before = line.rows("SELECT * FROM changes")
    done("db", "prune", "--config", str(line.config))
    assert line.rows("SELECT count(*) FROM boards") == [(0,)]
    assert line.rows("SELECT * FROM changes")[: len(before)] == before
