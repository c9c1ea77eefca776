"""Migrates databases in children that a test kills: a path on each line of stdin, the migrations as argument.

A child starts in milliseconds, since everything is imported before it is forked. For each path one line goes out: the
child's exit status, negative for a signal.
"""

import os
import sys

import structlog

from daemon.storage.database import migrate as migrating
from daemon.storage.database.connections import StoreError, open_for_writing


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    config = migrating.alembic_config()
    config.set_main_option("script_location", sys.argv[1])
    migrating.alembic_config = lambda: config
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                migrating.migrate(open_for_writing(f"sqlite:///{line.strip()}", 1000))
            except StoreError as error:
                print(error, file=sys.stderr, flush=True)
                os._exit(3)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
