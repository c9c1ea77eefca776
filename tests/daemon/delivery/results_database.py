"""A results database with any number of messages, without a line that makes them: boards of two images each."""

import asyncio
import sqlite3
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any

from daemon.consumers.protocol import ConsumerSettings
from daemon.delivery.position import PositionFile
from daemon.delivery.runner import Runner
from daemon.storage.database.reader import ResultsReader
from daemon.storage.database.store import Store

ALL_RESULTS = ConsumerSettings(kind="test")
BEGIN = datetime(2026, 11, 20, tzinfo=UTC)


class ResultsDatabase:
    """`grow` writes as the daemon's writer does: rows and the stream's position in one transaction."""

    def __init__(self, file: Path, begin: datetime = BEGIN) -> None:
        self.file = file
        self.url = f"sqlite:///{file}"
        self.begin = begin
        Store(self.url).close()

    def begin_epoch(self) -> None:
        """Begin another history of results, as the daemon does with a database that was put back."""
        with closing(sqlite3.connect(self.file)) as database, database:
            database.execute("UPDATE stream_position SET epoch = ?", (token_hex(6),))

    @property
    def last_seq(self) -> int:
        with closing(sqlite3.connect(self.file)) as database:
            return database.execute("SELECT last_seq FROM stream_position").fetchone()[0]

    def grow(self, boards: int, serial: str = "S{}") -> int:
        """Add boards of three messages each; return the last `seq`."""
        seq = self.last_seq
        images, rows = [], []
        for number in range(seq // 3 + 1, seq // 3 + 1 + boards):
            at = self._at(number)
            rows.append((number, "pair", serial.format(number), at, at, 3 * number))
            images += [(f"i{number}-{place}", number, f"P{place}", at, at, 3 * number - 2 + place) for place in (0, 1)]
        with closing(sqlite3.connect(self.file)) as database, database:
            database.executemany(
                "INSERT INTO boards (board_id, board_type, serial, attempt, first_seen_at, completed_at, expected,"
                " inspected, verdict, reason, rules_version, seq, edition) VALUES (?, ?, ?, 1, ?, ?, 2, 2, 'pass',"
                " 'complete', '0123456789ab', ?, 1)",
                rows,
            )
            database.executemany(
                "INSERT INTO inspections (source, image_id, board_id, component, designator, accepted_at, completed_at,"
                " image_bytes, status, verdict, rules_version, image_sha256, latency_ms, seq, edition)"
                " VALUES ('cam', ?, ?, 'P', ?, ?, ?, 10, 'done', 'pass', '0123456789ab', '', 5.0, ?, 1)",
                images,
            )
            database.execute("UPDATE stream_position SET last_seq = ?", (seq + 3 * boards,))
        return seq + 3 * boards

    def prune(self, boards: int) -> None:
        with closing(sqlite3.connect(self.file)) as database, database:
            (first,) = database.execute("SELECT min(board_id) FROM boards").fetchone()
            database.execute("DELETE FROM inspections WHERE board_id < ?", (first + boards,))
            database.execute("DELETE FROM boards WHERE board_id < ?", (first + boards,))

    def _at(self, number: int) -> str:
        at = self.begin + timedelta(seconds=number)
        return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"


@asynccontextmanager
async def running(
    database: ResultsDatabase,
    consumer: Any,
    folder: Path | None = None,
    settings: ConsumerSettings = ALL_RESULTS,
    **named: Any,
):
    """Deliver the database's messages to a consumer; yields the runner."""
    reader = ResultsReader(database.url)
    file = PositionFile(folder or database.file.parent / "consumers", "plant")
    runner = Runner("plant", consumer, reader, file, settings, **named)
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        runner.stop()
        await asyncio.wait_for(task, 60)
        reader.close()
