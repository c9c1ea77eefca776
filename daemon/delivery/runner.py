"""Delivery to one consumer: read on from its position, move it once messages are delivered, retry after failures.

Results are read a batch at a time, so that a consumer that is a million messages behind needs no more memory.
"""

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from daemon.consumers.protocol import Consumer, ConsumerSettings, DeliveryError, Message, State
from daemon.delivery.deliveries import SharedStatusPage
from daemon.delivery.position import DeliveryPosition, Mark, PositionError, PositionFile
from daemon.host.children import heartbeat
from daemon.storage.database.connections import StoreError
from daemon.storage.database.reader import ResultsReader

#: Interval at which an idle runner asks the database for news: one row of one table.
_POLL_S = 0.2
#: A moved position becomes durable this much later: a sync for each message would slow down the line's disk.
_SAVE_EVERY_S = 1.0
_FIRST_BACK_OFF_S = 1.0
_LONGEST_BACK_OFF_S = 30.0
#: After a connection is lost, messages acknowledged this shortly before are delivered once more: the server
#: may have died with them in memory.
_DELIVER_AGAIN_S = 5.0
#: After `stop`, what the line has just finished is still delivered for this long.
_LAST_MESSAGES_S = 1.5
_GOODBYE_S = 1.0
#: After SIGTERM; the daemon waits for three.
_END_WITHIN_S = 2.5


