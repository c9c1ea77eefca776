"""Files that must be whole after a power cut, written by small processes under the shim."""

import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import takewhile
from pathlib import Path

import pytest

from daemon.config.settings import load_config
from daemon.delivery.position import DeliveryPosition, PositionFile
from daemon.line.line import served_by
from daemon.records import JournalKey
from daemon.storage.journal import Journal, JournalError
from tests.faults.powercut import Disk, Unsynced
from tests.faults.shim import read_log, shim_environment
from tests.tools.backup.test_backup import a_folder
from tools.backup.archive import write_backup

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc")


def after_a_power_cut(tmp_path: Path, code: str, unsynced: Unsynced = "nothing", plan: tuple[str, ...] = ()) -> Path:
    """Run `code` in a process that loses its power at the end; return the folder as it is left."""
    folder, log = tmp_path / "disk", tmp_path / "calls"
    folder.mkdir(exist_ok=True)
    disk = Disk(folder)
    environ = shim_environment(plan, log, keep_bytes_of=folder)
    subprocess.run(
        [sys.executable, "-c", "import os\n" + code], cwd=folder, env=environ, check=False, capture_output=True
    )
    disk.replay(read_log(log), log)
    disk.cut(unsynced, random.Random(1))
    return folder


@pytest.mark.promise("Nothing accepted is lost", "These tests detect a line that omits a sync")
def test_a_line_that_forgot_its_sync_would_be_found_out(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from daemon.storage.journal import Journal
if {forgetful}: os.fdatasync = lambda fd: None
key, = Journal(Path('journal')).append([b'an image'])
Path('../key').write_text(f'{{key.segment}} {{key.offset}} {{key.length}}')
"""
    for forgetful in (False, True):
        place = tmp_path / str(forgetful)
        place.mkdir()
        folder = after_a_power_cut(place, code.format(forgetful=forgetful))
        key = JournalKey(*map(int, (place / "key").read_text().split()))
        journal = Journal(folder / "journal")
        if forgetful:
            with pytest.raises(JournalError, match="cut"):
                journal.read(key)
        else:
            assert journal.read(key) == b"an image"
        journal.close()


@pytest.mark.parametrize(
    ("kill", "content"),
    [
        ("write@.a.part:kill-before", b"old"),
        ("sync@.a.part:kill-before", b"old"),
        ("rename:kill-before", b"old"),
        ("rename:kill-after", b"old"),
        ("sync@disk$:kill-after", b"new content"),
    ],
)
@pytest.mark.parametrize("unsynced", ["nothing", "some", "garbage"])
def test_a_file_that_was_replaced_durably_is_the_old_one_or_the_whole_new_one(
    tmp_path: Path, kill: str, content: bytes, unsynced: Unsynced
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "a").write_bytes(b"old")
    code = """
from pathlib import Path
from experts.durable import replace_durably
replace_durably(Path('a'), 'new content')
"""
    folder = after_a_power_cut(tmp_path, code, unsynced, plan=(kill,))
    bytes_left = (folder / "a").read_bytes()
    may_be_new = unsynced != "nothing" and kill == "rename:kill-after"
    assert bytes_left == content or (may_be_new and bytes_left == b"new content")


def test_a_consumer_s_position_outlives_a_power_cut(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from daemon.delivery.position import DeliveryPosition, PositionFile
file = PositionFile(Path('consumers'), 'plant')
file.save(DeliveryPosition(8)); file.save(DeliveryPosition(9))
"""
    folder = after_a_power_cut(tmp_path, code)
    assert PositionFile(folder / "consumers", "plant").load() == DeliveryPosition(9)
    assert "disk" in synced_folders(tmp_path)


@pytest.mark.promise(
    "Nothing accepted is lost",
    "The folders made at the first start are durable before the first image is, and so is a consumer's position",
)
@pytest.mark.parametrize("first", ["exclusive_lock(folder / 'lock', '', folder).__enter__()", "pass"])
def test_the_folders_that_a_first_start_makes_are_durable_before_its_first_image_is(tmp_path: Path, first: str) -> None:
    """The lock makes the journal's folder in a daemon; a journal alone makes it itself."""
    code = f"""
from pathlib import Path
from daemon.host.folders import exclusive_lock
from daemon.storage.journal import Journal
folder = Path('data/line/journal')
{first}
Journal(folder).append([b'an image'])
"""
    after_a_power_cut(tmp_path, code)
    assert synced_folders(tmp_path) >= {"disk", "disk/data", "disk/data/line", "disk/data/line/journal"}


@pytest.mark.promise(
    "Nothing accepted is lost",
    "So are the folders of a journal that is made anew while the line runs, a database that a stop copied, a "
    "restored line and a package of results",
)
def test_the_folders_of_a_journal_that_is_made_anew_under_a_running_line_are_durable(tmp_path: Path) -> None:
    code = """
import shutil
from pathlib import Path
from daemon.storage.journal import Journal
journal = Journal(Path('data/line/journal'), segment_bytes=1)
journal.append([b'before'])
shutil.rmtree('data')
journal.append([b'an image'])
"""
    folder = after_a_power_cut(tmp_path, code)
    assert [path.read_bytes()[-8:] for path in (folder / "data/line/journal").iterdir()] == [b"an image"]


def test_a_database_that_a_stop_copied_has_its_name_after_a_power_cut(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with closing(sqlite3.connect(tmp_path / "disk" / "rows.db", isolation_level=None)) as db:
        db.execute("CREATE TABLE t (n)")
    code = """
from pathlib import Path
from daemon.storage.database.connections import open_for_writing
from daemon.storage.database_watch import DatabaseFiles
files = DatabaseFiles(Path('rows.db'))
files.note(open_for_writing('sqlite:///rows.db', 2000))
os.unlink('rows.db')
files.copy_if_lost()
"""
    with closing(sqlite3.connect(after_a_power_cut(tmp_path, code) / "rows.db")) as database:
        assert database.execute("SELECT * FROM t").fetchall() == []


def test_a_restored_line_is_whole_after_a_power_cut(tmp_path: Path) -> None:
    line, archive = tmp_path / "line", tmp_path / "line.tar"
    a_folder(line)
    write_backup(line / "coserve.yaml", archive)
    code = f"""
from pathlib import Path
from tools.backup.restore import unpack
unpack(Path({str(archive)!r}), Path('new'))
"""
    folder = after_a_power_cut(tmp_path, code) / ".new.part"  # the replay does not follow a renamed folder
    edition, before = (
        served_by(load_config(folder / "coserve.yaml", {})),
        served_by(load_config(line / "coserve.yaml", {})),
    )
    assert edition is not None
    assert before is not None
    assert edition.edition.has_content_of(before.edition)
    assert (edition.number, edition.edition.why, edition.edition.note) == (2, "restore", "line.tar")
    assert edition.catalog.headers.keys() == edition.catalog.keys() == before.catalog.keys()
    assert (folder / "rules.yaml").read_bytes() == (line / "rules.yaml").read_bytes()


def synced_folders(tmp_path: Path) -> set[str]:
    """Return the folders that were synced before the first file with bytes to keep."""
    syncs = (call for call in read_log(tmp_path / "calls") if call.call == "sync" and call.result == 0)
    before = takewhile(lambda call: call.function != "fdatasync", syncs)
    return {str(Path(call.path).relative_to(tmp_path)) for call in before}
