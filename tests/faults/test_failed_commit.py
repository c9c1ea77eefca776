"""A commit whose sync fails: what SQLite makes of it, with the connection that the daemon uses.

It must not be believed, and it must not be disbelieved either: its frames lie in the WAL until the next commit writes
over them, so after a kill the transaction may come true. Nobody heard `accepted` for it; its publisher sends again.
"""

import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tools.faults.powercut import Disk
from tools.faults.shim import read_log, shim_environment

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc")

PROCESS = """
import os, sys
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from daemon.store.database import open_for_writing
from tools.faults.shim import switch_faults
from pathlib import Path
engine = open_for_writing('sqlite:///rows.db', 2000)
def commit(n):
    try:
        with engine.begin() as connection:
            connection.execute(text('INSERT INTO t VALUES (:n, :filler)'), {'n': n, 'filler': 'x' * 9000 * (3 - n)})
    except OperationalError as error:
        print(n, error.orig)
with engine.begin() as connection:
    connection.execute(text('CREATE TABLE t (n PRIMARY KEY, filler)'))
commit(0)
switch_faults(Path('../switch'), ['%s'])
commit(1)
switch_faults(Path('../switch'), [])
if sys.argv[1] == 'goes on':
    commit(2)
    with engine.connect() as connection:
        print(connection.execute(text('SELECT n FROM t')).scalars().all())
sys.stdout.flush()
os._exit(0)
"""


def rows_after(tmp_path: Path, fault: str, then: str, *, power_cut: bool) -> tuple[str, list[int]]:
    """What the process said, and the rows that the next one finds. Row 1's commit was refused."""
    folder, log = tmp_path / "disk", tmp_path / "calls"
    folder.mkdir()
    disk = Disk(folder)
    environ = shim_environment([], log, switch=tmp_path / "switch", keep_bytes_of=folder)
    command = [sys.executable, "-c", PROCESS % fault, then]
    said = subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True, text=True).stdout
    assert any(call.action != "-" for call in read_log(log))
    if power_cut:
        disk.replay(read_log(log), log)
        disk.cut("nothing", random.Random(1))
    with closing(sqlite3.connect(folder / "rows.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return said, [n for (n,) in database.execute("SELECT n FROM t ORDER BY n")]


@pytest.mark.parametrize(
    "fault",
    ["sync@rows.db-wal$:eio", "write@rows.db-wal$:enospc", "write@rows.db-wal$:eio:2"],
)
@pytest.mark.parametrize("power_cut", [False, True])
def test_after_a_commit_that_failed_the_next_one_stands_and_the_failed_one_does_not(
    tmp_path: Path, fault: str, power_cut: bool
) -> None:
    said, rows = rows_after(tmp_path, fault, "goes on", power_cut=power_cut)
    assert "1 disk I/O error" in said or "1 database or disk is full" in said
    assert said.endswith("[0, 2]\n")
    assert rows == [0, 2]


def test_a_commit_whose_sync_failed_may_come_true_after_a_kill_and_never_after_a_power_cut(tmp_path: Path) -> None:
    for power_cut, rows in ((False, [0, 1]), (True, [0])):
        place = tmp_path / str(power_cut)
        place.mkdir()
        assert rows_after(place, "sync@rows.db-wal$:eio", "ends", power_cut=power_cut)[1] == rows
