"""Upkeep of the hub, once an hour: make days ahead; delete the rows, pictures and releases that are too old."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import structlog
from sqlalchemy import Connection, Engine, Table, delete, select, text, tuple_, update
from sqlalchemy.exc import SQLAlchemyError

from daemon.consumers.plant.tables import boards, inspections, lines, partition_name, partitions, pictures, reviews
from daemon.errors import ReleaseError, StartError
from daemon.plant.picture_store import PictureStore, PictureStoreError
from daemon.plant.schema import database_problem, make_schema
from daemon.plant.settings import HubSettings, Retention
from daemon.registry.store import Store

_EVERY_S = 3600.0
_RETRY_S = 5.0
_DAYS_AHEAD = 3
#: Rows that one statement deletes: lines that write must not wait for a long transaction.
_ROWS_AT_ONCE = 20_000
_PICTURES_AT_ONCE = 1000
#: How long a file may lie at the hub before a release or a row names it.
UNNAMED_S = 86400.0


class Upkeep:
    """A thread that makes the schema as soon as the database answers, then keeps it in order."""

    def __init__(self, engine: Engine, settings: HubSettings, store: PictureStore) -> None:
        self._engine, self._settings, self._store = engine, settings, store
        self._stopping = threading.Event()
        self._log: Any = structlog.get_logger("upkeep")
        self.problem: str | None = "the schema is not made yet"
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                make_schema(self._engine)
                pruned = keep_in_order(self._engine, self._settings.retention, self._store, time.time())
                files = prune_releases(self._settings, time.time())
                self._log.info("upkeep_done", **pruned, release_files=files)
                self.problem = None
            except SQLAlchemyError as error:
                self._report(database_problem(self._engine, error))
            except (StartError, PictureStoreError) as error:
                self._report(str(error))
            except Exception as error:  # noqa: BLE001 - lines write on without upkeep; it is reported and tried again
                self._log.exception("upkeep_failed")
                self._report(f"{type(error).__name__}: {error}")
            self._stopping.wait(_RETRY_S if self.problem else _EVERY_S)

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            self._log.error("upkeep_waits", why=problem)
        self.problem = problem


def keep_in_order(engine: Engine, retention: Retention, store: PictureStore, now_s: float) -> Mapping[str, int]:
    now = datetime.fromtimestamp(now_s, UTC)
    for ahead in range(_DAYS_AHEAD + 1):
        with _short_locks(engine) as connection:
            connection.execute(text("SELECT ensure_day(:day)"), {"day": (now + timedelta(days=ahead)).date()})
    counts = {"days": 0, "rows": 0, "pictures": _sweep_pictures(engine, store, now_s - UNNAMED_S)}
    with engine.connect() as connection:
        last_at = {row.line: row.last_at for row in connection.execute(select(lines.c.line, lines.c.last_at))}
    newest = [at for at in last_at.values() if at is not None]
    now = min(now, max(newest, default=now))  # a hub's clock that is ahead makes nothing old
    ages = {name: retention.lines.get(name, retention.results) for name in last_at}
    if ages and all(ages.values()):
        counts["days"] = _drop_days(engine, now - timedelta(seconds=max(age for age in ages.values() if age)))
    for name, age_s in ages.items():
        if age_s is not None:
            before = now - timedelta(seconds=age_s)
            counts["rows"] += sum(_delete_rows(engine, table, name, before) for table in (inspections, boards, reviews))
        picture_age_s = min((age for age in (age_s, retention.pictures) if age is not None), default=None)
        if picture_age_s is not None:
            counts["pictures"] += _prune_pictures(engine, store, name, now - timedelta(seconds=picture_age_s))
    return counts


def prune_releases(settings: HubSettings, now_s: float) -> int:
    """Delete all but the newest `retention.releases` of each name, and their files; return how many files."""
    store, most = Store(settings.releases), settings.retention.releases
    if most is None:
        return 0
    oldest = {name: min(store.numbers(name)[-most:], default=0) for name in store.names()}
    try:
        return store.prune(lambda name, number: number >= oldest.get(name, 0), now_s - UNNAMED_S)
    except ReleaseError as error:
        structlog.get_logger("upkeep").warning("releases_not_pruned", why=str(error))
        return 0


@contextmanager
def _short_locks(engine: Engine) -> Iterator[Connection]:
    """Begin a transaction that gives up its wait for a long reader's lock: lines that write would queue behind it."""
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL lock_timeout = '5s'"))
        yield connection


def _drop_days(engine: Engine, before: datetime) -> int:
    with _short_locks(engine) as connection:
        old = connection.execute(select(partitions.c.day).where(partitions.c.day < before.date())).scalars().all()
        for day in old:
            connection.execute(text(f"DROP TABLE IF EXISTS {partition_name(day)}"))
        connection.execute(delete(partitions).where(partitions.c.day.in_(old)))
    return len(old)


def _delete_rows(engine: Engine, table: Table, line: str, before: datetime) -> int:
    key = tuple_(*table.primary_key)
    is_old = (table.c.line == line) & (table.c.at < before)
    some = select(*table.primary_key).where(is_old).limit(_ROWS_AT_ONCE)
    deleted = 0
    while True:
        with engine.begin() as connection:
            count = connection.execute(delete(table).where(is_old, key.in_(some))).rowcount
        deleted += count
        if count < _ROWS_AT_ONCE:
            return deleted


def _sweep_pictures(engine: Engine, store: PictureStore, before_s: float) -> int:
    """Remove pictures without a row: their line stopped before it sent the row."""
    swept, found = 0, store.stored_before(before_s)
    while digests := list(islice(found, _PICTURES_AT_ONCE)):
        with engine.connect() as connection:
            named = select(pictures.c.sha256).where(pictures.c.sha256.in_(digests), pictures.c.state == "stored")
            unnamed = {*digests} - {*connection.execute(named).scalars()}
        for digest in unnamed:
            store.remove(digest)
        swept += len(unnamed)
    return swept


def _prune_pictures(engine: Engine, store: PictureStore, line: str, before: datetime) -> int:
    """Remove old pictures that no newer image shares; their rows stay, as `pruned`."""
    is_old = (pictures.c.line == line) & (pictures.c.at < before) & (pictures.c.state == "stored")
    some = select(*pictures.primary_key).where(is_old).limit(_PICTURES_AT_ONCE)
    prune = update(pictures).where(tuple_(*pictures.primary_key).in_(some)).values(state="pruned")
    pruned = 0
    while True:
        with engine.begin() as connection:
            digests = connection.execute(prune.returning(pictures.c.sha256)).scalars().all()
            shared = select(pictures.c.sha256).where(pictures.c.sha256.in_(digests), pictures.c.state == "stored")
            for digest in {*digests} - {*connection.execute(shared).scalars()}:
                store.remove(digest)
        pruned += len(digests)
        if len(digests) < _PICTURES_AT_ONCE:
            return pruned