class Runner:
    """One consumer of one database, all in one event loop.

    Disks and databases may be slow: they are asked in threads, and the connection is kept alive meanwhile.
    """

    def __init__(
        self,
        name: str,
        consumer: Consumer,
        reader: ResultsReader,
        positions: PositionFile,
        settings: ConsumerSettings,
        *,
        newest: int | None = None,
        status_page: SharedStatusPage | None = None,
    ) -> None:
        """A consumer without a position begins after `newest`, or with the oldest message that is kept."""
        self._consumer = consumer
        self._reader = reader
        self._file = positions
        self._wanted = tuple(f"{kind.removesuffix('s')}/" for kind in settings.send)
        self._repeats_boards = settings.repeats_boards and "boards" in settings.send
        self._batch = settings.batch
        self._newest = newest
        self._status_page = status_page
        self._log: Any = structlog.get_logger("consumer").bind(consumer=name)
        self._position = DeliveryPosition(0)
        self._saved: DeliveryPosition | None = None
        self._save_at_s = 0.0
        self._disk_problem: str | None = None
        self._state: State = "waiting"
        self._reason: str | None = None
        self._trail: deque[tuple[float, int]] = deque()
        self._delivered_once = 0
        self._back_off_s = _FIRST_BACK_OFF_S
        self.stopping = asyncio.Event()
        self._stop_by_s = 0.0

    @property
    def position(self) -> int:
        return self._position.seq

    def stop(self) -> None:
        """Deliver what there is, as long as that takes no time, then end `run`."""
        self._stop_by_s = time.monotonic() + _LAST_MESSAGES_S
        self.stopping.set()

    async def run(self) -> None:
        has_begun = False
        while not self.stopping.is_set():
            try:
                if not has_begun:
                    self._position = await asyncio.to_thread(self._begin)
                    await self._save(even_if_not_due=True)
                    has_begun = True
                await self._connection()
                break  # it was asked to stop
            except DeliveryError as error:
                self._report(error.state, error.reason)
            except (SQLAlchemyError, StoreError) as error:
                self._report("waiting", f"the results cannot be read: {str(error).splitlines()[0]}")
            except Exception as error:  # noqa: BLE001 - a defect of one consumer: it is reported, and the rest goes on
                self._log.exception("consumer_failed")
                self._report("waiting", f"{type(error).__name__}: {error}")
            if has_begun:
                self._go_back()
            await self._wait(self._back_off_s)
            self._back_off_s = min(2 * self._back_off_s, _LONGEST_BACK_OFF_S)
        await self._save(even_if_not_due=True)

    async def _connection(self) -> None:
        try:
            has_less = await self._consumer.open(self._position.seq)
            if has_less is not None and has_less < self._position.seq:
                self._log.warning("server_has_less", position=self._position.seq, goes_on_after=has_less)
                self._position = self._position.back_to(has_less)
            while True:
                is_last_look = self.stopping.is_set()  # before the look, which misses what comes in meanwhile
                is_up_to_date = not await self._deliver_page()
                self._report("connected")  # not before: a server may accept the connection and refuse the messages
                await self._save()
                is_late = self.stopping.is_set() and time.monotonic() > self._stop_by_s
                if is_late or (is_last_look and is_up_to_date):
                    return
                if is_up_to_date:
                    await self._wait(_POLL_S)
        finally:
            await self._close()

    async def _deliver_page(self) -> bool:
        last_seq, epoch = await asyncio.to_thread(self._reader.end)
        if last_seq < self._position.seq or epoch != self._position.epoch:
            self._position = await asyncio.to_thread(self._checked, self._position)
            self._delivered_once = 0
            return True
        if last_seq == self._position.seq:
            await self._consumer.deliver(())
            return False
        page = await asyncio.to_thread(self._reader.results_since, self._position.seq, self._batch)
        items: list[Message] = page["items"]
        if not items:
            self._moved(items, last_seq)
            return True
        states = await asyncio.to_thread(self._reader.board_states, items) if self._repeats_boards else []
        wanted = [message for message in items if message["topic"].startswith(self._wanted)]
        wanted = sorted(wanted + states, key=lambda message: message["seq"])
        reached = await self._consumer.deliver(wanted) if wanted else 0
        is_whole = not wanted or reached >= wanted[-1]["seq"]
        done = items if is_whole else [message for message in items if message["seq"] <= reached]
        if done:
            self._moved(done, done[-1]["seq"])
        return True

    def _moved(self, done: Sequence[Message], upto: int) -> None:
        """Move the position to `upto`; messages not in `done` were pruned, maybe while they waited for delivery."""
        before = self._position
        self._position = before.moved(upto, [Mark(message["seq"], message["at"]) for message in done])
        if self._position.missed > before.missed:
            self._log.error(
                "results_missed",
                count=self._position.missed - before.missed,
                after_seq=before.seq,
                up_to_seq=upto,
                why="they were pruned (retention.results_for) before they could be delivered",
            )
        if not done:
            return
        now_s = time.monotonic()
        self._trail.append((now_s, before.seq))
        while self._trail[0][0] < now_s - _DELIVER_AGAIN_S:
            self._trail.popleft()
        self._back_off_s = _FIRST_BACK_OFF_S

    def _go_back(self) -> None:
        """Deliver the last messages again, each once at most, so that a bad connection does not block progress."""
        if not self._trail:
            return
        reached = self._position.seq
        again = max(self._trail[0][1], min(self._delivered_once, reached))
        self._delivered_once = max(reached, self._delivered_once)
        self._trail.clear()
        if again < reached:
            self._position = self._position.back_to(again)

    # The first position

    def _begin(self) -> DeliveryPosition:
        try:
            saved = self._file.load()
        except PositionError as error:
            self._log.error("position_damaged", problem=str(error), advice="all that is kept is delivered again")
            return self._new(self._reader.before_oldest())
        if saved is None:
            return self._new(self._reader.before_oldest() if self._newest is None else self._newest)
        return self._checked(saved)

    def _new(self, seq: int) -> DeliveryPosition:
        """Return a position that has missed nothing: messages pruned before it existed do not count."""
        last_seq, epoch = self._reader.end()
        return DeliveryPosition(seq, counted_to=last_seq, epoch=epoch)

    def _checked(self, position: DeliveryPosition) -> DeliveryPosition:
        """Return the position in this database; in another or older one, that of the last common message."""
        last_seq, epoch = self._reader.end()
        marks = position.marks[::-1]
        is_same = position.epoch == epoch or bool(marks and self._reader.at(marks[0].seq) == marks[0].at)
        position = replace(position, epoch=epoch)
        if is_same and position.seq <= last_seq:
            return position
        known = next((mark.seq for mark in marks if self._reader.at(mark.seq) == mark.at), None)
        seq = self._reader.before_oldest() if known is None else known
        new = replace(position.back_to(seq), counted_to=last_seq if known is None else known)
        self._log.error(
            "position_not_of_this_database",
            position=position.seq,
            last_seq=last_seq,
            goes_on_after=new.seq,
            why="the database is an older one, or another: what it holds after that is delivered (again)",
        )
        return new

    # Reports

    async def _save(self, *, even_if_not_due: bool = False) -> None:
        self._write_status()
        if self._position == self._saved or (time.monotonic() < self._save_at_s and not even_if_not_due):
            return
        position = self._position
        try:
            await asyncio.to_thread(self._file.save, position)
        except OSError as error:
            problem = f"{self._file.path} cannot be written: {error.strerror}: a restart would deliver again"
            if self._disk_problem is None:
                self._log.error("position_not_saved", problem=problem)
            self._disk_problem = problem
        else:
            self._saved, self._disk_problem = position, None
        self._save_at_s = time.monotonic() + _SAVE_EVERY_S

    def _report(self, state: State, reason: str | None = None) -> None:
        if (state, reason) != (self._state, self._reason):
            if state == "connected":
                self._log.info("consumer_connected", position=self._position.seq)
            else:
                self._log.warning(f"consumer_{state}", why=reason, position=self._position.seq)
        self._state, self._reason = state, reason
        self._write_status()

    def _write_status(self) -> None:
        if self._status_page is not None:
            facts = {"position": self._position.seq, "state": self._state, "missed": self._position.missed}
            self._status_page.write(facts | {"last_error": self._reason or self._disk_problem})

    # Waiting

    async def _wait(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.stopping.wait(), seconds)
        except TimeoutError:
            return

    async def _close(self) -> None:
        try:
            await asyncio.wait_for(self._consumer.close(), _GOODBYE_S)
        except Exception as error:  # noqa: BLE001 - it is gone either way
            self._log.debug("consumer_not_closed", error=str(error))


