"""A hub's database on a real PostgreSQL, and lines that write to it over the real runner."""

from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
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

    def add_line(self, line: str = "line-1") -> None:
        self.ask(
            "INSERT INTO lines (line, epoch, identity, host, last_seq, last_at) VALUES (%s, 'e', 'i', 'h', 9, now())",
            line,
        )

    def add_image(self, seq: int, at: datetime, line: str = "line-1") -> None:
        self.ask(
            "INSERT INTO inspections (line, epoch, seq, at, inspection_id, image_id, source, board_type, board_serial,"
            " attempt, component, verdict, late, stages, rules_version)"
            " VALUES (%s, 'e', %s, %s, %s, 'i', 's', 'b', 'S', 1, 'C', 'fail', false, '[]', 'r')",
            *(line, seq, at, seq),
        )

    def add_picture(self, seq: int, sha256: str, at: datetime, line: str = "line-1") -> None:
        self.ask(
            "INSERT INTO pictures (line, epoch, seq, inspection_id, sha256, at, state)"
            " VALUES (%s, 'e', %s, %s, %s, %s, 'stored')",
            *(line, seq, seq, sha256, at),
        )


@pytest.fixture
def hub(postgresql: Server, request: pytest.FixtureRequest) -> Iterator[HubDatabase]:
    hub = HubDatabase(postgresql, f"hub_{abs(hash(request.node.name))}")
    yield hub
    hub.engine.dispose()


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
