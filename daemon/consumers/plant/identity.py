"""Decide who writes a line's rows: one PC at a time, one history (epoch) after another, never two under one name."""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from psycopg import AsyncConnection

from daemon.consumers.protocol import DeliveryError, LineAccess

_Connection = AsyncConnection[dict[str, Any]]
#: The newest message of an epoch up to a `seq`, from each table.
_NEWEST_UP_TO = " UNION ALL ".join(
    f"(SELECT seq, at FROM {table} WHERE line = %(line)s AND epoch = %(epoch)s AND seq <= %(seq)s"  # noqa: S608
    " ORDER BY seq DESC LIMIT 1)"
    for table in ("inspections", "boards", "reviews")
)

_REGISTER = """
    INSERT INTO lines (line, epoch, identity, host, software, last_seq, pictures_seq, connected_at, last_seen)
    VALUES (%(line)s, %(epoch)s, %(identity)s, %(host)s, %(software)s, %(seq)s, %(seq)s, now(), now())
    ON CONFLICT (line) DO UPDATE SET
        epoch = excluded.epoch, identity = excluded.identity, host = excluded.host, software = excluded.software,
        last_seq = excluded.last_seq, last_at = CASE WHEN lines.epoch = excluded.epoch THEN lines.last_at END,
        connected_at = now(), last_seen = now(), accepts = false,
        pictures_seq = CASE WHEN lines.epoch = excluded.epoch THEN lines.pictures_seq ELSE excluded.last_seq END
"""
Situation = Literal["new", "same", "moved", "restored", "replaced", "still_connected", "taken", "unknown", "copy"]
_NEW_EPOCH = (
    "its results after seq {begins} are counted again under epoch {epoch}; what the hub has of epoch {old_epoch}, up to"
    " seq {old_last_seq}, stays"
)
_TAKEN = (
    "{line} is written by {old_host} now, and {host} wants to write it too: two lines have one name: give this one its"
    " own (`line` in coserve.yaml)"
)
_UNKNOWN = (
    "{line} is the name of another line, on {old_host} (epoch {old_epoch}), and this one on {host} has epoch {epoch}:"
    " give it a name of its own (`line` in coserve.yaml); if it replaces that one: coserve plant accept PLANT {line}"
)
_COPY = (
    "the hub has {line} up to seq {old_last_seq} of {old_last_at}, and this database, with the same epoch, has another"
    " result there or only {last_seq}: it is an older copy. Stop the daemon, remove the file `epoch` in its journal,"
    " and start it: it then counts under a new epoch"
)
#: The event of each situation that has one, with its text.
EVENTS: dict[Situation, tuple[str, str]] = {
    "new": ("joined", "{line} joined from {host} after seq {begins}"),
    "moved": ("moved", "{line} writes from {host} now; before, it wrote from {old_host}"),
    "restored": ("restored", "{line} was restored from a backup: " + _NEW_EPOCH),
    "replaced": ("replaced", "{line} has another database, on {host}, before on {old_host}: " + _NEW_EPOCH),
    "taken": ("name_taken", _TAKEN),
    "unknown": ("name_taken", _UNKNOWN),
    "copy": ("older_copy", _COPY),
}
REFUSED: frozenset[Situation] = frozenset({"taken", "unknown", "copy"})


def situation_of(
    known: Mapping[str, Any] | None, identity: str, epoch: str, *, is_free: bool, has_last: bool
) -> Situation:
    """Classify a line. `is_free`: no other connection writes it. `has_last`: it has (or pruned) the newest message."""
    is_same_place = known is not None and known["identity"] == identity
    if not is_free:
        return "still_connected" if known is None or is_same_place else "taken"
    if known is None:
        return "new"
    if known["epoch"] == epoch:
        if not has_last:
            return "copy"
        return "same" if is_same_place else "moved"
    if is_same_place:
        return "restored"
    return "replaced" if known["accepts"] else "unknown"


