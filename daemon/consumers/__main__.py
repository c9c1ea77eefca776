"""`python -m daemon.consumers CONFIG NAME`: one consumer as a process of its own, which the daemon keeps running.

By hand it says what it does on stderr. 2: its configuration is wrong.
"""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import structlog

from daemon.children import live_with_parent
from daemon.config import Config, load_config
from daemon.consumers.kinds import MissingExtraError, make
from daemon.consumers.position import PositionFile
from daemon.consumers.runner import Runner
from daemon.consumers.slate import Slate
from daemon.errors import ConfigError
from daemon.logs import configure_logs
from daemon.store.database import StoreError
from daemon.store.reader import Reader

#: After SIGTERM; the daemon waits for three.
_END_WITHIN_S = 2.5


def main() -> int:
    """Run until SIGTERM or SIGINT."""
    live_with_parent()
    parser = argparse.ArgumentParser(prog="python -m daemon.consumers", description="Bring results to one consumer.")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the line's coserve.yaml")
    parser.add_argument("name", metavar="NAME", help="which of its `consumers`")
    parser.add_argument("--slate", type=int, metavar="FD", help="where the daemon reads how it is")
    parser.add_argument("--newest", type=int, metavar="SEQ", help="what `start: newest` begins behind")
    arguments = parser.parse_args()
    configure_logs(os.environ, sys.stderr)
    slate = None if arguments.slate is None else Slate(arguments.slate)
    try:
        config = load_config(arguments.config)
        runner = _runner(config, arguments.name, slate, arguments.newest)
    except (ConfigError, StoreError, MissingExtraError) as error:
        if slate is not None:
            slate.write({**slate.read(), "state": "refused", "last_error": str(error)})
        print(f"coserve: consumer {arguments.name} cannot run: {error}", file=sys.stderr)
        return 2
    asyncio.run(_run(runner))
    return 0


def _runner(config: Config, name: str, slate: Slate | None, newest: int | None) -> Runner:
    settings = config.consumers.get(name)
    if settings is None:
        raise ConfigError([f"there is no consumer {name} among `consumers`: {', '.join(config.consumers) or 'none'}"])
    reader = Reader(config.database)
    if settings.start == "oldest":
        newest = None
    elif newest is None:
        newest = reader.last_seq()
    return Runner(
        name,
        make(config, name),
        reader,
        PositionFile(config.positions, name),
        send=settings.send,
        newest=newest,
        slate=slate,
    )


async def _run(runner: Runner) -> None:
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(runner.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, runner.stop)
    await runner.stopping.wait()
    _, late = await asyncio.wait((running,), timeout=_END_WITHIN_S)
    if late:
        # A connection that is being made holds a thread, which the interpreter's own end would wait for.
        structlog.get_logger("consumer").warning("consumer_cut", why=f"it did not end within {_END_WITHIN_S:g} s")
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
