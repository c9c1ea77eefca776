"""A consumer as a process: the daemon's child and an integrator's program both call `run_consumer`."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import structlog

from daemon.consumers.protocol import Consumer, ConsumerSettings
from daemon.delivery.deliveries import SharedStatusPage
from daemon.delivery.position import PositionFile
from daemon.delivery.runner import Runner
from daemon.host.children import heartbeat
from daemon.storage.database.reader import ResultsReader

#: After SIGTERM; the daemon waits for three.
_END_WITHIN_S = 2.5


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
