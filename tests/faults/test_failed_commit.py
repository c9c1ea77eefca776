"""A commit whose sync fails, on SQLite with the connection that the daemon uses.

It must not be believed, and it must not be disbelieved either: its frames lie in the WAL until the next commit writes
over them, so after a kill the transaction may come true. It was never answered `accepted`; its publisher sends again.
"""

import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from daemon.storage.database.store import Store
from daemon.storage.journal import Journal
from tests import ROOT
from tests.faults.powercut import Disk
from tests.faults.shim import read_log, shim_environment, switch_faults

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc")

PROCESS = """
import os, sys
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from daemon.storage.database.connections import open_for_writing
from tests.faults.shim import switch_faults
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
commit(2)
with engine.connect() as connection:
    print(connection.execute(text('SELECT n FROM t')).scalars().all())
sys.stdout.flush()
os._exit(0)
"""


def rows_after(tmp_path: Path, fault: str, *, power_cut: bool) -> tuple[str, list[int]]:
    """Return the output of the process, and the rows that the next one reads. Row 1's commit was refused."""
    folder, log = tmp_path / "disk", tmp_path / "calls"
    folder.mkdir()
    disk = Disk(folder)
    environ = shim_environment([], log, switch=tmp_path / "switch", keep_bytes_of=folder)
    environ |= {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROCESS % fault]
    output = subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True, text=True).stdout
    assert any(call.action != "-" for call in read_log(log))
    if power_cut:
        disk.replay(read_log(log), log)
        disk.cut("nothing", random.Random(1))
    with closing(sqlite3.connect(folder / "rows.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return output, [n for (n,) in database.execute("SELECT n FROM t ORDER BY n")]


@pytest.mark.promise("Nothing accepted is lost", "A failed commit does not count, and the next one succeeds")
@pytest.mark.parametrize("fault", ["sync@rows.db-wal$:eio", "write@rows.db-wal$:enospc", "write@rows.db-wal$:eio:2"])
@pytest.mark.parametrize("power_cut", [False, True])
def test_after_a_commit_that_failed_the_next_one_stands_and_the_failed_one_does_not(
    tmp_path: Path, fault: str, power_cut: bool
) -> None:
    output, rows = rows_after(tmp_path, fault, power_cut=power_cut)
    assert "1 disk I/O error" in output or "1 database or disk is full" in output
    assert output.endswith("[0, 2]\n")
    assert rows == [0, 2]


LINE = """
import os, sys, threading, time, types, structlog
from pathlib import Path
from tests.daemon.storage.database.store_parts import a_verdict, sent, some_rules
from daemon.storage.journal import Journal
from tests.editions import a_serving
from daemon.storage.database.store import Store
from daemon.storage.writer import Writer
from tests.faults.shim import switch_faults

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
journal = Journal(Path('journal'))
accepted, published = [], threading.Event()
writer = Writer(
    Store('sqlite:///inspection.db', keep=()), journal, a_serving(some_rules()), Path('images'),
)
recovery = writer.recover()
reports = dict(accepted=accepted.extend, published=lambda _: published.set(), done=lambda _: None)
writer.start(types.SimpleNamespace(**reports))
def faults(*plan):
    switch_faults(Path('../switch'), plan)
def send(name, then=lambda: None):
    answered, answers = threading.Event(), []
    def reply(answer):  # in the writer's thread: it does nothing more before `then`
        answers.append(answer), then(), answered.set()
    writer.store_image(*sent(name, payload=name.encode()), reply)
    assert answered.wait(90)
    print(name, type(answers[0]).__name__, flush=True)
def turn():
    writer.run(lambda _: None).result(90)
def wait_for(condition):
    while not condition(): time.sleep(0.01)
"""

#: The first image is judged, so that its segment is held by no row when the second comes into it.
ONE_THAT_IS_JUDGED = """
send('first')
writer.store_verdicts([a_verdict(accepted[0])])
assert published.wait(90)
"""


def line_does(tmp_path: Path, code: str) -> list[str]:
    """Run a writer in `disk/` in a process that does `code` and ends at once; return the lines of its output."""
    folder = tmp_path / "disk"
    folder.mkdir(exist_ok=True)
    switch_faults(tmp_path / "switch", [])
    environ = shim_environment([], tmp_path / "calls", switch=tmp_path / "switch", keep_bytes_of=folder)
    environ |= {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"{LINE}{code}\nsys.stdout.flush(); os._exit(0)"]
    return subprocess.run(
        command, cwd=folder, env=environ, check=True, stdout=subprocess.PIPE, text=True, timeout=200
    ).stdout.splitlines()


def waiting_in(folder: Path) -> dict[str, bytes]:
    """Return images without verdict by their id, with their bytes."""
    store, journal = Store(f"sqlite:///{folder}/inspection.db"), Journal(folder / "journal")
    with closing(store), closing(journal):
        return {image.image_id: journal.read(image.key) for image in store.recover().pending}


@pytest.mark.promise(
    "Nothing accepted is lost",
    "The bytes of an image whose commit failed stay as long as the commit may still become valid; rows found "
    "at the next start survive a power cut",
)
def test_the_bytes_of_an_image_whose_commit_failed_stay_while_it_may_come_true(tmp_path: Path) -> None:
    code = """
faults('sync@inspection.db-wal$:eio')
send('second', then=lambda: faults('write@inspection.db-wal$:eio', 'sync@.journal$:eio'))
send('third'); turn()
"""
    output = line_does(tmp_path, ONE_THAT_IS_JUDGED + code)
    assert output == ["first Image", "second WriteFailed", "third WriteFailed"]
    assert waiting_in(tmp_path / "disk") == {"second": b"second"}
    assert line_does(tmp_path, "send('second')") == ["second Duplicate"]


def test_a_group_that_is_all_duplicates_commits_nothing_and_lets_no_bytes_go(tmp_path: Path) -> None:
    code = """
faults('sync@inspection.db-wal$:eio')
send('second', then=lambda: faults('write@inspection.db-wal$:eio', 'sync@.journal$:eio:1'))
send('third'); send('first'); turn()
"""
    output = line_does(tmp_path, ONE_THAT_IS_JUDGED + code)
    assert output == ["first Image", "second WriteFailed", "third WriteFailed", "first Duplicate"]
    assert waiting_in(tmp_path / "disk") == {"second": b"second"}


def test_a_commit_that_failed_is_written_over_as_soon_as_the_disk_takes_it(tmp_path: Path) -> None:
    code = """
faults('sync@inspection.db-wal$:eio:1', 'sync@.journal$:eio:2')
send('second'); wait_for(lambda: not writer.is_failing)
send('third'); turn()
print(*journal.segments)
"""
    output = line_does(tmp_path, ONE_THAT_IS_JUDGED + code)
    assert output == ["first Image", "second WriteFailed", "third WriteFailed", ""]
    assert waiting_in(tmp_path / "disk") == {}


def test_what_a_start_finds_after_a_commit_that_failed_no_power_cut_takes_back(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    code = """
send('first')
faults('sync@inspection.db-wal$:eio')
writer.store_verdicts([a_verdict(accepted[0])]); wait_for(lambda: writer.is_failing)
"""
    line_does(tmp_path, code)
    (pending,) = line_does(tmp_path, "print(*(image.image_id for image in recovery.pending))")
    disk.replay(read_log(tmp_path / "calls"), tmp_path / "calls")
    disk.cut("nothing", random.Random(1))
    with closing(sqlite3.connect(tmp_path / "disk" / "inspection.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert " ".join(waiting_in(tmp_path / "disk")) == pending
