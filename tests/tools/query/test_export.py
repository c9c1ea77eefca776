"""`coserve export`: a package is whole, says what it lacks, and is there completely or not at all."""

import csv
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from daemon.config.settings import load_config
from daemon.storage.database.connections import open_for_reading
from daemon.storage.database.schema import inspections
from daemon.storage.database.store import Store
from daemon.storage.decisions import Decision
from daemon.units import spreadsheet_cell
from tests.contract.client import Line
from tests.faults.shim import read_log, shim_environment
from tests.small_disk import small_disk
from tests.tools.query.judged_line import SERIALS
from tests.tools.run_commands import coserve, paused_coserve, start_coserve
from tools.query.package import write
from tools.query.package.verify import verify_package
from tools.query.package.write import PackageReport, write_package
from tools.query.reading import BoardSelection
from tools.terminal.console import CommandError


def export(folder: Path, out: Path, *, with_weights: bool = False, **selection: Any) -> PackageReport:
    config = folder / "coserve.yaml"
    settings = load_config(config)
    engine = open_for_reading(settings.database)
    try:
        return write_package(config, settings, engine, BoardSelection(**selection), out, with_weights=with_weights)
    finally:
        engine.dispose()


def lines(package: Path, table: str) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (package / "rows" / f"{table}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def package(judged: Line, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of lot L1, made by the command; no test changes it."""
    out = tmp_path_factory.mktemp("packages") / "L1"
    done = coserve("export", "--lot", "L1", "--out", out, "--with-weights", "--config", judged.config)
    assert f"export --verify {out}" in done.stdout
    return out


@pytest.fixture
def copy(package: Path, tmp_path: Path) -> Path:
    """A copy of the package, to change something in."""
    return Path(shutil.copytree(package, tmp_path / "package", symlinks=True))


def test_the_package_of_a_lot_has_all_of_its_rows(judged: Line, package: Path) -> None:
    boards = judged.rows("SELECT board_id FROM boards WHERE lot = 'L1'")
    assert [(row["board_id"],) for row in lines(package, "boards")] == boards
    mine = (
        "inspection_id IN (SELECT inspection_id FROM inspections JOIN boards USING (board_id) WHERE boards.lot = 'L1')"
    )
    manifest = json.loads((package / "manifest.json").read_text(encoding="utf-8"))
    for table in ("inspections", "stages", "detections", "reviews", "final_verdicts"):
        ((count,),) = judged.rows(f"SELECT count(*) FROM {table} WHERE {mine}")  # noqa: S608
        assert len(lines(package, table)) == manifest["rows"][table] == count
    sql = f"SELECT verdict, defect, latency_ms, image_id FROM inspections WHERE {mine} ORDER BY inspection_id"  # noqa: S608
    names = ("verdict", "defect", "latency_ms", "image_id")
    assert [tuple(row[name] for name in names) for row in lines(package, "inspections")] == judged.rows(sql)
    assert manifest["line"]["config"] == str(judged.config)
    assert manifest["selection"]["lots"] == ["L1"]
    assert manifest["last_seq"] == judged.rows("SELECT last_seq FROM stream_position")[0][0]


def test_boxes_that_people_drew_are_in_the_package_of_their_board_alone(line: Path, tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{line}/inspection.db")) as store:
        with store.engine.connect() as connection:
            failed = inspections.c.lot == "L1", inspections.c.verdict == "fail"
            image = connection.execute(select(inspections.c.inspection_id).where(*failed).limit(1)).scalar_one()
        review = store.review(Decision(image, "Eva", None, "fail", boxes=(("void", 1.5, 2, 3, 4),)))
    for lot, rows in (("L1", 1), ("L2", 0)):
        export(line, tmp_path / lot, lots=(lot,))
        assert len(lines(tmp_path / lot, "drawn_boxes")) == rows
    box = {"box_id": 1, "review_id": review.review_id, "label": "void", "x1": 1.5, "y1": 2, "x2": 3, "y2": 4}
    assert lines(tmp_path / "L1", "drawn_boxes") == [box]
    assert "No mistakes found" in coserve("db", "check", "--config", line / "coserve.yaml").stdout


def test_sha256sum_accepts_it_and_so_do_we(package: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=package, check=True)
    check = verified(package)
    assert check["files"] == sum(path.is_file() for path in package.rglob("*"))
    assert (check["is_whole"], check["links"]) == (True, [])
    words = coserve("export", "--verify", package).stdout
    assert f"whole, {check['files']:,} files" in words
    assert hashlib.sha256((package / "SHA256SUMS").read_bytes()).hexdigest() in words
    assert package.stat().st_mode & 0o007 == 0


def verified(package: Path, status: int = 0) -> dict[str, Any]:
    return json.loads(coserve("export", "--verify", package, "--json", status=status).stdout)


def _replace_by_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.promise(
    "Queries and exports", "Changed, removed or added files in a package are detected; the package lists what it lacks"
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: (p / "rows/boards.jsonl").write_text("x", encoding="utf-8"), "changed: rows/boards.jsonl"),
        (lambda p: (p / "README.txt").unlink(), "missing: README.txt"),
        (lambda p: (p / "rows/more.jsonl").write_text("x", encoding="utf-8"), "added: rows/more.jsonl"),
        (lambda p: (p / "more").symlink_to("/etc/passwd"), "added: more (a link)"),
        (lambda p: _replace_by_link(p / "manifest.json"), "changed: manifest.json (a link)"),
        (lambda p: _replace_by_link(p / "rows"), "added: rows (a link)"),
        (lambda p: (p / os.fsdecode(b"\xff.csv")).touch(), "added: \\\\xff.csv"),
        (lambda p: (p / "a\nb\x1b").write_text("x", encoding="utf-8"), "added: a\\nb\\x1b"),
    ],
)  # fmt: skip
def test_what_was_changed_taken_away_or_added_is_found(copy: Path, change: Callable[[Path], Any], message: str) -> None:
    change(copy)
    assert message in coserve("export", "--verify", copy, status=1).stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_replace_by_link, "SHA256SUMS is a link"),
        (lambda sums: sums.unlink(), "has no SHA256SUMS"),
        (lambda sums: sums.write_text(sums.read_text() + f"{'0' * 64}  README.txt\n"), "README.txt has no place here"),
        *(
            (lambda sums, line=line: sums.write_text(f"{line}\n"), "SHA256SUMS:1: expected a sha256")
            for line in ("", "0" * 64 + "  ../../etc/passwd", "0" * 64 + "  /etc/passwd", "nonsense")
        ),
        (lambda sums: forge(sums.parent, "manifest.json", b"[]"), "manifest.json does not say when it was made"),
        (lambda sums: forge(sums.parent, "manifest.json", b"\xff{"), "manifest.json does not say when it was made"),
    ],
)  # fmt: skip
def test_checksums_and_a_manifest_that_are_not_ours_are_named(
    copy: Path, change: Callable[[Path], Any], message: str
) -> None:
    change(copy / "SHA256SUMS")
    done = coserve("export", "--verify", copy, status=1)
    assert (len(done.stderr.splitlines()), message in done.stderr) == (1, True), done.stderr


