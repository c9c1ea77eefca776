"""The epoch that names a history of results: a database that was put back gets a new one, however it came back."""

import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from daemon.storage.database.store import EpochRecord
from tests import ROOT
from tests.daemon.storage.database.store_parts import a_line

pytestmark = pytest.mark.not_fast("starts processes")

_KILLED = """
import os, sys
from pathlib import Path
from tests.daemon.storage.database.test_epoch import History
History(Path(sys.argv[1])).run(int(sys.argv[2]), at_end=os._exit)
"""


class History:
    """The runs of a line's writer in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "journal").mkdir(parents=True, exist_ok=True)

    def run(self, images: int = 0, *, copy: Path | None = None, at_end=lambda _status: None) -> str:
        """Store `images`, and return the epoch. A `copy` lacks the last of them."""
        line = a_line(self.folder, record=EpochRecord(self.folder / "journal"))
        for number in range(images):
            line.images = time.monotonic_ns()
            if copy is not None and number == images - 1:
                self.back_up(copy)
            line.inspect("R0402", "R1", type="tiny")
        at_end(0)
        line.store.close()
        return line.store.epoch

    def run_and_kill(self, images: int) -> None:
        subprocess.run([sys.executable, "-c", _KILLED, self.folder, str(images)], cwd=ROOT, check=True)

    def back_up(self, target: Path) -> Path:
        """Copy the database as `coserve db backup` does."""
        database = self.folder / "inspection.db"
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
        return target

    def put_back(self, copy: Path) -> None:
        for file in self.folder.glob("inspection.db-*"):
            file.unlink()
        shutil.copyfile(copy, self.folder / "inspection.db")


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "line")


def test_kills_and_restarts_keep_the_epoch(history: History) -> None:
    first = history.run(1)
    history.run_and_kill(3)
    assert history.run(1) == first
    assert history.run() == first


@pytest.mark.promise(
    "Upgrades, ways back, backups",
    "A restored database gets a new epoch, whether by `restore`, by a copy over it, with its journal, or by "
    "another one in its place; a kill, a restart, a clock that goes back or a copy of the same age keeps the "
    "epoch",
)
def test_an_older_copy_of_the_database_gets_a_new_epoch(history: History, tmp_path: Path) -> None:
    first = history.run(4, copy=tmp_path / "older.db")
    history.put_back(tmp_path / "older.db")
    second = history.run()
    assert second != first
    with closing(sqlite3.connect(history.folder / "inspection.db")) as database:
        (row,) = database.execute("SELECT subject, old, new, note FROM changes WHERE what = 'restore'").fetchall()
    assert row[:3] == ("database", first, second)
    assert "older copy" in row[3]
    assert history.run() == second


def test_a_kill_before_an_older_copy_is_put_back_hides_nothing(history: History, tmp_path: Path) -> None:
    first = history.run(2)
    history.back_up(tmp_path / "older.db")
    history.run_and_kill(1)
    history.put_back(tmp_path / "older.db")
    assert history.run() != first


def test_a_copy_of_the_same_age_keeps_the_epoch(history: History, tmp_path: Path) -> None:
    first = history.run(2)
    history.put_back(history.back_up(tmp_path / "same.db"))
    assert history.run() == first


def test_database_and_journal_that_are_put_back_together_get_a_new_epoch(history: History, tmp_path: Path) -> None:
    first = history.run(2)
    subprocess.run(["cp", "-a", history.folder, tmp_path / "copy"], check=True)
    history.run(2)
    time.sleep(1.1)  # the seal's time has whole seconds
    subprocess.run(["cp", "-a", f"{tmp_path}/copy/.", history.folder], check=True)
    assert history.run() != first


def test_a_new_journal_and_another_database_get_a_new_epoch(history: History, tmp_path: Path) -> None:
    first = history.run()
    shutil.rmtree(history.folder / "journal")
    second = History(history.folder).run()
    assert second != first
    other = History(tmp_path / "other")
    theirs = other.run()
    history.put_back(other.folder / "inspection.db")
    assert history.run() not in (first, second, theirs)
