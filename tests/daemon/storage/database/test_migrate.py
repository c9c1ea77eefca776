"""The database across releases: brought to the next schema with a copy kept, refused if newer, whole after any failure.

`newer` is this program with a made-up further step.
"""

import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection

from daemon.records import Generation
from daemon.storage.database import migrate as migrating
from daemon.storage.database.connections import StoreError, open_for_writing
from daemon.storage.database.generations import accept_generations
from daemon.storage.database.migrate import Step, migrate
from daemon.storage.database.store import Store
from daemon.storage.database.upkeep import copy_database
from daemon.storage.decisions import Decision
from tests import ROOT
from tests.daemon.storage.database.migrate_again import NEXT
from tests.daemon.storage.database.store_parts import a_box, a_line, a_stage, a_verdict, an_image
from tests.faults.shim import ShimError, shim_environment, switch_faults

pytestmark = pytest.mark.not_fast("starts processes")

Rows = dict[str, list[tuple[object, ...]]]


def ask(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def columns_of(path: Path, table: str) -> list[object]:
    return [row[1] for row in ask(path, f"PRAGMA table_info({table})")]


def all_rows(path: Path, like: Rows | None = None) -> Rows:
    """Return every row of every table by its columns, or of the tables and columns of `like`."""
    named = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    tables = [str(name) for (name,) in ask(path, named)]
    keys = list(like) if like else [" ".join([table, *map(str, columns_of(path, table))]) for table in tables]
    rows: Rows = {}
    for key in keys:
        table, *columns = key.split()
        quoted = ", ".join(f'"{column}"' for column in columns)
        rows[key] = ask(path, f'SELECT {quoted} FROM "{table}" ORDER BY rowid')  # noqa: S608 - our tables
    return rows


def is_migrated(path: Path, before: Rows) -> bool:
    """Return True if the migration is done; nothing may be missing either way."""
    assert ask(path, "PRAGMA integrity_check") == [("ok",)]
    assert ask(path, "PRAGMA foreign_key_check") == []
    assert all_rows(path, like=before) == before
    ((schema,),) = ask(path, "PRAGMA user_version")
    assert ("camera" in columns_of(path, "inspections")) == (schema == 2000)
    assert len(ask(path, "SELECT * FROM final_verdicts")) == len(ask(path, "SELECT seq FROM inspections WHERE seq"))
    return schema == 2000


def a_database(folder: Path) -> Path:
    """A closed database with boards open and closed, stages, boxes, a pending image, a decision and a text."""
    line = a_line(folder)
    line.inspect("R0402", "R1", type="tiny")
    images = line.accept(an_image("boxes", "QFP64", "U1", lot="Los 7"), an_image("waits", source="cam:2"))
    stages = [a_stage(), a_stage("yolo", detections=(a_box(), a_box("void")), label=None)]
    line.judge(a_verdict(images[0], "fail", "D1", stages=stages))
    line.store.review(Decision(images[0].inspection_id, "Žofie", None, "pass", None, "Kratzer"))
    line.store.transact(accept_generations, [Generation("mes", "g1", "m", "Was ist „kalt“?")])
    line.store.close()
    return folder / "inspection.db"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return a_database(tmp_path)


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """This program, one step newer than it is."""
    monkeypatch.setattr(migrating, "STEPS", (NEXT,))


def copies_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.before-*"))


def migrated(path: Path, tell: Callable[[str], None] = lambda _: None) -> None:
    engine = open_for_writing(f"sqlite:///{path}", 1000)
    try:
        migrate(engine, tell)
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    finally:
        engine.dispose()


def test_opening_an_up_to_date_database_copies_nothing_and_renews_the_views_of_an_earlier_one(old: Path) -> None:
    views = "SELECT name, sql FROM sqlite_master WHERE type = 'view' ORDER BY name"
    before = ask(old, views)
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.executescript("DROP VIEW expert_usage; CREATE VIEW expert_usage AS SELECT 1 AS expert")
    migrated(old)
    assert [path.name for path in old.parent.iterdir()] == ["inspection.db"]
    assert ask(old, views) == before


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "A database of an older schema can be opened: every row stays, waiting images are judged, `seq` continues",
)
def test_a_due_migration_copies_the_old_file_aside_and_the_line_goes_on_where_it_stopped(
    old: Path, newer: None
) -> None:
    before = all_rows(old)
    store = Store(f"sqlite:///{old}")
    recovery = store.recover()
    assert [image.image_id for image in recovery.pending] == ["waits"]
    (message, *_) = store.write_results([a_verdict(recovery.pending[0])]).published
    assert message.seq == recovery.last_seq + 1
    store.close()
    (copy,) = copies_of(old)
    assert copy.name == "inspection.db.before-0.2.0"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o640
    assert all_rows(copy) == before
    assert ask(old, "SELECT DISTINCT camera FROM inspections ORDER BY 1") == [("cam1",), ("cam:2",)]


