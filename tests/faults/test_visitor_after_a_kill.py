"""Another program opens the database between a kill and the next start: what it wrote stays."""

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from daemon.storage.database_place import Home

KILLED = """
import os, sqlite3
from pathlib import Path
from daemon.storage.database_place import Home
home = Home(Path('rows.db'))
home.settle()
database = sqlite3.connect('rows.db', isolation_level=None)
database.execute('PRAGMA journal_mode = WAL')
database.execute('CREATE TABLE t (n)')
home.hold()
for n in range(50):
    database.execute('INSERT INTO t VALUES (?)', (n,))
os._exit(0)
"""


def rows_of(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [n for (n,) in database.execute("SELECT n FROM t ORDER BY n")]


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=True)
    return tmp_path / "rows.db"


def test_what_was_written_between_a_kill_and_the_next_start_is_not_undone(killed: Path) -> None:
    assert rows_of(killed) == list(range(50))  # a look: SQLite writes the WAL back and deletes it
    with closing(sqlite3.connect(killed)) as database:
        database.execute("INSERT INTO t VALUES (50)")
        database.commit()
    Home(killed).settle()
    assert rows_of(killed) == list(range(51))


@pytest.mark.parametrize("deleted", [("rows.db-wal",), ("rows.db", "rows.db-wal", "rows.db-shm")])
def test_files_that_were_deleted_under_a_daemon_that_was_then_killed_come_back(
    killed: Path, deleted: tuple[str, ...]
) -> None:
    for name in deleted:
        killed.with_name(name).unlink()
    with capture_logs() as said:
        Home(killed).settle()
    assert rows_of(killed) == list(range(50))
    (first, *_) = said
    assert (first["event"], first["file"]) == ("database_put_back", str(killed.with_name(deleted[0])))
    assert "of a daemon that was killed" in first["advice"]
    assert "to begin anew stop this daemon, then delete it" in first["advice"]
    assert "while the daemon runs" not in first["advice"]
    assert not list(killed.parent.glob(".*"))


def test_a_copy_of_a_line_whose_database_was_cleared_begins_anew_and_says_where_the_other_lines_results_lie(
    killed: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in killed.parent.glob(".*"):  # what `rm -rf copy/*` leaves
        shutil.copy2(path, copy)
    with capture_logs() as said:
        Home(copy / "rows.db").settle()
    assert not (copy / "rows.db").exists()
    ((event, aside),) = [(one["event"], Path(one["aside"])) for one in said]
    assert (event, rows_of(aside)) == ("database_copied", list(range(50)))
    assert not list(copy.glob(".*"))


def test_what_an_older_version_held_comes_back_without_its_inode(killed: Path) -> None:
    killed.with_name(".rows.db.held-inode").unlink()
    for suffix in ("", "-wal", "-shm"):
        killed.with_name(f"rows.db{suffix}").unlink()
    Home(killed).settle()
    assert rows_of(killed) == list(range(50))


def test_a_folder_that_was_copied_as_a_whole_is_taken_as_it_is(killed: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in killed.parent.iterdir():
        if path.is_file():
            shutil.copy2(path, copy)
    Home(copy / "rows.db").settle()
    assert rows_of(copy / "rows.db") == list(range(50))