def forge(package: Path, name: str, data: bytes) -> None:
    """Other bytes, and their checksum beside."""
    before = hashlib.sha256((package / name).read_bytes()).hexdigest()
    (package / name).write_bytes(data)
    sums = package / "SHA256SUMS"
    sums.write_text(sums.read_text().replace(f"{before}  {name}", f"{hashlib.sha256(data).hexdigest()}  {name}"))


def test_pictures_are_what_the_cameras_sent_under_names_that_harm_nobody(judged: Line, package: Path) -> None:
    listed = list(csv.DictReader((package / "pictures.csv").read_text(encoding="utf-8").splitlines()))
    assert len(listed) == len(lines(package, "inspections"))
    sent = {str(row["inspection_id"]): row for row in lines(package, "inspections")}
    files = {path.relative_to(package).as_posix() for path in package.glob("pictures/**/*") if path.is_file()}
    assert {row["file"] for row in listed if row["file"]} == files
    for row in listed:
        assert bool(row["file"]) != bool(row["why_not"])
        if row["file"]:
            data = (package / row["file"]).read_bytes()
            image = sent[row["inspection_id"]]
            assert hashlib.sha256(data[-image["image_bytes"] :]).hexdigest() == image["image_sha256"]
    assert {row["why_not"] for row in listed if not row["file"]} == {"verdict pass: not kept (retention.keep)"}
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/") for name in files)
    assert not any(".." in name.split("/") for name in files)
    serials = {row["serial"] for row in listed}
    assert {spreadsheet_cell(serial) for serial in SERIALS} <= serials


