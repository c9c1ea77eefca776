"""Send pictures of a line's images to the hub, by digest: after the rows, and no faster than `bandwidth`.

The queue is a position in the hub's own rows: it needs no memory here, and survives restarts.
"""

import asyncio
import hashlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, LiteralString

import structlog
from psycopg import AsyncConnection, Error

from daemon.consumers.plant.identity import add_event
from daemon.consumers.plant.settings import PlantSettings
from daemon.consumers.protocol import DeliveryError, LineAccess, NotYetError
from daemon.registry.hub_store import HubStore
from daemon.registry.manifest import ReleaseError

_AT_ONCE = 50
_PART_BYTES = 16 * 1024
_POLL_S = 1.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
#: The line copies a picture within seconds; if it takes longer, the picture is tried again later.
_COPY_S = 60.0

_POSITION = "SELECT pictures_seq AS after, last_seq AS upto FROM lines WHERE line = %(line)s AND epoch = %(epoch)s"
_NEXT: LiteralString = """
    SELECT seq, inspection_id FROM {}
    WHERE line = %(line)s AND epoch = %(epoch)s AND seq > %(after)s AND seq <= %(upto)s ORDER BY seq LIMIT 50
"""
_CANDIDATES: dict[str, LiteralString] = {
    "failed": _NEXT.format("(SELECT * FROM inspections WHERE verdict = 'fail') AS failed"),
    "reviewed": _NEXT.format("(SELECT * FROM reviews WHERE inspection_id IS NOT NULL) AS reviewed"),
}


class PictureSender:
    """Sends the pictures of one epoch over its own connection; a failure delays pictures, never rows."""

    def __init__(
        self,
        settings: PlantSettings,
        line: LineAccess,
        epoch: str,
        connect: Callable[[], Awaitable[AsyncConnection[dict[str, Any]]]],
    ) -> None:
        self._settings, self._line, self._epoch, self._connect = settings, line, epoch, connect
        self._name = line.name
        self._stopping = threading.Event()
        self._log: Any = structlog.get_logger("pictures")

    def stop(self) -> None:
        """End within one part of a picture; an unfinished picture is sent again later."""
        self._stopping.set()

    async def run(self) -> None:
        """Send until cancelled; log and retry every failure, and report one over HTTP as an event at the hub."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                async with await self._connect() as connection:
                    try:
                        while True:
                            await self._send_next(connection)
                            wait_s = _FIRST_WAIT_S
                    except ReleaseError as error:
                        await add_event(connection, self._name, "pictures_wait", str(error))
                        raise
            except (Error, DeliveryError, OSError, ReleaseError) as error:
                self._log.warning("pictures_wait", why=str(error))
            except Exception as error:  # noqa: BLE001 - rows go on, and nothing else would start it again
                self._log.warning("pictures_wait", why=f"{type(error).__name__}: {error}")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _send_next(self, connection: AsyncConnection[dict[str, Any]]) -> None:
        key = {"line": self._name, "epoch": self._epoch}
        position = await (await connection.execute(_POSITION, key)).fetchone()
        if position is None or position["after"] >= position["upto"]:
            await asyncio.sleep(_POLL_S)
            return
        cursor = await connection.execute(_CANDIDATES[self._settings.pictures], {**key, **position})
        rows = await cursor.fetchall()
        for row in rows:
            await self._send(connection, row)
        if len(rows) < _AT_ONCE:
            await self._move(connection, position["upto"])

    async def _send(self, connection: AsyncConnection[dict[str, Any]], row: dict[str, Any]) -> None:
        content = await self._picture(row["inspection_id"])
        digest, state = None, "gone"
        if content is not None:
            digest = hashlib.sha256(content).hexdigest()
            state = "stored" if await asyncio.to_thread(self._put, digest, content) else "too_large"
        async with connection.transaction():
            await connection.execute(
                "INSERT INTO pictures (line, epoch, seq, inspection_id, sha256, bytes, state)"
                " VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
                (
                    *(self._name, self._epoch, row["seq"], row["inspection_id"], digest),
                    *(len(content or b""), state),
                ),
            )
            await self._move(connection, row["seq"])

    async def _move(self, connection: AsyncConnection[dict[str, Any]], seq: int) -> None:
        await connection.execute(
            "UPDATE lines SET pictures_seq = greatest(pictures_seq, %s) WHERE line = %s AND epoch = %s",
            (seq, self._name, self._epoch),
        )

    async def _picture(self, inspection_id: int) -> bytes | None:
        until_s = time.monotonic() + _COPY_S
        while True:
            try:
                return await asyncio.to_thread(self._line.picture, inspection_id)
            except NotYetError:
                if time.monotonic() > until_s:
                    raise ReleaseError(f"the line has not copied the picture of image {inspection_id} yet") from None
            await asyncio.sleep(_POLL_S)

    def _put(self, digest: str, content: bytes) -> bool:
        """Send one picture within `bandwidth`; return False if it is too large for the hub. ReleaseError."""
        key = self._settings.key.read_text("ascii").strip() if self._settings.key else None
        hub = HubStore(self._settings.hub or "", key)
        if not hub.ask_json("PUT", f"/pictures/{digest}/space?bytes={len(content)}")["fits"]:
            self._log.warning("picture_too_large", sha256=digest, bytes=len(content))
            return False
        hub.put(f"/pictures/{digest}", self._paced(content), len(content))
        return True

    def _paced(self, content: bytes) -> Iterator[bytes]:
        for start in range(0, len(content), _PART_BYTES):
            part = content[start : start + _PART_BYTES]
            if self._stopping.wait(len(part) / self._settings.bandwidth):
                raise ReleaseError("the consumer is stopping")
            yield part
