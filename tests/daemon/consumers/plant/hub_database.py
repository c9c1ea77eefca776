"""A hub's database on a real PostgreSQL, and lines that write to it over the real runner."""

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from daemon.consumers.plant.consumer import PlantConsumer
from daemon.consumers.plant.settings import PlantSettings
from daemon.consumers.protocol import NotYetError, ReviewAnswerError
from daemon.delivery.deliveries import SharedStatusPage
from daemon.plant.schema import make_schema, open_database
from daemon.storage.database.reader import ResultsReader
from tests.daemon.delivery.results_database import ResultsDatabase, running
from tests.daemon.storage.database.postgresql_server import Server


class HubDatabase:
    """A new database with the hub's tables."""

    def __init__(self, server: Server, name: str) -> None:
        self.url = server.url(name)
        self.engine = open_database(self.url)
        make_schema(self.engine)

    @property
    def conninfo(self) -> str:
        return self.url.replace("+psycopg", "")

    def ask(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        with psycopg.connect(self.conninfo, row_factory=dict_row, autocommit=True) as connection:
            cursor = connection.execute(sql, values or None)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def value(self, sql: str, *values: Any) -> Any:
        (row,) = self.ask(sql, *values)
        return next(iter(row.values()))


@dataclass
class LineSide:
    """`LineAccess` over a results database; pictures and answers to reviews are the test's."""

    database: ResultsDatabase
    pictures: dict[int, bytes] = field(default_factory=dict[int, bytes])
    not_copied: set[int] = field(default_factory=set[int])
    decisions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    refuses: ReviewAnswerError | None = None

    def __post_init__(self) -> None:
        self.reader = ResultsReader(self.database.url)
        self.name, self.alarms = "line-1", Path("none")
        self.end, self.at, self.before_oldest = self.reader.end, self.reader.at, self.reader.before_oldest
        self.defects = self.reader.defects

    def picture(self, inspection_id: int) -> bytes | None:
        if inspection_id in self.not_copied:
            self.not_copied.remove(inspection_id)
            raise NotYetError
        return self.pictures.get(inspection_id)

    def review(self, fields: Any) -> None:
        if self.refuses:
            raise self.refuses
        self.decisions.append(dict(fields))


@asynccontextmanager
async def sending(
    hub: HubDatabase,
    database: ResultsDatabase,
    /,
    line: str = "line-1",
    side: LineSide | None = None,
    identifier: str = "pc-1",
    status_page: SharedStatusPage | None = None,
    **keys: Any,
):
    """Send a line's results to the hub; yields the runner."""
    settings = PlantSettings(kind="plant", database=hub.url, **keys)
    side = side or LineSide(database)
    side.name = line
    consumer = PlantConsumer(settings, identifier, side)
    folder = database.file.parent / f"consumers-{identifier}"
    async with running(database, consumer, folder, settings, status_page=status_page) as runner:
        yield runner