def run_consumer(
    name: str,
    consumer: Consumer,
    database: str,
    positions: Path,
    settings: ConsumerSettings,
    *,
    newest: int | None = None,
    status_page: SharedStatusPage | None = None,
    heart: int | None = None,
) -> None:
    """Bring the results of `database` (an SQLAlchemy URL) to `consumer` until SIGTERM or SIGINT.

    The position is the file `NAME.position` in `positions`; `start: newest` begins after `newest`, or after what there
    is now. `status_page` and `heart` come from the daemon, if one keeps this process running. Raises StoreError if
    there is no database.
    """
    reader = ResultsReader(database)
    if settings.start == "oldest":
        newest = None
    elif newest is None:
        newest = reader.last_seq()
    position = PositionFile(positions, name)
    runner = Runner(name, consumer, reader, position, settings, newest=newest, status_page=status_page)
    asyncio.run(_until_asked_to_end(runner, heart))
    reader.close()


async def _until_asked_to_end(runner: Runner, heart: int | None) -> None:
    loop = asyncio.get_running_loop()
    beating = asyncio.create_task(heartbeat(heart))
    running = asyncio.create_task(runner.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, runner.stop)
    await runner.stopping.wait()
    _, late = await asyncio.wait((running,), timeout=_END_WITHIN_S)
    beating.cancel()
    if late:
        # A connection that is being made holds a thread, which the interpreter's own end would wait for.
        structlog.get_logger("consumer").warning("consumer_cut", why=f"it did not end within {_END_WITHIN_S:g} s")
        sys.stderr.flush()
        os._exit(0)
