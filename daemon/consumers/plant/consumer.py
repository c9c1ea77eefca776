"""Write a line's rows to its plant's hub, each exactly once: rows and position are one transaction.

The hub's position counts, so a hub that was killed or restored from a backup gets what it lacks and nothing twice.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, LiteralString, cast

import structlog
from psycopg import AsyncConnection, Error, OperationalError, errors
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row

from daemon.consumers.plant.identity import claim
from daemon.consumers.plant.pictures import PictureSender
from daemon.consumers.plant.rows import STORE, rows_of
from daemon.consumers.plant.settings import TIMEOUTS, PlantSettings
from daemon.consumers.protocol import DeliveryError, LineAccess, Message, ReviewAnswerError
from daemon.wire.keys import CredentialError, read_password

#: The hub's side of TIMEOUTS: it releases the name of a line that is cut off.
_SESSION = (
    "timezone=UTC synchronous_commit=on lock_timeout=20s application_name=coserve tcp_keepalives_idle=5"
    " tcp_keepalives_interval=5 tcp_keepalives_count=2 tcp_user_timeout=15000"
)
_SEEN_EVERY_S = 5.0
_REVIEWS_EVERY_S = 2.0

#: What a person does about an error, by its code or, if there was no connection, a part of its text.
_ADVICE = {
    "42501": "give the role the rights that docs/plant-hub.md lists",
    "42P01": "start the hub, `coserve plant run`: it makes the tables",
    "42703": "its tables are those of another CoServe: bring the hub to this version",
    "authentication failed": "check `password` and the role",
    "no pg_hba.conf entry": "add this PC to that file on the hub",
    "does not exist": "create it, or correct `database`",
}


class PlantConsumer:
    def __init__(self, settings: PlantSettings, identifier: str, line: LineAccess) -> None:
        self._settings, self._identifier, self._line = settings, identifier, line
        self._connection: AsyncConnection[dict[str, Any]] | None = None
        self._epoch, self._position = "", 0
        self._next_seen_s = self._next_reviews_s = 0.0
        self._pictures: PictureSender | None = None
        self._sending: asyncio.Task[None] | None = None
        self._log: Any = structlog.get_logger("plant")

    async def open(self, position: int) -> int | None:
        try:
            connection = self._connection = await self._connect()
            for setting in _SESSION.split():
                await connection.execute("SELECT set_config(%s, %s, false)", setting.split("="))
            about = {"host": os.uname().nodename, "software": version("coserve"), "identity": self._identifier}
            newest = position if self._settings.start == "newest" else None
            self._epoch, self._position = await claim(connection, self._settings.line, self._line, about, newest)
        except Error as error:
            raise self._delivery_error(error) from None
        self._next_seen_s = time.monotonic()
        if self._settings.pictures != "none":
            self._pictures = PictureSender(self._settings, self._line, self._epoch, self._connect)
            self._sending = asyncio.create_task(self._pictures.run())
        return min(position, self._position)

    async def deliver(self, messages: Sequence[Message]) -> int:
        connection = self._connection
        assert connection is not None
        try:
            if messages:
                await self._send(connection, messages)
            elif time.monotonic() >= self._next_seen_s:
                self._next_seen_s = time.monotonic() + _SEEN_EVERY_S
                await connection.execute("UPDATE lines SET last_seen = now() WHERE line = %s", (self._settings.line,))
            if time.monotonic() >= self._next_reviews_s:
                await self._take_reviews(connection)
        except Error as error:
            raise self._delivery_error(error) from None
        return messages[-1]["seq"] if messages else 0

    async def close(self) -> None:
        sending, connection = self._sending, self._connection
        self._sending = self._connection = None
        if sending is not None and self._pictures is not None:
            self._pictures.stop()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
        if connection is not None:
            await connection.close()

    async def _connect(self) -> AsyncConnection[dict[str, Any]]:
        try:
            password = read_password(self._settings.password) if self._settings.password else None
        except CredentialError as error:
            raise DeliveryError(str(error), "refused") from None
        address = make_conninfo(self._settings.database, **TIMEOUTS, password=password)
        return await AsyncConnection[dict[str, Any]].connect(address, autocommit=True, row_factory=dict_row)

    async def _ensure_days(self, connection: AsyncConnection[Any], messages: Sequence[Message]) -> None:
        """Make the messages' partitions in a transaction of its own: it locks all of `inspections`."""
        days = {message["at"][:10] for message in messages if message["topic"].startswith("inspection/")}
        await connection.execute("SELECT ensure_day(day) FROM unnest(%s::date[]) AS day", (sorted(days),))

    async def _send(self, connection: AsyncConnection[Any], messages: Sequence[Message]) -> None:
        epoch = (await asyncio.to_thread(self._line.end))[1]
        if epoch != self._epoch:
            raise DeliveryError("the line's database was replaced: its new epoch is registered at the hub")
        fresh = [message for message in messages if message["seq"] > self._position]
        if fresh:
            await self._ensure_days(connection, fresh)
            async with connection.transaction():
                await self._store(connection, fresh)
            self._position = fresh[-1]["seq"]

    async def _store(self, connection: AsyncConnection[Any], messages: Sequence[Message]) -> None:
        last, line = messages[-1], self._settings.line
        moved = await connection.execute(
            "UPDATE lines SET last_seq = %s, last_at = %s, last_seen = now()"
            " WHERE line = %s AND epoch = %s AND identity = %s AND last_seq = %s",
            (last["seq"], last["at"], line, self._epoch, self._identifier, self._position),
        )
        if moved.rowcount != 1:
            raise DeliveryError(f"the hub's position of {line} was changed by another program")
        for table, rows in rows_of(messages, line, self._epoch).items():
            for statement in STORE[table]:
                await connection.execute(cast("LiteralString", statement), {"rows": rows})

    async def _take_reviews(self, connection: AsyncConnection[Any]) -> None:
        """Apply decisions made at the hub. The line recognises repeats, so a lost answer does no harm."""
        self._next_reviews_s = time.monotonic() + _REVIEWS_EVERY_S
        asked = await connection.execute(
            "SELECT * FROM review_requests WHERE line = %s AND state = 'asked' ORDER BY request_id LIMIT 20",
            (self._settings.line,),
        )
        for request in await asked.fetchall():
            state, answer = "accepted", None
            names = ("inspection_id", "verdict", "defect", "reviewer", "note", "newest")
            fields = {name: request[name] for name in names if request[name] is not None}
            try:
                if request["epoch"] == self._epoch:
                    await asyncio.to_thread(self._line.review, fields)
                else:
                    state, answer = "refused", "the line was restored since: its images have other numbers"
            except ReviewAnswerError as error:
                if not error.is_final:
                    self._log.warning("review_waits", request=request["request_id"], why=str(error))
                    return
                state, answer = "refused", str(error)
            await connection.execute(
                "UPDATE review_requests SET state = %s, answer = %s, answered_at = now() WHERE request_id = %s",
                (state, answer, request["request_id"]),
            )

    def _delivery_error(self, error: Error) -> DeliveryError:
        text = (error.diag.message_primary or str(error).strip() or type(error).__name__).splitlines()[0]
        where = f"the hub's database ({self._settings.line})"
        about = error.sqlstate or str(error)
        for part, advice in _ADVICE.items():
            if part in about:
                return DeliveryError(f"{where}: {text}: {advice}", "refused")
        if isinstance(error, errors.DiskFull):
            return DeliveryError(f"{where}: its disk is full: {text}: make room there; nothing is lost meanwhile")
        if isinstance(error, OperationalError):
            return DeliveryError(f"{where} does not answer: {text}")
        return DeliveryError(f"{where} refuses results after seq {self._position}: {text}", "refused")
