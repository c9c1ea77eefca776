"""A migration that is killed, or whose disk fails, at every call it makes: nothing is lost, the next start finishes."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from alembic.script import ScriptDirectory

from daemon.storage.database import migrate as migrating
from daemon.storage.database.connections import StoreError, open_for_writing
from daemon.storage.database.copies import copy_database
from daemon.storage.database.migrate import alembic_config, copies_of, migrate
from tests import ROOT
from tests.daemon.storage.database.kept_schemas import SCHEMAS, all_rows, put_back
from tests.faults.shim import ShimError, shim_environment, switch_faults

#: A made-up revision that makes the largest table anew, as SQLite must for most changes, and moves every row.
NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "9999", "{head}", None, None


def upgrade() -> None:
    with op.batch_alter_table("inspections", recreate="always") as table:
        table.add_column(sa.Column("camera", sa.Text(), nullable=False, server_default="first"))
    op.execute("UPDATE inspections SET camera = source")
    op.create_index("ix_inspections_camera", "inspections", ["camera"])
"""


def ask(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


@pytest.fixture
def migrations(tmp_path: Path) -> Path:
    """This version's revisions and one more."""
    folder = tmp_path / "migrations"
    shutil.copytree(Path(migrating.__file__).with_name("migrations"), folder)
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    (folder / "versions" / "next.py").write_text(NEXT.format(head=head), encoding="utf-8")
    return folder


@pytest.fixture
def newer(migrations: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This program, one revision newer than it is."""
    config = alembic_config()
    config.set_main_option("script_location", str(migrations))
    monkeypatch.setattr(migrating, "alembic_config", lambda: config)


class Killed(SimpleNamespace):
    """Migrates in children under a plan of faults."""

    process: "subprocess.Popen[str]"
    switch: Path

    def migrate(self, path: Path, *plan: str) -> int:
        switch_faults(self.switch, plan)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture
def killed(tmp_path: Path, migrations: Path) -> Iterator[Killed]:
    switch = tmp_path / "faults"
    switch.write_text("", encoding="utf-8")
    try:
        environ = {**os.environ, **shim_environment([], switch=switch)}
    except ShimError as error:
        pytest.skip(str(error))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.daemon.storage.database.migrate_again", migrations],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environ,
            cwd=ROOT,
        )
    with process:
        yield Killed(process=process, switch=switch)
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 0


def whole(path: Path, before: dict[str, list[tuple[object, ...]]]) -> bool:
    """Whether the migration is done; nothing may be missing either way."""
    assert ask(path, "PRAGMA integrity_check") == [("ok",)]
    assert ask(path, "PRAGMA foreign_key_check") == []
    assert all_rows(path, like=before) == before
    (schema,) = ask(path, "SELECT version_num FROM alembic_version")[0]
    has_camera = "camera" in {row[1] for row in ask(path, "PRAGMA table_info(inspections)")}
    assert has_camera == (schema == "9999")
    assert ask(path, "SELECT count(*) FROM sqlite_master WHERE name LIKE '_alembic%'") == [(0,)]
    return has_camera


@pytest.mark.parametrize("call", ["write:kill-short", "sync:kill-before", "rename:kill-after", "truncate:kill-before"])
def test_a_migration_killed_at_any_call_starts_again_and_ends(tmp_path: Path, killed: Killed, call: str):
    """Each kill leaves its mess to the next start, which is killed one call later, until none is left to kill."""
    path = put_back(SCHEMAS[0], tmp_path)
    before = all_rows(path)
    kills = 0
    while killed.migrate(path, f"{call.replace(':', '@inspection.db:', 1)}:{kills + 1}") == -9:
        kills += 1
        if whole(path, before):  # killed behind its commit: once more from the old one
            for file in path.parent.glob("inspection.db*"):
                file.unlink()
            shutil.rmtree(tmp_path / "journal")
            put_back(SCHEMAS[0], tmp_path)
    assert kills >= 1
    assert whole(path, before)
    (copy,) = copies_of(path)
    assert all_rows(copy) == before
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("plan", ["write@.before-9999:enospc:3+", "sync@.before-9999:eio", "write@-wal:enospc:5+"])
def test_a_disk_that_fails_during_a_migration_leaves_the_database_and_says_so(
    tmp_path: Path, killed: Killed, plan: str
):
    path = put_back(SCHEMAS[0], tmp_path)
    before = all_rows(path)
    assert killed.migrate(path, plan) == 3
    assert not whole(path, before)
    assert not list(tmp_path.glob(".*.part"))
    said = (tmp_path / "log").read_text(encoding="utf-8")
    assert "cannot copy" in said or "it is left as it was" in said
    assert killed.migrate(path) == 0
    assert whole(path, before)


def test_too_little_room_is_said_before_anything_is_copied(
    tmp_path: Path, newer: None, monkeypatch: pytest.MonkeyPatch
):
    path = put_back(SCHEMAS[-1], tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StoreError, match=r"needs \d+ kB in .* and 100 kB are free: make room and start again"):
        migrate(open_for_writing(f"sqlite:///{path}", 1000))
    assert copies_of(path) == []


def test_the_two_newest_copies_stay(tmp_path: Path, newer: None):
    path = put_back(SCHEMAS[-1], tmp_path)
    for age, name in enumerate(["0007", "0006", "0005"], start=1):
        copy = path.with_name(f"{path.name}.before-{name}")
        shutil.copy(path, copy)
        os.utime(copy, (10_000 - age, 10_000 - age))
    migrate(open_for_writing(f"sqlite:///{path}", 1000))
    assert [copy.suffix for copy in copies_of(path)] == [".before-9999", ".before-0007"]


def test_a_table_that_others_point_at_can_be_made_anew(tmp_path: Path, newer: None):
    path = put_back(SCHEMAS[0], tmp_path)
    before = all_rows(path)
    engine = open_for_writing(f"sqlite:///{path}", 1000)
    migrate(engine)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    engine.dispose()
    assert whole(path, before)
    assert ask(path, "SELECT DISTINCT camera FROM inspections ORDER BY 1") == [("cam1",), ("cam:2",)]


def test_a_migration_of_a_large_database_says_that_it_lives(tmp_path: Path, newer: None):
    path = put_back(SCHEMAS[-1], tmp_path)
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(
            "CREATE TEMP TABLE more AS WITH RECURSIVE numbers(n) AS"
            " (SELECT 100 UNION ALL SELECT n + 1 FROM numbers WHERE n < 30000)"
            " SELECT inspections.*, n FROM inspections, numbers WHERE inspection_id = 1;"
            "UPDATE more SET inspection_id = n, image_id = 'x' || n, seq = NULL;"
            "ALTER TABLE more DROP COLUMN n;"
            "INSERT INTO inspections SELECT * FROM more;"
        )
    said: list[str] = []
    migrate(open_for_writing(f"sqlite:///{path}", 1000), said.append)
    assert {text.partition(":")[0] for text in said} == {
        "copying the database aside",
        "bringing the database to this version",
    }


def test_a_database_of_a_newer_version_says_which_version_or_copy_to_go_back_to(
    tmp_path: Path, newer: None, monkeypatch: pytest.MonkeyPatch
):
    path = put_back(SCHEMAS[-1], tmp_path)
    monkeypatch.setattr(migrating, "version", lambda _: "3.14.2rc1")
    migrate(open_for_writing(f"sqlite:///{path}", 1000))
    monkeypatch.undo()
    with pytest.raises(
        StoreError, match=r"schema 9999.*install CoServe 3\.14\.2 or newer again, or put back the copy"
    ) as caught:
        migrate(open_for_writing(f"sqlite:///{path}", 1000))
    assert f"{path}.before-9999" in str(caught.value)


def test_a_copy_is_one_state_although_somebody_writes_all_the_time(tmp_path: Path):
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
