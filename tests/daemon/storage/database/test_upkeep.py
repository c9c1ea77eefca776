"""The database file over months: its log restarts, free pages go back, statistics are kept, and nothing waits."""

import sqlite3
from contextlib import closing

import pytest

from daemon.storage.database import upkeep
from daemon.storage.database.upkeep import Checkpoints, WriteAheadLog
from tests.daemon.storage.database.store_parts import a_verdict, an_image


@pytest.fixture
def line(line):
    upkeep.run(line.store.engine, upkeep.NO_CHECKPOINTS)
    return line


@pytest.fixture
def checkpoints(line):
    with closing(Checkpoints(line.url)) as checkpoints:
        yield checkpoints


def fill(line, images: int, prefix: str = "i") -> None:
    """Write until the log is longer than what is left to the writer."""
    for start in range(0, images, 100):
        images = [an_image(f"{prefix}{start + n}", type="loose", serial=f"S{start}") for n in range(100)]
        line.judge(*(a_verdict(image) for image in line.accept(*images)))


def add_junk(connection: sqlite3.Connection) -> None:
    """Twenty megabytes."""
    connection.execute("CREATE TABLE junk (bytes BLOB)")
    numbers = "WITH n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000)"
    connection.execute(f"{numbers} INSERT INTO junk SELECT zeroblob(4000) FROM n")  # noqa: S608 - our own text


def test_commits_leave_the_log_alone_and_a_checkpoint_beside_them_empties_it(line, checkpoints):
    fill(line, 3000)
    log = checkpoints.checkpoint()
    assert log.pages == log.done > 1000
    assert log.is_nearly_done
    upkeep.run(line.store.engine, upkeep.FINISH_CHECKPOINT)
    fill(line, 100, "next")
    assert checkpoints.checkpoint().pages < log.pages  # it restarted


@pytest.mark.promise(
    "A full disk, and years of results",
    "The write-ahead log shrinks again, and free pages return to the disk in steps while others write",
)
def test_the_log_file_shrinks_after_it_was_long(line, checkpoints):
    with closing(sqlite3.connect(line.folder / "inspection.db", isolation_level=None)) as writer:
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        add_junk(writer)
    long = checkpoints.checkpoint().file_bytes
    upkeep.run(line.store.engine, upkeep.FINISH_CHECKPOINT)
    fill(line, 100, "next")
    assert checkpoints.checkpoint().file_bytes <= 16 * 2**20 < long


def test_a_reader_that_stays_is_told_from_a_log_that_is_merely_long(line, checkpoints):
    with closing(sqlite3.connect(line.folder / "inspection.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM inspections").fetchone()
        fill(line, 2000)
        log = checkpoints.checkpoint()
        assert log.done < log.pages
        assert not log.is_nearly_done
    assert not log.is_held
    assert WriteAheadLog(pages=200_000, done=10, file_bytes=800 * 2**20).is_held
    log = checkpoints.checkpoint()
    assert log.pages == log.done


def test_free_pages_go_back_in_steps_while_others_write(line, checkpoints):
    with closing(sqlite3.connect(line.folder / "inspection.db", isolation_level=None)) as writer:
        add_junk(writer)
        assert not checkpoints.vacuum_is_due()
        writer.execute("DELETE FROM junk")
        assert checkpoints.vacuum_is_due()
        (before,) = writer.execute("PRAGMA page_count").fetchone()
        (free,) = writer.execute("PRAGMA freelist_count").fetchone()
        upkeep.run(line.store.engine, upkeep.VACUUM_STEP)
        assert writer.execute("PRAGMA freelist_count").fetchone() == (free - 32,)
        steps = 0
        while checkpoints.vacuum_is_due():
            upkeep.run(line.store.engine, upkeep.VACUUM_STEP)
            line.accept(an_image(f"step{steps}", type="loose"))
            steps += 1
        (after,) = writer.execute("PRAGMA page_count").fetchone()
    assert steps > 3
    assert after < before
