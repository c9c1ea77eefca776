"""Upkeep of the database file while the line runs: write-ahead log, free pages, statistics, copies, and its check.

Long work runs on a separate connection beside the writer, which itself takes only steps of milliseconds.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Engine, exists, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from daemon.storage.database.connections import FILE_MODE, StoreError, open_for_reading, sqlite_path
from daemon.storage.database.schema import inspections, pending, stream_position
from daemon.units import size_text
from experts.durable import replacing

#: A log restarts when it has this many pages: 4 MiB.
_LOG_PAGES = 1000
#: A log with this many pages that cannot be copied is held by a reader that does not end: 400 MiB.
_HELD_PAGES = 100_000
#: A remainder for the writer after a checkpoint beside it: a few milliseconds.
_REST_PAGES = 500
#: The log's file shrinks to this when it restarts; it keeps some room for a disk that is full.
_LOG_FILE_BYTES = 16 * 2**20
_LOG_PART_BYTES = 2**20
#: Without auto-checkpoint: a commit could stall copying a long log that a reader had held.
NO_CHECKPOINTS = f"PRAGMA wal_autocheckpoint = 0; PRAGMA journal_size_limit = {_LOG_FILE_BYTES:d}"
#: Copies the last pages in the writer's thread, where none can be added, so that the next commit restarts the log.
FINISH_CHECKPOINT = "PRAGMA wal_checkpoint(PASSIVE)"
VACUUM_STEP = "PRAGMA incremental_vacuum(32)"
#: Gives all free pages back: for a database that is not in use.
VACUUM = "PRAGMA incremental_vacuum"
#: Free pages are used again by new rows: a file is made smaller only where a good part of it is free.
_FREE_SHARE = 8
_FREE_PAGES = 4096
#: Samples 400 rows of an index: enough for the planner, milliseconds for the writer.
OPTIMIZE = "PRAGMA analysis_limit = 400; PRAGMA optimize"
#: Pages of one step of a copy: 1 MiB at SQLite's usual 4 KiB, so that progress is reported often.
_COPY_PAGES = 256
_BUSY_TIMEOUT_S = 10.0
#: Place of two bytes in a database file's header that name its journal: 1 for a rollback journal, 2 for a log (WAL).
_FORMAT_VERSIONS_AT = 18
#: Bytes of a database file's header for a number of the program's own: it tells to which file a log belongs.
APPLICATION_ID = slice(68, 72)
_MAX_EXAMPLES = 10
_CHECKED_ROWS = 1000
#: Gaps in the numbers of the stream: the last before each, and the first after it.
_GAPS = """
SELECT seq, next FROM (SELECT seq, lead(seq) OVER (ORDER BY seq) AS next FROM stream) AS pairs
WHERE next <> seq + 1 LIMIT 3
"""


@dataclass(frozen=True, slots=True)
class WriteAheadLog:
    """The log after a checkpoint: its pages, and how many of them are in the database file."""

    pages: int
    done: int
    file_bytes: int

    @property
    def is_nearly_done(self) -> bool:
        return self.pages >= _LOG_PAGES and self.pages - self.done <= _REST_PAGES

    @property
    def is_held(self) -> bool:
        """True if a long query keeps the log from restarting: it grows for as long as that lasts."""
        return self.pages - self.done > _HELD_PAGES


class Checkpoints:
    """Checkpoints on a separate connection, from one thread: commits continue meanwhile."""

    def __init__(self, url: str) -> None:
        self._path = sqlite_path(url)
        try:
            name = f"file:{quote(str(self._path))}?mode=rw"
            self._connection = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise StoreError(f"cannot open {self._path} for its upkeep: {error}") from error

    def close(self) -> None:
        self._connection.close()

    def checkpoint(self) -> WriteAheadLog:
        """Copy the pages that no reader holds into the database file; OSError or sqlite3.Error if that fails."""
        _, pages, done = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return WriteAheadLog(max(0, pages), max(0, done), _size(_log_file(self._path)) or 0)

    def vacuum_is_due(self) -> bool:
        (free_pages,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        return free_pages > _FREE_PAGES and free_pages * _FREE_SHARE > pages


def write_log_again(engine: Engine) -> None:
    """Write the log's bytes once more, and sync them; OSError or SQLAlchemyError if that fails.

    After a failed sync the kernel treats the bytes as written. A restart then finds commits that a power cut would undo
    in the log, but not in the database file, if they were copied there.
    """
    with engine.begin(), _log_file(sqlite_path(engine.url)).open("r+b") as log:  # nothing else writes meanwhile
        while part := log.read(_LOG_PART_BYTES):
            log.seek(-len(part), os.SEEK_CUR)
            log.write(part)
        log.flush()
        os.fdatasync(log.fileno())


def run(engine: Engine, statements: str) -> None:
    """Run statements outside of a transaction. As a script: `execute` stops `incremental_vacuum` after one page."""
    connection = engine.raw_connection()
    try:
        with closing(connection.cursor()) as cursor:
            cursor.executescript(statements)  # type: ignore[attr-defined]  # sqlite3.Cursor
    finally:
        connection.close()


def _log_file(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def copy_database(
    path: Path,
    target: Path,
    *,
    at_snapshot: Callable[[sqlite3.Connection], None] = lambda _: None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Copy the present state of `path` to `target`, complete and durable or not at all; StoreError says why not.

    A read transaction stays open meanwhile: other writes neither wait for it nor force it to start again. `at_snapshot`
    gets the connection that sees the state, before anything is copied; `on_progress` gets the bytes done and all bytes.
    """
    try:
        with closing(_connect(f"file:{quote(str(path))}?mode=ro")) as source:
            source.execute("BEGIN")
            source.execute("SELECT count(*) FROM sqlite_master").fetchone()  # only a read takes the snapshot
            at_snapshot(source)
            copy_connection(source, target, on_progress)
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"cannot copy {path} to {target}: {error}; see to its disk and try again") from error


