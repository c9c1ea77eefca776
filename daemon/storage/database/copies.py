"""Copies of the results database while it is in use: one state of it, whatever is written meanwhile."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from daemon.storage.database.connections import FILE_MODE, StoreError
from daemon.units import size_text
from experts.durable import replacing

#: Pages of one step: 1 MiB at SQLite's usual 4 KiB, so that progress is told often.
_STEP_PAGES = 256
_BUSY_TIMEOUT_S = 10.0


def copy_database(
    path: Path,
    target: Path,
    *,
    at_snapshot: Callable[[sqlite3.Connection], None] = lambda _: None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Copy the state that `path` has now to `target`, complete and durable or not at all; StoreError says why not.

    A read transaction stays open for as long as it lasts: other writes neither wait for it nor make it begin anew.
    `at_snapshot` gets the connection that sees the state, before anything is copied; `on_progress` bytes done and all.
    """
    try:
        with replacing(target, FILE_MODE) as part:
            try:
                _copy(path, part, at_snapshot, on_progress)
            finally:
                part.with_name(part.name + "-journal").unlink(missing_ok=True)
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"cannot copy {path} to {target}: {error}; see to its disk and try again") from error


def database_bytes(path: Path) -> int:
    """How large a copy of `path` can become: its file and what its write-ahead log may add."""
    files = (path, path.with_name(path.name + "-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


@dataclass(frozen=True, slots=True)
class State:
    """What a copy holds: its schema, the last `seq`, and how many images have no verdict."""

    schema: str
    last_seq: int
    waiting: int


def state_of(path: Path) -> State:
    """Look into a copy, which nobody else uses; StoreError where it is none of our databases."""
    try:
        with closing(sqlite3.connect(path)) as database:
            (schema,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
            position = database.execute("SELECT last_seq FROM stream_position").fetchone()
            (waiting,) = database.execute("SELECT count(*) FROM pending WHERE task = 'judge'").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise StoreError(f"{path} is no results database of CoServe: {error}") from error
    return State(schema, position[0] if position else 0, waiting)


def kept_images(path: Path) -> list[str]:
    """The `image_path` of every image that the rows of a copy name."""
    with closing(sqlite3.connect(path)) as database:
        kept = "SELECT image_path FROM inspections WHERE image_path IS NOT NULL ORDER BY inspection_id"
        return [image_path for (image_path,) in database.execute(kept)]


def segments_needed(connection: sqlite3.Connection) -> dict[int, int]:
    """Journal segments that hold bytes of unfinished images, and how many bytes of each from its beginning."""
    needed = 'SELECT segment, max("offset" + length) FROM pending GROUP BY segment ORDER BY segment'
    return dict(connection.execute(needed).fetchall())


def room_problem(folder: Path, needed_bytes: int, what: str) -> str | None:
    """Why `what` does not fit on the disk of `folder`, with both figures; None where it does."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes >= needed_bytes:
        return None
    return f"{what} needs {size_text(needed_bytes)} in {folder}, and {size_text(free_bytes)} are free: make room"


def _copy(
    path: Path,
    part: Path,
    at_snapshot: Callable[[sqlite3.Connection], None],
    on_progress: Callable[[int, int], None],
) -> None:
    with closing(_connect(f"file:{quote(str(path))}?mode=ro")) as source:
        (page_bytes,) = source.execute("PRAGMA page_size").fetchone()
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM sqlite_master").fetchone()  # only a read takes the snapshot
        at_snapshot(source)
        with closing(_connect(f"file:{quote(str(part))}")) as copy:
            copy.execute("PRAGMA synchronous = OFF")  # synced once, at the end

            def step(_status: int, left: int, total: int) -> None:
                on_progress((total - left) * page_bytes, total * page_bytes)

            source.backup(copy, pages=_STEP_PAGES, progress=step)


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_TIMEOUT_S)
