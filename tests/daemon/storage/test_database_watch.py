"""A running line notices that its database lost its name, and no start combines files of two databases."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from daemon.storage.database.connections import open_for_writing
from daemon.storage.database.upkeep import copy_database
from daemon.storage.database_watch import DatabaseFiles
from tests import ROOT

pytestmark = pytest.mark.not_fast("starts processes")

SUFFIXES = ("", "-wal", "-shm")


#: Opens a database again, writes a row and is killed.
_GO_ON = """
import os, sys
from pathlib import Path
from daemon.storage.database.connections import open_for_writing
from daemon.storage.database_watch import DatabaseFiles
path = Path(sys.argv[1])
DatabaseFiles(path).put_foreign_log_aside()
engine = open_for_writing(f"sqlite:///{path}", 2000)
DatabaseFiles(path).note(engine)
with engine.begin() as connection:
    connection.exec_driver_sql("INSERT INTO t VALUES (50)")
os._exit(0)
"""

#: Copies a database file as `cp` does while a line writes, goes on through a checkpoint and is killed.
_OUTGROW_A_COPY = """
import os, subprocess, sys
from pathlib import Path
from tests.daemon.storage.test_database_watch import Written
written = Written(Path(sys.argv[1]))
def write(count, checkpoint):
    with written.engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO t SELECT value FROM json_each(?)", (str(list(range(count))),))
    if checkpoint:
        written.files._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
write(3000, True)
subprocess.run(["cp", written.path, written.path.with_name("copy.db")], check=True)
write(30000, True)
write(3000, False)
os._exit(0)
"""


class Written:
    """A database that a line has open and writes numbers to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "rows.db"
        self.engine = open_for_writing(f"sqlite:///{self.path}", 2000)
        self.files = DatabaseFiles(self.path)
        with self.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE t (n)")
        self.files.note(self.engine)
        self.count = 0
        self.told: list[str] = []

    def write(self) -> None:
        with self.engine.begin() as connection:
            connection.exec_driver_sql("INSERT INTO t VALUES (?)", (self.count,))
        self.count += 1

    def end(self) -> None:
        self.files.copy_if_lost(self.told.append)
        self.engine.dispose()


@pytest.fixture
def written(tmp_path: Path):
    written = Written(tmp_path)
    yield written
    written.end()


@pytest.fixture(scope="module")
def killed_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a line that was killed after fifty rows."""
    folder = tmp_path_factory.mktemp("killed")
    code = f"""
import os
from pathlib import Path
from tests.daemon.storage.test_database_watch import Written
written = Written(Path({str(folder)!r}))
for _ in range(50):
    written.write()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    return folder


@pytest.fixture
def killed(killed_line: Path, tmp_path: Path) -> Path:
    """Its database, in a folder of the test's own."""
    shutil.copytree(killed_line, tmp_path, dirs_exist_ok=True)
    return tmp_path / "rows.db"