def copy_connection(
    source: sqlite3.Connection, target: Path, on_progress: Callable[[int, int], None] = lambda _done, _total: None
) -> None:
    """Copy what `source` sees as `copy_database` does; a thread that writes over `source` goes on meanwhile.

    Raises sqlite3.Error or OSError.
    """
    with replacing(target, FILE_MODE) as part:
        try:
            (page_bytes,) = source.execute("PRAGMA page_size").fetchone()
            with closing(_connect(f"file:{quote(str(part))}")) as copy:
                copy.execute("PRAGMA synchronous = OFF")  # synced once, at the end

                def step(_status: int, left: int, total: int) -> None:
                    on_progress((total - left) * page_bytes, total * page_bytes)

                source.backup(copy, pages=_COPY_PAGES, progress=step, sleep=0.01)
            with part.open("r+b") as file:
                file.seek(_FORMAT_VERSIONS_AT)
                file.write(b"\1\1")  # without a log, so that a reader makes no files beside the copy
                file.seek(APPLICATION_ID.start)
                file.write(bytes(4))  # a log of the source does not belong to the copy
        finally:
            part.with_name(part.name + "-journal").unlink(missing_ok=True)


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_TIMEOUT_S)


def database_bytes(path: Path) -> int:
    return (_size(path) or 0) + (_size(_log_file(path)) or 0)


def room_problem(folder: Path, needed_bytes: int, what: str) -> str | None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes >= needed_bytes:
        return None
    return f"{what} needs {size_text(needed_bytes)} in {folder}, and {size_text(free_bytes)} are free: make room"


@dataclass(frozen=True, slots=True)
class CopyState:
    """The state in a copy: its schema, the last `seq`, and the numbers of images without verdict and of kept ones."""

    schema: str
    last_seq: int
    waiting: int
    kept: int


