"""`python -m daemon.delivery CONFIG NAME`: one consumer as a process. Exit status 2: settings or packages are wrong."""

import argparse
import contextlib
import resource
import sys
from pathlib import Path

from daemon.config.settings import load_config
from daemon.consumers.kinds import make_consumer
from daemon.delivery.deliveries import SharedStatusPage, StoredLine
from daemon.delivery.runner import run_consumer
from daemon.errors import ConfigError, MissingExtraError
from daemon.host.children import live_with_parent
from daemon.host.logs import configure_logs
from daemon.storage.database.connections import StoreError
from daemon.units import printable

#: A consumer takes about 70 MB. Beyond this it fails and restarts, instead of using up the unit's MemoryMax=.
_MAX_MEMORY_BYTES = 512 * 2**20


def main() -> int:
    live_with_parent()
    with contextlib.suppress(ValueError):  # a stricter limit is in force already
        resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    parser = argparse.ArgumentParser(prog="python -m daemon.delivery", description="Bring results to one consumer.")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the line's coserve.yaml")
    parser.add_argument("name", metavar="NAME", help="which of its `consumers`")
    parser.add_argument("--status-page", type=int, metavar="FD", help="where the daemon reads how it is")
    parser.add_argument("--heart", type=int, metavar="FD", help="eventfd for heartbeats to the daemon")
    parser.add_argument("--newest", type=int, metavar="SEQ", help="what `start: newest` begins behind")
    arguments = parser.parse_args()
    configure_logs(sys.stderr)
    status_page = None if arguments.status_page is None else SharedStatusPage(arguments.status_page)
    try:
        _run(arguments, status_page)
    except (ConfigError, StoreError, MissingExtraError) as error:
        if status_page is not None:
            status_page.write({**status_page.read(), "state": "refused", "last_error": str(error)})
        print(f"coserve: consumer {arguments.name} cannot run: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace, status_page: SharedStatusPage | None) -> None:
    config, name = load_config(arguments.config), arguments.name
    settings = config.consumers.get(name)
    if settings is None:
        raise ConfigError([f"there is no consumer {name} among `consumers`: {', '.join(config.consumers) or 'none'}"])
    consumer = make_consumer(name, settings, config.journal, StoredLine(config))
    options = {"newest": arguments.newest, "status_page": status_page, "heart": arguments.heart}
    run_consumer(name, consumer, config.database, config.positions, settings, **options)


if __name__ == "__main__":
    sys.exit(main())