def test_what_is_missing_is_said(line: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(line / "inspection.db")) as database:
        ((pruned,), (gone,), (damaged,)) = database.execute(
            "SELECT inspection_id FROM inspections WHERE image_path IS NOT NULL AND verdict = 'fail' LIMIT 3"
        ).fetchall()
        database.execute("UPDATE inspections SET image_path = NULL WHERE inspection_id = ?", (pruned,))
        paths = dict(database.execute("SELECT inspection_id, image_path FROM inspections"))
        database.execute("DELETE FROM rules_versions")
        database.commit()
    (line / paths[gone]).unlink()
    (line / paths[damaged]).write_bytes(b"other")
    shutil.rmtree(line / "experts" / "weights")
    report = export(line, tmp_path / "out", lots=("L1",), with_weights=True)
    listed = csv.DictReader((tmp_path / "out/pictures.csv").read_text(encoding="utf-8").splitlines())
    why = {int(row["inspection_id"]): row["why_not"] for row in listed}
    assert why[pruned].startswith("pruned by retention")
    assert why[gone].startswith("deleted since its row was read")
    text = "\n".join(report.warnings)
    assert f"inspection {damaged}: its picture is not what the camera sent" in text
    assert "the database no longer has their text" in text
    assert ".safetensors: this weights file does not exist" in text
    assert verify_package(tmp_path / "out").is_whole


@pytest.mark.parametrize(
    ("selection", "condition"),
    [
        ({"serials": ("S2",)}, "serial = 'S2'"),
        ({"lots": ("L2",), "board_types": ("quick",)}, "lot = 'L2' AND board_type = 'quick'"),
        ({"serials": (SERIALS[3],)}, "serial LIKE '%DROP%'"),
        ({"since": "2000-01-01T00:00:00.000Z"}, "1"),
    ],
)
def test_boards_are_chosen_as_asked(judged: Line, tmp_path: Path, selection: dict[str, Any], condition: str) -> None:
    export(judged.folder, tmp_path / "out", **selection)
    board_ids = judged.rows(f"SELECT board_id FROM boards WHERE {condition} ORDER BY 1")  # noqa: S608
    assert [(row["board_id"],) for row in lines(tmp_path / "out", "boards")] == board_ids


@pytest.mark.promise("Queries and exports", "A package is complete or absent after a full disk, SIGTERM or SIGKILL")
def test_a_full_disk_is_named_and_leaves_nothing(judged: Line, tmp_path: Path) -> None:
    for size in ("100k", "1m"):
        with small_disk(tmp_path / size, size=size) as disk:
            words = ("--lot", "L1", "--with-weights", "--out", disk / "L1", "--config", judged.config)
            done = start_coserve("export", *words)
            assert done.returncode == 1
            assert "No space left on device; make room" in done.stderr or "are free: make room" in done.stderr
            assert str(disk) in done.stderr
            assert list(disk.iterdir()) == []


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc")
def test_every_folder_of_a_package_is_synced_after_its_last_file(judged: Line, tmp_path: Path) -> None:
    out, log = tmp_path / "L1", tmp_path / "calls"
    words = ("--lot", "L1", "--out", out, "--config", judged.config)
    done = start_coserve("export", *words, env={**os.environ, **shim_environment((), log)})
    assert done.returncode == 0, done.stderr
    made, synced = dict[Path, int](), dict[Path, int]()
    for number, call in enumerate(read_log(log)):
        if call.call == "open" and call.other == "created":
            made[Path(call.path).parent] = number
        elif call.call == "sync" and call.result == 0:
            synced[Path(call.path)] = number
    part = tmp_path / "L1.part"
    folders = {part / path.relative_to(out) for path in (out, *out.rglob("*")) if path.is_dir()}
    assert folders == {folder for folder in folders if synced.get(folder, -1) > made.get(folder, 0)}


