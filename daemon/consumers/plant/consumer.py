"""Write a line's rows to its plant's hub, each exactly once: rows and position are one transaction.

The hub's position counts, so a hub that was killed or restored from a backup gets what it lacks and nothing twice.
"""

import asyncio
import contextlib
import json
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
    "42501": "give the role the rights that docs/plant.md lists",
    "42P01": "start the hub, `coserve plant run`: it makes the tables",
    "42703": "its tables are those of another CoServe: bring the hub to this version",
    "authentication failed": "check `password` and the role",
    "no pg_hba.conf entry": "add this PC to that file on the hub",
    "does not exist": "create it, or correct `database`",
}


class PlantConsumer:
    def __init__(self, settings: PlantSettings, identifier: str, line: LineAccess) -> None:
        self._settings, self._identifier, self._line, self._name = settings, identifier, line, line.name
        self._connection: AsyncConnection[dict[str, Any]] | None = None
        self._epoch, self._position = "", 0
        #: Versions of rules whose defect names the hub has.
        self._named: set[str] = set()
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
            self._epoch, self._position = await claim(connection, self._name, self._line, about, newest)
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
                await connection.execute("UPDATE lines SET last_seen = now() WHERE line = %s", (self._name,))
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

    async def _name_defects(self, connection: AsyncConnection[Any], messages: Sequence[Message]) -> None:
        rules = {message["rules_version"] for message in messages if "rules_version" in message}
        if not rules <= self._named:
            names = json.dumps(await asyncio.to_thread(self._line.defects))
            await connection.execute("UPDATE lines SET defects = %s WHERE line = %s", (names, self._name))
            self._named |= rules

    async def _send(self, connection: AsyncConnection[Any], messages: Sequence[Message]) -> None:
        epoch = (await asyncio.to_thread(self._line.end))[1]
        if epoch != self._epoch:
            raise DeliveryError("the line's database was replaced: its new epoch is registered at the hub")
        fresh = [message for message in messages if message["seq"] > self._position]
        if fresh:
            await self._ensure_days(connection, fresh)
            await self._name_defects(connection, fresh)
            async with connection.transaction():
                await self._store(connection, fresh)
            self._position = fresh[-1]["seq"]

    async def _store(self, connection: AsyncConnection[Any], messages: Sequence[Message]) -> None:
        last, line = messages[-1], self._name
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
            (self._name,),
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
        where = f"the hub's database ({self._name})"
        about = error.sqlstate or str(error)
        for part, advice in _ADVICE.items():
            if part in about:
                return DeliveryError(f"{where}: {text}: {advice}", "refused")
        if isinstance(error, errors.DiskFull):
            return DeliveryError(f"{where}: its disk is full: {text}: make room there; nothing is lost meanwhile")
        if isinstance(error, OperationalError):
            return DeliveryError(f"{where} does not answer: {text}")
        return DeliveryError(f"{where} refuses results after seq {self._position}: {text}", "refused")


# Messages as rows of the hub's tables, and the SQL that stores and counts each row once


def new_rows(table: str) -> str:
    """Return SQL for the rows of a batch: JSON objects whose fields are the columns of `table`."""
    return f"json_populate_recordset(NULL::{table}, %(rows)s)"


def _stored(table: str) -> str:
    insert = f"INSERT INTO {table} SELECT * FROM {new_rows(table)} ON CONFLICT DO NOTHING"  # noqa: S608 - our own names
    return f"WITH stored AS ({insert} RETURNING *)"


def _add(table: str, key: str, amounts: str, select: str) -> str:
    added = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in amounts.split(", "))
    return f"INSERT INTO {table} ({key}, {amounts}) {select} ON CONFLICT ({key}) DO UPDATE SET {added}"


_VERDICTS = ", ".join(f"count(*) FILTER (WHERE verdict = '{name}')" for name in ("pass", "fail", "review", "unknown"))
_HOUR = "date_trunc('hour', at, 'UTC')"
_KEY = "hour, line, board_type"
_IMAGES = _add(
    *("yields_by_hour", _KEY, "inspected, passed, failed, review, unknown"),
    f"SELECT {_HOUR}, line, board_type, count(*), {_VERDICTS} FROM stored GROUP BY 1, 2, 3",  # noqa: S608 - our own names
)
_DEFECTS = _add(
    *("defects_by_hour", f"{_KEY}, component, defect", "count"),
    f"SELECT {_HOUR}, line, board_type, component, coalesce(defect, ''), count(*)"  # noqa: S608
    " FROM stored WHERE verdict = 'fail' GROUP BY 1, 2, 3, 4, 5",
)
_BOARDS = _add(
    *("yields_by_hour", _KEY),
    "boards, boards_passed, boards_failed, boards_review, boards_unknown, first_boards, first_passed,"
    " first_final_passed",
    f"SELECT {_HOUR}, line, board_type, count(*), {_VERDICTS}, count(*) FILTER (WHERE attempt = 1),"  # noqa: S608
    " count(*) FILTER (WHERE attempt = 1 AND verdict = 'pass'),"
    " count(*) FILTER (WHERE attempt = 1 AND final_verdict = 'pass') FROM stored GROUP BY 1, 2, 3",
)