def schema_text(number: int) -> str:
    """Return the release of a `PRAGMA user_version`: 1002003 is 1.2.3."""
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def _open_copy(path: Path) -> sqlite3.Connection:
    """Open a copy that nobody writes to, without the files beside it that a full disk has no room for."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)


def state_of(path: Path) -> CopyState:
    """Read the state of a copy, which is not in use; StoreError if it is not one of our databases."""
    try:
        with closing(_open_copy(path)) as database:
            (number,) = database.execute("PRAGMA user_version").fetchone()
            position = database.execute("SELECT last_seq FROM stream_position").fetchone()
            (waiting,) = database.execute("SELECT count(*) FROM pending WHERE task = 'judge'").fetchone()
            (kept,) = database.execute("SELECT count(image_path) FROM inspections").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise StoreError(f"{path} is not a results database of CoServe: {error}") from error
    return CopyState(schema_text(number), position[0] if position else 0, waiting, kept)


def kept_images(path: Path) -> list[str]:
    with closing(_open_copy(path)) as database:
        kept = "SELECT image_path FROM inspections WHERE image_path IS NOT NULL ORDER BY inspection_id"
        return [image_path for (image_path,) in database.execute(kept)]


def segments_needed(connection: sqlite3.Connection) -> dict[int, int]:
    """Return the journal segments with bytes of unfinished images, and how many bytes of each from its beginning."""
    needed = 'SELECT segment, max("offset" + length) FROM pending GROUP BY segment ORDER BY segment'
    return dict(connection.execute(needed).fetchall())


def check_database(url: str, images: Path, journal: Path, on_step: Callable[[str], None] = lambda _: None) -> list[str]:
    """Check rows and the files they name, even while a line runs; return problems. StoreError without a database."""
    engine = open_for_reading(url)
    steps: dict[str, Callable[[], Iterator[str]]] = {
        "pages and indexes": lambda: _check_pages(engine),
        "references between tables": lambda: _check_references(engine),
        "numbers of results": lambda: _check_numbers(engine),
        "images without verdict": lambda: _check_unfinished(engine, journal),
        "files of kept images": lambda: _check_files(engine, images),
    }
    problems: list[str] = []
    try:
        for name, step in steps.items():
            on_step(name)
            try:
                problems += step()
            except SQLAlchemyError as error:  # the next step may read what this one cannot
                problems.append(f"{name}: cannot be read: {getattr(error, 'orig', error)}")
    finally:
        engine.dispose()
    return problems


def _check_pages(engine: Engine) -> Iterator[str]:
    with engine.connect() as connection:
        problems = connection.execute(text(f"PRAGMA integrity_check({_MAX_EXAMPLES:d})")).scalars().all()
    yield from (f"the file is damaged: {problem}" for problem in problems if problem != "ok")


def _check_references(engine: Engine) -> Iterator[str]:
    with engine.connect() as connection:
        broken = connection.execute(text("PRAGMA foreign_key_check")).fetchmany(_MAX_EXAMPLES)
    for table, row, parent, _ in broken:
        yield f"row {row} of {table} names a row of {parent} that is not there"


def _check_numbers(engine: Engine) -> Iterator[str]:
    with engine.connect() as connection:
        count, distinct, last = connection.execute(
            text("SELECT count(*), count(DISTINCT seq), coalesce(max(seq), 0) FROM stream")
        ).one()
        position = connection.execute(select(stream_position.c.last_seq, stream_position.c.pruned)).first()
        given, pruned = position or (0, 0)
        if distinct != count:
            yield f"{count - distinct} results have a seq that another one has"
        if last > given:
            yield f"seq {last} is in use, but only {given} were given out"
        if distinct + pruned != given:
            gaps = ", ".join(f"{seq} to {after}" for seq, after in connection.execute(text(_GAPS)))
            yield (
                f"{given} results were given a seq, {distinct} are there and {pruned} were pruned:"
                f" {abs(given - distinct - pruned)} are {'missing' if given > distinct + pruned else 'too many'}"
                f"{f'; gaps: {gaps}' if gaps else ''}"
            )


def _check_unfinished(engine: Engine, journal: Path) -> Iterator[str]:
    table, segment = inspections.c, pending.c.segment
    lost = select(table.inspection_id).where(
        table.status == "accepted", ~exists().where(pending.c.inspection_id == table.inspection_id)
    )
    needed = select(segment, func.max(pending.c.offset + pending.c.length), func.count()).group_by(segment)
    with engine.connect() as connection:
        ids = connection.execute(lost.limit(_MAX_EXAMPLES)).scalars().all()
        segments = connection.execute(needed).all()
    if ids:
        listed = ", ".join(map(str, ids))
        yield f"accepted images have neither a verdict nor bytes in the journal: inspection_id {listed}"
    for number, end, count in segments:
        path = journal / f"segment-{number:08d}.journal"
        size_bytes = _size(path)
        if size_bytes is not None and size_bytes >= end:
            continue
        with engine.connect() as connection:  # its images may have been finished meanwhile
            is_needed = connection.execute(select(segment).where(segment == number).limit(1)).first()
        if is_needed:
            what = "is missing" if size_bytes is None else f"has {size_bytes} of {end} bytes"
            yield f"{path} {what}: {count} images wait in it"


def _check_files(engine: Engine, images: Path) -> Iterator[str]:
    table = inspections.c
    columns = (table.inspection_id, table.image_path, table.image_bytes)
    is_kept = table.image_path.is_not(None)
    examples: list[str] = []
    named = missing = after = 0
    while True:
        query = select(*columns).where(is_kept, table.inspection_id > after)
        with engine.connect() as connection:  # a transaction each: a long one would hold up the write-ahead log
            rows = connection.execute(query.order_by(table.inspection_id).limit(_CHECKED_ROWS)).all()
        if not rows:
            break
        named += len(rows)
        after = rows[-1].inspection_id
        lost = {number: path for number, path, size in rows if (_size(images.parent / path) or -1) < size}
        if lost:
            with engine.connect() as connection:  # an image may have been pruned meanwhile
                still = connection.execute(select(table.inspection_id).where(is_kept, table.inspection_id.in_(lost)))
                paths = [lost[number] for number in still.scalars()]
            missing += len(paths)
            examples += paths[: _MAX_EXAMPLES - len(examples)]
    if missing and missing == named and not any(path.is_file() for path in images.rglob("*")):
        yield f"{images} has none of the {named} kept images: the line was restored without them, or they were deleted"
    elif missing:
        yield f"{missing} kept images have no file, or one that is too short: {', '.join(examples)}"
