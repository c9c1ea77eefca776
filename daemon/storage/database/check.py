"""Whether the database and the files it names are whole: read-only, beside a running line."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sqlalchemy import Engine, exists, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from daemon.storage.database.connections import open_for_reading
from daemon.storage.database.patience import TooLongError, at_most
from daemon.storage.database.schema import inspections, pending, stream_position

_EXAMPLES = 10
_ROWS_AT_ONCE = 1000

#: The numbers behind which the next one that is kept is not the next number.
_GAPS = """
SELECT seq, next FROM (SELECT seq, lead(seq) OVER (ORDER BY seq) AS next FROM stream) AS pairs
WHERE next <> seq + 1 LIMIT 3
"""


def check_database(url: str, images: Path, journal: Path, on_step: Callable[[str], None] = lambda _: None) -> list[str]:
    """Every mistake, one sentence each; StoreError where there is no database."""
    engine = open_for_reading(url)
    problems: list[str] = []
    try:
        for name, step in _STEPS.items():
            on_step(name)
            try:
                problems += step(engine, images, journal)
            except SQLAlchemyError as error:  # the next step may read what this one cannot
                problems.append(f"{name}: cannot be read: {getattr(error, 'orig', error)}")
    finally:
        engine.dispose()
    return problems


def quick_look(url: str, within_s: float) -> tuple[list[str], bool]:
    """Damage that a look of `within_s` finds in the file's pages, and whether it saw all of them."""
    engine = open_for_reading(url)
    try:
        if engine.dialect.name != "sqlite":
            return [], True
        with engine.connect() as connection, at_most(connection, within_s):
            found = connection.execute(text("PRAGMA quick_check(1)")).scalars().all()
        return [str(problem) for problem in found if problem != "ok"], True
    except TooLongError:
        return [], False
    except SQLAlchemyError as error:
        return [str(getattr(error, "orig", error))], True
    finally:
        engine.dispose()


def _pages(engine: Engine, _images: Path, _journal: Path) -> Iterator[str]:
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            found = connection.execute(text(f"PRAGMA integrity_check({_EXAMPLES:d})")).scalars().all()
        yield from (f"the file is damaged: {problem}" for problem in found if problem != "ok")


def _references(engine: Engine, _images: Path, _journal: Path) -> Iterator[str]:
    if engine.dialect.name == "sqlite":
        with engine.connect() as connection:
            found = connection.execute(text("PRAGMA foreign_key_check")).fetchmany(_EXAMPLES)
        for table, row, parent, _ in found:
            yield f"row {row} of {table} names a row of {parent} that is not there"


def _numbers(engine: Engine, _images: Path, _journal: Path) -> Iterator[str]:
    """Each once, and none missing but for those that were pruned."""
    with engine.connect() as connection:
        count, distinct, last = connection.execute(
            text("SELECT count(*), count(DISTINCT seq), coalesce(max(seq), 0) FROM stream")
        ).one()
        given, pruned = connection.execute(select(stream_position.c.last_seq, stream_position.c.pruned)).first() or (
            0,
            0,
        )
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


def _verdicts(engine: Engine, _images: Path, journal: Path) -> Iterator[str]:
    """The bytes of images without verdict are in the journal."""
    table = inspections.c
    lost = select(table.inspection_id).where(
        table.status == "accepted", ~exists().where(pending.c.inspection_id == table.inspection_id)
    )
    needed = select(pending.c.segment, func.max(pending.c.offset + pending.c.length), func.count()).group_by(
        pending.c.segment
    )
    with engine.connect() as connection:
        ids = connection.execute(lost.limit(_EXAMPLES)).scalars().all()
        segments = connection.execute(needed).all()
    if ids:
        yield f"accepted images have neither a verdict nor bytes in the journal: inspection_id {_list(ids)}"
    for segment, end, count in segments:
        path = journal / f"segment-{segment:08d}.journal"
        size_bytes = _size(path)
        if (size_bytes is None or size_bytes < end) and _still_needed(engine, segment):
            what = "is missing" if size_bytes is None else f"has {size_bytes} of {end} bytes"
            yield f"{path} {what}: {count} images wait in it"


def _files(engine: Engine, images: Path, _journal: Path) -> Iterator[str]:
    missing: list[tuple[int, str]] = []
    after = 0
    while rows := _kept(engine, after):
        after = rows[-1][0]
        for inspection_id, path, size_bytes in rows:
            found = _size(images.parent / path)
            if found is None or found < size_bytes:
                missing.append((inspection_id, path))
    # What was pruned while this looked is no mistake.
    with engine.connect() as connection:
        still = [
            (inspection_id, path)
            for inspection_id, path in missing
            if connection.execute(
                select(inspections.c.image_path).where(inspections.c.inspection_id == inspection_id)
            ).scalar()
        ]
    if still:
        examples = _list([path for _, path in still[:_EXAMPLES]])
        yield f"{len(still)} kept images have no file, or one that is too short: {examples}"


def _kept(engine: Engine, after: int) -> list[tuple[int, str, int]]:
    """The next kept images; a transaction each, for a long one would hold up the write-ahead log."""
    table = inspections.c
    query = select(table.inspection_id, table.image_path, table.image_bytes)
    query = query.where(table.image_path.is_not(None), table.inspection_id > after).order_by(table.inspection_id)
    with engine.connect() as connection:
        found = connection.execute(query.limit(_ROWS_AT_ONCE)).all()
    return [(row.inspection_id, row.image_path, row.image_bytes) for row in found]


def _still_needed(engine: Engine, segment: int) -> bool:
    with engine.connect() as connection:
        return (
            connection.execute(select(pending.c.segment).where(pending.c.segment == segment).limit(1)).scalar()
            is not None
        )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


_Step = Callable[[Engine, Path, Path], Iterator[str]]
_STEPS: dict[str, _Step] = {
    "pages and indexes": _pages,
    "references between tables": _references,
    "numbers of results": _numbers,
    "images without verdict": _verdicts,
    "files of kept images": _files,
}