#: The command waits before its checksums.
BEFORE_SUMS = "from tools.query.package import write; write._write_sums = stop"


@pytest.mark.test_all
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_is_ended_leaves_no_package_and_the_next_one_is_whole(
    judged: Line, tmp_path: Path, end: signal.Signals
) -> None:
    out = tmp_path / "L1"
    with paused_coserve(BEFORE_SUMS, "export", "--lot", "L1", "--out", out, "--config", judged.config) as process:
        with pytest.raises(CommandError, match="another process"):
            export(judged.folder, out, lots=("L1",))
        process.send_signal(end)
        process.wait(120)
    assert not out.exists()
    assert (tmp_path / "L1.part").exists() == (end is signal.SIGKILL)
    export(judged.folder, out, lots=("L1",))
    assert verify_package(out).is_whole
    assert not (tmp_path / "L1.part").exists()


@pytest.mark.promise(
    "Queries and exports",
    "An audit package is one consistent state of the database while the line writes; no transaction is open "
    "while images are copied",
)
def test_rows_are_one_state_while_the_line_writes(line: Path, tmp_path: Path) -> None:
    """Each transaction adds an image with its answer: no package has one without the other."""
    stop = threading.Event()
    added = 0

    def go_on() -> None:
        nonlocal added
        with closing(sqlite3.connect(line / "inspection.db", timeout=10)) as database:
            (number,) = database.execute("SELECT max(inspection_id) FROM inspections").fetchone()
            (template,) = database.execute("SELECT min(inspection_id) FROM stages").fetchone()

            def copy(table: str, **new: Any) -> None:
                columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
                copied = ", ".join(name for name in columns if name not in {*new, "image_path"})
                database.execute(
                    f"INSERT INTO {table} ({', '.join(new)}, {copied}) SELECT {', '.join('?' * len(new))}, {copied}"  # noqa: S608
                    f" FROM {table} WHERE inspection_id = ?",
                    (*new.values(), template),
                )

            while not stop.is_set():
                number += 1
                copy("inspections", inspection_id=number, image_id=f"more-{number}", seq=1000 + number)
                copy("stages", inspection_id=number)
                database.commit()
                added += 1

    writer = threading.Thread(target=go_on)
    writer.start()
    try:
        while added < 20:
            time.sleep(0.01)
        number = 0
        while number < 3 or added < 40:  # a writer that stands still meanwhile would show nothing
            number += 1
            out = tmp_path / f"out-{number}"
            export(line, out, lots=("L1",))
            done = {row["inspection_id"] for row in lines(out, "inspections")}
            assert {row["inspection_id"] for row in lines(out, "final_verdicts")} == done
            judged = {row["inspection_id"] for row in lines(out, "inspections") if row["reason"] is None}
            assert {row["inspection_id"] for row in lines(out, "stages")} == judged
    finally:
        stop.set()
        writer.join()


def test_no_transaction_is_open_while_pictures_are_copied(
    line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_pictures, checkpoints = write.copy_pictures, list[tuple[int, ...]]()

    def look_first(*arguments: Any) -> Any:
        with closing(sqlite3.connect(line / "inspection.db", isolation_level=None)) as database:
            database.execute("UPDATE boards SET station = 'elsewhere'")
            checkpoints.append(database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
        return copy_pictures(*arguments)

    monkeypatch.setattr(write, "copy_pictures", look_first)
    export(line, tmp_path / "out", lots=("L1",))
    assert checkpoints == [(0, 0, 0)]
    assert {row["station"] for row in lines(tmp_path / "out", "boards")} == {"ST1", None}
