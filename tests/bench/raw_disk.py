"""The raw group-commit rate of a disk: a plain loop without sockets, checks, hashes or a daemon.

`python -m tests.bench.raw_disk` reads one JSON object (`Loop`) from stdin and prints items per second. Each group is
one pwritev(2) behind the last and one fdatasync(2); with `rows` also one SQLite transaction of bare rows (WAL,
`synchronous=FULL`) before the next group begins.
"""

import json
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

_SEGMENT_BYTES = 256 * 2**20
_ROW = "INSERT INTO item (source, name, segment, offset, length) VALUES (?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop that writes `group` items of `item_bytes` a sync, for `seconds`, in a file under `folder`."""

    folder: str
    item_bytes: int
    group: int
    seconds: float
    rows: bool


def raw_rate(loop: Loop) -> float:
    """Return the items written per second."""
    payload = os.urandom(loop.item_bytes)
    done = 0
    with tempfile.TemporaryDirectory(dir=loop.folder) as scratch, _database(Path(scratch)) as database:
        began_s = time.perf_counter()
        segment, written, fd = 1, 0, _begin(Path(scratch), 1)
        while (now_s := time.perf_counter()) - began_s < loop.seconds:
            at = written
            written += os.pwritev(fd, [payload] * loop.group, written)
            os.fdatasync(fd)
            if loop.rows:
                database.execute("BEGIN IMMEDIATE")
                rows = [("raw", f"{done + n}", segment, at, loop.item_bytes) for n in range(loop.group)]
                database.executemany(_ROW, rows)
                database.execute("COMMIT")
            done += loop.group
            if written >= _SEGMENT_BYTES:
                os.close(fd)
                segment, written = segment + 1, 0
                fd = _begin(Path(scratch), segment)
        os.close(fd)
    return done / (now_s - began_s)


def _begin(folder: Path, segment: int) -> int:
    (folder / f"{segment - 2}").unlink(missing_ok=True)  # as if its images were judged
    return os.open(folder / f"{segment}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


@contextmanager
def _database(folder: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(folder / "raw.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(
            "CREATE TABLE item (id INTEGER PRIMARY KEY, source TEXT, name TEXT, segment INTEGER, offset INTEGER,"
            " length INTEGER, UNIQUE (source, name))"
        )
        yield connection


if __name__ == "__main__":
    print(json.dumps(raw_rate(Loop(**json.loads(sys.stdin.read())))))