def rows_of(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [n for (n,) in database.execute("SELECT n FROM t ORDER BY n")]


@pytest.mark.parametrize("gone", [("",), SUFFIXES])
@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_stop_copies_what_a_line_wrote_before_and_after_its_database_lost_its_name(
    written: Written, gone: tuple[str, ...], how: str
) -> None:
    written.write()
    for suffix in gone:
        file = written.path.with_name(f"rows.db{suffix}")
        file.unlink() if how == "deleted" else file.rename(f"{file}.old")
    written.write()
    assert "stop the daemon in order, which makes a copy" in (written.files.problem() or "")
    written.end()
    assert written.told, "a long copy has the service manager's patience"
    with closing(sqlite3.connect(f"file:{written.path}?mode=ro", uri=True)) as reader:
        assert reader.execute("SELECT n FROM t ORDER BY n").fetchall() == [(0,), (1,)]
    DatabaseFiles(written.path).put_foreign_log_aside()
    left = {path.name for path in written.path.parent.iterdir() if path.suffix != ".old"}
    assert left == {"rows.db", "rows.db.id"}, "one complete file, with nothing beside it that a start puts aside"
    assert rows_of(written.path) == [0, 1]


def test_a_database_that_is_moved_back_is_well_again(written: Written) -> None:
    written.path.rename(written.path.with_name("moved"))
    assert written.files.problem()
    written.path.with_name("moved").rename(written.path)
    assert written.files.problem() is None
    written.write()
    written.end()
    assert rows_of(written.path) == [0]


def test_another_file_in_the_databases_place_is_not_touched_and_what_the_line_wrote_is_kept(written: Written) -> None:
    written.write()
    written.path.unlink()
    with closing(sqlite3.connect(written.path.with_name("other"))) as other, other:
        other.execute("CREATE TABLE t (n)")
    written.path.with_name("other").rename(written.path)
    assert "replaced under the running line" in (written.files.problem() or "")
    written.end()
    DatabaseFiles(written.path).put_foreign_log_aside()
    (saved,) = written.path.parent.glob("rows.db.saved-*Z")
    assert (rows_of(written.path), rows_of(saved)) == ([], [0])


@pytest.mark.parametrize("gone", ["-wal", "-shm"])
def test_a_log_that_is_deleted_is_a_problem_and_costs_nothing(written: Written, gone: str) -> None:
    written.write()
    written.path.with_name(f"rows.db{gone}").unlink()
    assert f"rows.db{gone} was deleted, moved or replaced" in (written.files.problem() or "")
    written.write()
    written.end()
    DatabaseFiles(written.path).put_foreign_log_aside()
    assert rows_of(written.path) == [0, 1]


def test_a_log_whose_database_is_gone_is_not_read_into_a_new_one(killed: Path) -> None:
    killed.unlink()
    DatabaseFiles(killed).put_foreign_log_aside()
    assert not [path for path in killed.parent.glob("rows.db*") if ".aside-" not in path.name and path.suffix != ".id"]
    with closing(sqlite3.connect(killed)) as database:
        assert database.execute("SELECT * FROM sqlite_master").fetchall() == []


def test_rows_that_another_program_wrote_between_a_kill_and_the_next_start_stay(killed: Path) -> None:
    assert rows_of(killed) == list(range(50))  # SQLite writes the log back and deletes it
    with closing(sqlite3.connect(killed)) as database, database:
        database.execute("INSERT INTO t VALUES (50)")
    DatabaseFiles(killed).put_foreign_log_aside()
    assert rows_of(killed) == list(range(51))


@pytest.mark.promise(
    "Nothing accepted is lost",
    "A start never combines a log with a database that it does not belong to",
)
@pytest.mark.parametrize("log", ["left", "removed"])
@pytest.mark.parametrize("made", ["by coserve", "by another program"])
def test_a_backup_that_was_copied_over_the_database_of_a_killed_line_is_taken_as_it_is(
    killed: Path, tmp_path: Path, made: str, log: str
) -> None:
    backup = tmp_path / "backup.db"
    if made == "by coserve":
        copy_database(killed, backup)
    with closing(sqlite3.connect(backup)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS t (n)")
        database.execute("DELETE FROM t")
        database.execute("CREATE TABLE other (text)")
        database.executemany("INSERT INTO other VALUES (?)", [("x" * 3000,)] * 20)
    os.utime(backup, (0, 0))
    if log == "removed":
        for suffix in SUFFIXES[1:]:
            killed.with_name(f"rows.db{suffix}").unlink()
    shutil.copyfile(backup, killed)
    DatabaseFiles(killed).put_foreign_log_aside()
    assert rows_of(killed) == []
    assert len(list(killed.parent.glob("rows.db-wal.aside-*"))) == (log == "left")


@pytest.mark.test_all
def test_a_database_of_before_the_last_start_is_not_combined_with_a_later_log(killed: Path, tmp_path: Path) -> None:
    before = tmp_path / "before.db"
    rows_of(killed)
    shutil.copy2(killed, before)
    subprocess.run([sys.executable, "-c", _GO_ON, str(killed)], cwd=ROOT, check=True)
    shutil.copyfile(before, killed)
    DatabaseFiles(killed).put_foreign_log_aside()
    assert rows_of(killed) == list(range(50))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_copy_of_the_same_run_is_not_combined_with_a_log_that_lacks_what_was_between(
    tmp_path: Path, is_damaged: bool
) -> None:
    """A database that is damaged without its log, too, keeps it for its repair."""
    subprocess.run([sys.executable, "-c", _OUTGROW_A_COPY, str(tmp_path)], cwd=ROOT, check=True)
    database = tmp_path / "rows.db"
    content = bytearray((tmp_path / "copy.db").read_bytes())
    if is_damaged:
        content[8192:12288] = bytes(4096)
    database.write_bytes(content)
    DatabaseFiles(database).put_foreign_log_aside()
    aside = list(tmp_path.glob("rows.db-wal.aside-*"))
    assert len(aside) == (not is_damaged)
    if aside:
        assert rows_of(database) == list(range(3000))


def test_the_log_of_a_killed_line_is_read_whatever_became_of_the_note_of_its_number(killed: Path) -> None:
    killed.with_name("rows.db.id").unlink()
    DatabaseFiles(killed).put_foreign_log_aside()
    assert rows_of(killed) == list(range(50))


@pytest.mark.promise(
    "Nothing accepted is lost", "A running line's database is opened with `sqlite3` and closed: its log stays"
)
def test_another_program_that_closes_the_database_takes_no_log_away(written: Written) -> None:
    written.write()
    code = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM t').fetchall(); c.close()"
    subprocess.run([sys.executable, "-c", code, written.path], check=True)
    assert written.files.problem() is None
    written.write()
    written.end()
    assert rows_of(written.path) == [0, 1]