async def add_event(connection: _Connection, line: str, kind: str, text: str) -> None:
    """Write an event, unless the same one is less than an hour old."""
    await connection.execute(
        "INSERT INTO events (line, kind, text) SELECT %(line)s, %(kind)s, %(text)s WHERE NOT EXISTS (SELECT FROM events"
        " WHERE line = %(line)s AND kind = %(kind)s AND text = %(text)s AND at > now() - interval '1 hour')",
        {"line": line, "kind": kind, "text": text},
    )


async def claim(
    connection: _Connection, line: str, access: LineAccess, about: Mapping[str, str], newest: int | None
) -> tuple[str, int]:
    """Register as the writer of `line`; return its epoch and last `seq` at the hub. DeliveryError if another writes it.

    `about` has `identity`, `host` and `software`. A new line begins with its oldest result, or after `newest`.
    """
    last_seq, epoch = await asyncio.to_thread(access.end)
    if epoch is None:
        raise DeliveryError("the line's database has no results yet")
    lock = "SELECT pg_try_advisory_lock(hashtextextended('coserve ' || %s, 0)) AS is_free"
    free = await (await connection.execute(lock, (line,))).fetchone()
    known = await (await connection.execute("SELECT * FROM lines WHERE line = %s", (line,))).fetchone()
    has_last = known is None or await _has_message(access, known["last_seq"], known["last_at"], last_seq)
    is_free = free is not None and free["is_free"]
    situation = situation_of(known, about["identity"], epoch, is_free=is_free, has_last=has_last)
    if situation == "still_connected":
        raise DeliveryError(
            f"the hub still has the previous connection of {line}, which ends within half a minute: no action is needed"
        )
    if situation in REFUSED:
        begins = 0
    elif known is None:
        begins = await asyncio.to_thread(access.before_oldest) if newest is None else newest
    elif known["epoch"] == epoch:
        begins = known["last_seq"]
    elif mine := await _hub_at(connection, line, epoch, last_seq):
        begins = mine[0]
    else:
        begins = await _last_common(connection, line, access, known["epoch"], last_seq)
    event, text = EVENTS.get(situation, (None, ""))
    old = {f"old_{name}": value for name, value in (known or {}).items()}
    text = text.format(line=line, epoch=epoch, last_seq=last_seq, begins=begins, **about, **old)
    async with connection.transaction():
        if situation not in REFUSED:
            await connection.execute(_REGISTER, {"line": line, "epoch": epoch, "seq": begins, **about})
        if event is not None:
            await add_event(connection, line, event, text)
    if situation in REFUSED:
        raise DeliveryError(text, "refused")
    return epoch, begins


async def _has_message(access: LineAccess, seq: int, at: datetime | None, last_seq: int) -> bool:
    """Return True if the line has this message of the hub, or has pruned it; False if it has another."""
    text = await asyncio.to_thread(access.at, seq)
    if text is None or at is None:
        return at is None or seq <= last_seq
    return datetime.fromisoformat(text).astimezone(UTC) == at


async def _last_common(connection: _Connection, line: str, access: LineAccess, epoch: str, last_seq: int) -> int:
    low, high = 0, last_seq  # low is common
    while low < high:
        middle = (low + high + 1) // 2
        there = await _hub_at(connection, line, epoch, middle)
        if there is None or there[0] <= low or await _has_message(access, *there, last_seq):
            low = middle
        else:
            high = there[0] - 1
    newest = await _hub_at(connection, line, epoch, low)
    return 0 if newest is None else newest[0]


async def _hub_at(connection: _Connection, line: str, epoch: str, seq: int) -> tuple[int, datetime] | None:
    newest = f"SELECT seq, at FROM ({_NEWEST_UP_TO}) AS newest ORDER BY seq DESC LIMIT 1"  # noqa: S608
    row = await (await connection.execute(newest, {"line": line, "epoch": epoch, "seq": seq})).fetchone()  # type: ignore[call-overload]
    return None if row is None else (row["seq"], row["at"])