def test_a_step_that_fails_half_way_leaves_the_old_database_as_it_was(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = all_rows(old)

    def change(connection: Connection) -> None:
        NEXT.change(connection)
        connection.exec_driver_sql("DROP TABLE no_such_table")

    monkeypatch.setattr(migrating, "STEPS", (Step("0.2.0", change),))
    with pytest.raises(StoreError, match="no such table"):
        migrated(old)
    assert not is_migrated(old, before)


def test_too_little_room_is_said_before_anything_is_copied(
    old: Path, newer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(old.parent)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match=r"needs \d+ kB in .* and 100 kB are free: make room and start again"):
        migrated(old)
    assert copies_of(old) == []


def test_the_copy_of_an_earlier_upgrade_goes(old: Path, newer: None) -> None:
    shutil.copy(old, old.with_name(f"{old.name}.before-0.1.5"))
    migrated(old)
    assert [copy.name for copy in copies_of(old)] == ["inspection.db.before-0.2.0"]


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "For a database of a newer version, the message names the version to install or the copy to put back",
)
def test_a_database_of_a_newer_version_says_which_version_or_copy_to_go_back_to(
    old: Path, newer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrated(old)
    monkeypatch.undo()
    before = old.read_bytes()
    version = r"schema 0\.2\.0; this one knows up to 0\.1\.0\): install CoServe 0\.2\.0 or newer again, or put back"
    for copy in (f"{old}.before-0.2.0, as docs/service.md says", r"the copy that it made, inspection\.db\.before-0"):
        with pytest.raises(StoreError, match=f"{version} {copy}"):
            migrated(old)
        for path in copies_of(old):
            path.unlink()
    assert old.read_bytes() == before


@pytest.mark.parametrize("mark", ["ALTER TABLE editions RENAME TO earlier", "PRAGMA user_version = 0"])
def test_a_database_from_before_the_first_release_says_to_start_with_a_new_one(old: Path, mark: str) -> None:
    with closing(sqlite3.connect(old)) as connection, connection:
        connection.execute(mark)
    before = old.read_bytes()
    with pytest.raises(StoreError, match=r"from before 0\.1\.0, which cannot be upgraded: start with a new one"):
        migrated(old)
    assert old.read_bytes() == before
    assert "## Starting over" in (ROOT / "docs" / "service.md").read_text(encoding="utf-8")


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "inspection.db")) as connection, connection:
        connection.execute("CREATE TABLE recipes_of_my_grandmother (id INTEGER)")
    with pytest.raises(StoreError, match="tables of another program"):
        Store(f"sqlite:///{tmp_path}/inspection.db")