#: Statements that one batch runs for the rows of each table.
STORE: dict[str, tuple[str, ...]] = {
    "inspections": (f"{_stored('inspections')}, counted AS ({_IMAGES}) {_DEFECTS}",),
    "boards": (f"{_stored('boards')} {_BOARDS}",),
    "reviews": (
        f"""
        INSERT INTO reviews SELECT filled.* FROM {new_rows("reviews")} AS new LEFT JOIN LATERAL (
            SELECT verdict AS verdict_by_line, expert, expert_version FROM inspections
            WHERE inspections.line = new.line AND inspections.inspection_id = new.inspection_id
              AND inspections.epoch = coalesce(new.of_epoch, new.epoch)
            ORDER BY inspections.at DESC LIMIT 1
        ) AS image ON true, jsonb_populate_record(new, to_jsonb(image)) AS filled
        ON CONFLICT DO NOTHING
        """,  # noqa: S608
        # Only the newest decision of the batch about each attempt counts; its effect belongs to the hour of the board.
        f"""
        WITH old AS (
            SELECT DISTINCT ON (board.epoch, board.seq) board.*, new.board_verdict AS after
            FROM {new_rows("reviews")} AS new CROSS JOIN LATERAL (
                SELECT line, epoch, seq, at, board_type, attempt, final_verdict FROM boards
                WHERE boards.line = new.line AND boards.board_serial = new.board_serial
                  AND boards.board_type = new.board_type AND boards.attempt = new.attempt
                  AND boards.epoch IN (new.epoch, new.of_epoch)
                ORDER BY boards.epoch = new.epoch DESC LIMIT 1
            ) AS board
            WHERE new.board_verdict IS NOT NULL ORDER BY board.epoch, board.seq, new.seq DESC
        ), changed AS (
            UPDATE boards SET final_verdict = old.after FROM old
            WHERE (boards.line, boards.epoch, boards.seq) = (old.line, old.epoch, old.seq)
        )
        UPDATE yields_by_hour AS yields SET first_final_passed = first_final_passed + difference.boards
        FROM (
            SELECT line, {_HOUR} AS hour, board_type,
                   sum((after = 'pass')::int - (final_verdict = 'pass')::int) AS boards
            FROM old WHERE attempt = 1 GROUP BY 1, 2, 3
        ) AS difference
        WHERE (yields.line, yields.hour, yields.board_type)
            = (difference.line, difference.hour, difference.board_type)
        """,  # noqa: S608
    ),
}
_TABLES = {"inspection": "inspections", "board": "boards", "review": "reviews"}
_encode = json.JSONEncoder(ensure_ascii=False).encode


def rows_of(messages: Sequence[Message], line: str, epoch: str) -> dict[str, str]:
    rows: dict[str, list[Message]] = {}
    for message in messages:
        kind = message["topic"].partition("/")[0]
        if kind in _TABLES:
            rows.setdefault(_TABLES[kind], []).append({**_row(kind, message), "line": line, "epoch": epoch})
    return {table: _encode(rows[table]) for table in _TABLES.values() if table in rows}


def _row(kind: str, message: Message) -> dict[str, Any]:
    """Return the fields of a message that have a column, under the column's name."""
    board = message["board"]
    row = message | {"board_type": board["type"], "board_serial": board["serial"], "attempt": board["attempt"]}
    if kind == "review":
        row["of_epoch"] = message.get("epoch")
    else:
        row |= {"lot": board.get("lot"), "station": board.get("station")}
    if kind == "board":
        row["final_verdict"] = message["verdict"]
    if kind == "inspection":
        names = ("expert", "version", "label", "confidence")
        stages = [{name: stage[name] for name in names} for stage in message["stages"]]
        last = stages[-1] if stages else {}
        row |= {**last, "stages": stages, "image_id": message["id"], "expert_version": last.get("version")}
    return row
