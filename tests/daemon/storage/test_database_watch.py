"""The files of a running line's database get lost names back, while it runs and at the start after a kill."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from daemon.storage.database_watch import DatabaseFiles
from tests import ROOT

SUFFIXES = ("", "-wal", "-shm")


class Written:
    """A database that a line has open and writes numbers to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "rows.db"
        self.connection = sqlite3.connect(self.path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("CREATE TABLE t (n)")
        self.files = DatabaseFiles(self.path)
        self.files.hold()
        self.count = 0

    def write(self) -> None:
        self.connection.execute("INSERT INTO t VALUES (?)", (self.count,))
        self.count += 1

    def end(self) -> None:
        self.connection.close()
        self.files.release()


@pytest.fixture
def written(tmp_path: Path):
    written = Written(tmp_path)
    yield written
    written.end()


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The database of a line that was killed after fifty rows."""
    code = f"""
import os
from pathlib import Path
from tests.daemon.storage.test_database_watch import Written
written = Written(Path({str(tmp_path)!r}))
for _ in range(50):
    written.write()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return tmp_path / "rows.db"


def rows_of(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [n for (n,) in database.execute("SELECT n FROM t ORDER BY n")]


def a_copy(killed: Path, pattern: str) -> Path:
    """Copy the line's folder, files matching `pattern`; return its database."""
    folder = killed.parent / "copy"
    folder.mkdir()
    for path in killed.parent.glob(pattern):
        if path.is_file():
            shutil.copy2(path, folder)
    return folder / killed.name


@pytest.mark.parametrize("gone", [("",), ("-wal",), ("-shm",), SUFFIXES])
@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_files_that_are_deleted_or_moved_away_get_their_names_back(
    written: Written, gone: tuple[str, ...], how: str
) -> None:
    written.write()
    for suffix in gone:
        file = written.path.with_name(f"rows.db{suffix}")
        file.unlink() if how == "deleted" else file.rename(f"{file}.old")
    written.write()
    assert written.files.look() is None
    written.write()
    assert rows_of(written.path) == [0, 1, 2]
    written.end()
    assert rows_of(written.path) == [0, 1, 2]
    assert not list(written.path.parent.glob(".*"))


def test_another_file_in_the_databases_place_is_not_touched_and_named_until_it_goes(written: Written) -> None:
    written.path.unlink()
    written.path.write_bytes(b"another file")
    assert "move the other one away" in (written.files.look() or "")
    written.write()
    assert written.path.read_bytes() == b"another file"
    written.path.unlink()
    assert written.files.look() is None
    assert rows_of(written.path) == [0]


@pytest.mark.parametrize(("gone", "obstacle"), [("-wal", "rows.db-wal"), ("", ".rows.db.part")])
def test_a_file_that_cannot_be_put_back_is_a_problem_that_publishers_hear_of(
    written: Written, gone: str, obstacle: str
) -> None:
    written.path.with_name(f"rows.db{gone}").unlink()
    written.path.with_name(obstacle).mkdir()
    assert f"rows.db{gone} is gone and cannot be put back" in (written.files.look() or "")
    written.path.with_name(obstacle).rmdir()
    assert written.files.look() is None


def test_a_link_that_is_deleted_is_made_again_and_one_that_is_lost_with_its_file_is_a_problem(
    written: Written,
) -> None:
    (link,) = written.path.parent.glob(".rows.db.held-*")
    link.unlink()
    assert written.files.look() is None
    assert link.samefile(written.path)
    link.unlink()
    written.path.unlink()
    assert "nothing that is written now outlives the daemon" in (written.files.look() or "")


@pytest.mark.parametrize("deleted", [("-wal",), SUFFIXES])
def test_files_that_were_deleted_under_a_daemon_that_was_then_killed_come_back(
    killed: Path, deleted: tuple[str, ...]
) -> None:
    for suffix in deleted:
        killed.with_name(f"rows.db{suffix}").unlink()
    with capture_logs() as logs:
        DatabaseFiles(killed).settle()
    assert rows_of(killed) == list(range(50))
    first = logs[0]
    assert (first["event"], first["file"]) == ("database_put_back", str(killed.with_name(f"rows.db{deleted[0]}")))
    assert "to begin anew stop this daemon, then delete it" in first["advice"]
    assert not list(killed.parent.glob(".*"))


def test_rows_that_another_program_wrote_between_a_kill_and_the_next_start_stay(killed: Path) -> None:
    assert rows_of(killed) == list(range(50))  # SQLite writes the log back and deletes it
    with closing(sqlite3.connect(killed)) as database, database:
        database.execute("INSERT INTO t VALUES (50)")
    DatabaseFiles(killed).settle()
    assert rows_of(killed) == list(range(51))


@pytest.mark.parametrize("copy", [shutil.copyfile, shutil.copy2])
def test_a_backup_that_was_copied_over_the_database_of_a_killed_line_is_taken_as_it_is(
    killed: Path, tmp_path: Path, copy: Callable[[Path, Path], object]
) -> None:
    backup = tmp_path / "backup.db"
    with closing(sqlite3.connect(backup)) as database, database:
        database.execute("CREATE TABLE t (n)")
        database.execute("CREATE TABLE other (text)")
        database.executemany("INSERT INTO other VALUES (?)", [("x" * 3000,)] * 20)
    os.utime(backup, (0, 0))
    for suffix in SUFFIXES[1:]:
        killed.with_name(f"rows.db{suffix}").unlink()
    copy(backup, killed)
    DatabaseFiles(killed).settle()
    assert rows_of(killed) == []
    assert not list(killed.parent.glob(".*"))


def test_a_database_that_was_replaced_before_a_kill_is_kept_under_another_name(killed: Path) -> None:
    for suffix in SUFFIXES:
        killed.with_name(f"rows.db{suffix}").unlink()
    with closing(sqlite3.connect(killed)) as database, database:
        database.execute("CREATE TABLE t (n)")
    DatabaseFiles(killed).settle()
    (aside,) = killed.parent.glob("rows.db.aside-*Z")
    assert (rows_of(killed), rows_of(aside)) == ([], list(range(50)))


def test_a_copied_folder_whose_database_was_cleared_begins_anew_and_says_where_the_other_lines_results_lie(
    killed: Path,
) -> None:
    copy = a_copy(killed, ".*")  # which `rm -rf copy/*` leaves
    with capture_logs() as logs:
        DatabaseFiles(copy).settle()
    assert not copy.exists()
    ((event, aside),) = [(entry["event"], Path(entry["aside"])) for entry in logs]
    assert (event, rows_of(aside)) == ("database_put_aside", list(range(50)))
    assert not list(copy.parent.glob(".*"))


def test_a_folder_that_was_copied_as_a_whole_is_taken_as_it_is(killed: Path) -> None:
    copy = a_copy(killed, "*")
    DatabaseFiles(copy).settle()
    assert rows_of(copy) == list(range(50))
