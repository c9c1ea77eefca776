"""A daemon whose decoder, weights, database and rules are broken under it: the line goes on, and says what is wrong."""

import shutil
import signal
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import RULES, Line, everything_is_whole
from tests.lines import a_jpeg
from tests.poison import a_poisonous_library, a_tiff, poisoned
from tests.waiting import PATIENCE_S


@pytest.mark.promise(
    "Containment",
    "An image that kills its decoder costs one restart and no other image; after killing the daemon three "
    "times it is not opened again",
)
def test_an_image_that_kills_its_decoder_costs_one_restart_and_no_other_image(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = Line(tmp_path / "line", experts_folder)
    environ = poisoned(a_poisonous_library(tmp_path), "segv")
    service = line.service(environ)
    service.start()
    before = [line.send() for _ in range(3)]
    for image in before:
        line.result(image)
    poison = line.send(a_tiff())
    assert service.process is not None
    assert service.process.wait(PATIENCE_S) == -signal.SIGSEGV
    with line.service(environ):
        after = [line.send() for _ in range(3)]
        assert (line.result(poison)["verdict"], line.result(poison)["reason"]) == ("unknown", "bad_image")
        assert {line.result(image)["verdict"] for image in (*before, *after)} == {"pass"}
        assert line.status()["state"] == "ready"
        line.idle()
    quarantined = [path.read_bytes() for path in (line.folder / "quarantine").glob("*.bin")]
    assert quarantined == [a_tiff()]
    assert "suspect_decoded" in line.log()
    marks = (line.folder / "journal" / "decoding.marks").read_bytes()
    assert not any(marks[:8192]), "a clean stop leaves no suspect"
    everything_is_whole(line)


@pytest.mark.promise(
    "Nothing accepted is lost",
    "A database that is locked, deleted, moved or replaced under the line: `busy` within a second; a lock "
    "loses nothing, and a stop in order copies all that was written",
)
def test_a_database_that_is_locked_deleted_moved_or_replaced_loses_nothing(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = Line(tmp_path, experts_folder)
    path = tmp_path / "inspection.db"
    sent: list[str] = []

    def send_until_accepted(header: dict[str, Any] | None = None) -> None:
        header = header or line.inspect()
        with line.peer() as peer:
            line.wait(lambda: peer.ask(header, a_jpeg())["type"] in {"accepted", "duplicate"})
        sent.append(header["id"])

    with line.service() as service:
        send_until_accepted()
        # A shell that holds the write lock, and a long query beside it.
        with closing(sqlite3.connect(path, isolation_level=None)) as shell, closing(sqlite3.connect(path)) as query:
            query.execute("BEGIN")
            query.execute("SELECT count(*) FROM inspections").fetchall()
            shell.execute("BEGIN EXCLUSIVE")
            waiting = [threading.Thread(target=send_until_accepted, args=(line.inspect(),)) for _ in range(3)]
            for thread in waiting:
                thread.start()
            line.wait(lambda: line.status()["state"] == "degraded")
            with line.peer() as peer:
                assert peer.ask({"type": "results_since", "seq": 0})["type"] == "results", "reading goes on"
            shell.execute("ROLLBACK")
        for thread in waiting:
            thread.join(PATIENCE_S)
        line.wait(lambda: line.status()["state"] == "ready")
        # Its files, one after the other, before a stop or a kill.
        for suffixes in ([""], ["-wal", "-shm"], ["", "-wal", "-shm"]):
            send_until_accepted()
            for suffix in suffixes:
                path.with_name(path.name + suffix).unlink()
            line.wait(lambda name=path.name + suffixes[0]: f"{name} was deleted" in str(line.status()["last_error"]))
            assert line.status()["state"] == "degraded"
            with line.peer() as peer:
                assert peer.ask(line.inspect(), a_jpeg())["type"] == "busy"
            service.stop()
            service.start()
            line.wait(lambda: line.status()["state"] == "ready")
            assert len(line.rows("SELECT 1 FROM inspections")) == len(sent)
        path.rename(tmp_path / "mine.db")
        path.write_bytes(b"")
        line.wait(lambda: "deleted, moved or replaced" in str(line.status()["last_error"]))
        (tmp_path / "mine.db").rename(path)
        line.wait(lambda: line.status()["state"] == "ready")
        send_until_accepted()
        # The journal, whole.
        shutil.rmtree(tmp_path / "journal")
        send_until_accepted()
        assert (tmp_path / "journal").is_dir()
        line.idle()
        service.kill()
        service.start()
        line.idle()
    passed = {image for (image,) in line.rows("SELECT image_id FROM inspections WHERE verdict = 'pass'")}
    assert passed >= set(sent)
    everything_is_whole(line)


@pytest.mark.promise("Containment", "Half-written rules and catalogs never take effect")
def test_rules_and_catalog_that_are_being_written_never_come_into_force_by_halves(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = Line(tmp_path, experts_folder)
    rules, catalog = tmp_path / "rules.yaml", tmp_path / "experts" / "catalog.yaml"
    with line.service():
        first = line.status()["rules_version"]

        def refused(what: str) -> None:
            answer = line.control("reload")
            assert answer["type"] == "error", answer
            assert what in answer["reason"], answer
            assert line.status()["rules_version"] == first
            assert line.result(line.send())["verdict"] == "pass"

        whole = catalog.read_text(encoding="utf-8")
        rules.write_text("", encoding="utf-8")
        refused("rules.yaml")
        rules.write_text(RULES[: RULES.index("classifiers") + 20], encoding="utf-8")
        refused("rules.yaml")
        rules.write_text(RULES, encoding="utf-8")
        catalog.write_text(whole[: len(whole) // 2], encoding="utf-8")
        refused("catalog.yaml")
        catalog.unlink()
        refused("catalog.yaml")
        catalog.write_text(whole, encoding="utf-8")
        rules.write_text(RULES.replace("boards:", "boards:\n  late: {components: {P: 1}}"), encoding="utf-8")
        answer = line.control("reload")
        assert answer["type"] == "ok", answer
        assert line.result(line.send(board={"type": "late", "serial": "L1"}))["verdict"] == "pass"
        # A storm of reloads, by control and by signal, while images run.
        storm = [threading.Thread(target=line.control, args=("reload",)) for _ in range(12)]
        for thread in storm:
            thread.start()
        assert {line.result(line.send())["verdict"] for _ in range(5)} == {"pass"}
        for thread in storm:
            thread.join(PATIENCE_S)
        assert line.status()["rules_version"] == answer["rules_version"]
    everything_is_whole(line)


@pytest.mark.promise(
    "Nothing accepted is lost",
    "Another program that opens and closes the database takes nothing away from the running line",
)
def test_another_program_that_opens_and_closes_the_database_takes_nothing_away(
    tmp_path: Path, experts_folder: Path
) -> None:
    """SQLite's last connection deletes the log; a program that does not see the daemon's locks takes itself for it."""
    line = Line(tmp_path, experts_folder)
    for _ in range(2):  # a first start, and one that finds the files of an earlier one
        with line.service():
            line.result(line.send())
            with closing(sqlite3.connect(tmp_path / "inspection.db")) as shell:
                assert shell.execute("SELECT count(*) FROM inspections").fetchone() == (line.count,)
            assert (tmp_path / "inspection.db-wal").exists()
            line.result(line.send())
            assert line.rows("SELECT count(*) FROM inspections") == [(line.count,)]


@pytest.mark.promise("Containment", "Missing or corrupt weights cost only their own images")
def test_missing_and_corrupt_weights_cost_only_their_own_images(tmp_path: Path, experts_folder: Path) -> None:
    line = Line(tmp_path, experts_folder)
    missing, corrupt = line.weights("C0603"), line.weights("QFP64")
    missing.unlink()
    (tmp_path / "experts" / "C0603.safetensors").unlink()
    whole = corrupt.read_bytes()
    corrupt.unlink()  # a link to the session's file
    corrupt.write_bytes(whole[:-1000] + b"\1" * 1000)
    with line.service():
        images = {component: [line.send(component=component) for _ in range(3)] for component in "PVF"}
        results = {c: {(line.result(i)["verdict"], line.result(i)["reason"]) for i in images[c]} for c in "PVF"}
        status = line.status()
    assert results == {"P": {("pass", None)}, "V": {("unknown", "expert_failed")}, "F": {("unknown", "expert_failed")}}
    assert status["state"] == "degraded"
    assert "safetensors" in status["last_error"]