def the_way_back() -> str:
    """The commands of docs/service.md, "Going back"."""
    text = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```sh\n(.*?)```", text.partition("## Going back")[2].partition("\n## ")[0], re.DOTALL)
    return textwrap.dedent(block)


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "The documented downgrade works: the test runs the page's own commands",
)
def test_the_documented_way_back_gives_the_older_version_its_database(
    old: Path, newer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = all_rows(old)
    store = Store(f"sqlite:///{old}")
    (waits,) = store.recover().pending
    store.write_results([a_verdict(waits)])
    store.close()
    monkeypatch.undo()
    with pytest.raises(StoreError, match=r"put back .*inspection\.db\.before-0\.2\.0, as docs/service"):
        Store(f"sqlite:///{old}")
    commands = the_way_back().replace("/var/lib/coserve", str(old.parent))
    subprocess.run(["bash", "-euc", commands], check=True)
    assert all_rows(old) == before
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    store = Store(f"sqlite:///{old}")
    assert store.recover().pending == [waits]
    store.close()
    assert ask(old.parent / "newer" / "inspection.db", "SELECT count(*) FROM pending WHERE task = 'judge'") == [(0,)]


class Killed:
    """Migrates in children under a plan of faults."""

    def __init__(self, process: "subprocess.Popen[str]", switch: Path) -> None:
        self._process, self._switch = process, switch

    def migrate(self, path: Path, *plan: str) -> int:
        switch_faults(self._switch, plan)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{path}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Killed]:
    switch = tmp_path / "faults"
    switch.write_text("", encoding="utf-8")
    try:
        environ = {**os.environ, **shim_environment([], switch=switch)}
    except ShimError as error:
        pytest.skip(str(error))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.daemon.storage.database.migrate_again"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environ,
            cwd=ROOT,
        )
    with process:
        yield Killed(process, switch)
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "A change of the schema killed at any write, sync, rename or truncation starts again and completes",
)
@pytest.mark.parametrize("call", ["write:kill-short", "sync:kill-before", "rename:kill-after", "truncate:kill-before"])
def test_a_migration_killed_at_any_call_starts_again_and_ends(old: Path, killed: Killed, call: str) -> None:
    """Each kill leaves its mess to the next start, which is killed one call later, until none is left to kill."""
    before, untouched = all_rows(old), old.read_bytes()
    kills = 0
    while killed.migrate(old, f"{call.replace(':', '@inspection.db:', 1)}:{kills + 1}") == -9:
        kills += 1
        if is_migrated(old, before):  # killed behind its commit: once more from the old one
            for file in old.parent.glob("inspection.db*"):
                file.unlink()
            old.write_bytes(untouched)
    assert kills >= 1
    assert is_migrated(old, before)
    (copy,) = copies_of(old)
    assert all_rows(copy) == before
    assert not list(old.parent.glob(".*.part"))


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "If the disk fails or is too small, the old database stays and the message says so",
)
@pytest.mark.parametrize("plan", ["write@.before-0.2.0:enospc:3+", "sync@.before-0.2.0:eio", "write@-wal:enospc:5+"])
def test_a_disk_that_fails_during_a_migration_leaves_the_database_and_says_so(
    old: Path, killed: Killed, plan: str
) -> None:
    before = all_rows(old)
    assert killed.migrate(old, plan) == 3
    assert not is_migrated(old, before)
    assert not list(old.parent.glob(".*.part"))
    log = (old.parent / "log").read_text(encoding="utf-8")
    assert "cannot copy" in log or "it is left as it was" in log
    assert killed.migrate(old) == 0
    assert is_migrated(old, before)


@pytest.mark.promise(
    "A full disk, and years of results",
    "A copy of the database is one consistent state, even while the daemon writes",
)
def test_a_copy_is_one_state_although_another_program_writes_all_the_time(tmp_path: Path) -> None:
    """A writer between any two steps makes the copy neither begin anew nor mix two states."""
    path = tmp_path / "inspection.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA synchronous = OFF")
        writer.execute("CREATE TABLE numbers (n INTEGER, padding TEXT)")
        writer.executemany("INSERT INTO numbers VALUES (0, ?)", [("x" * 3000,)] * 2000)
        steps: list[int] = []

        def write(done: int, _total: int) -> None:
            steps.append(done)
            writer.execute("UPDATE numbers SET n = n + 1")

        copy_database(path, tmp_path / "copy.db", on_progress=write)
    assert len(steps) >= 6
    assert steps == sorted(steps)
    assert ask(tmp_path / "copy.db", "SELECT DISTINCT n FROM numbers") == [(0,)]
    assert ask(tmp_path / "copy.db", "PRAGMA integrity_check") == [("ok",)]
