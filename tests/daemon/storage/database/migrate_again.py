"""A made-up next schema, and a program that brings databases to it in children that a test kills.

Reads a path on each line of stdin. A child starts in milliseconds, since everything is imported before it is forked.
For each path one line goes out: the child's exit status, negative for a signal.
"""

import os
import sys

import structlog
from sqlalchemy import Connection

from daemon.storage.database import migrate as migrating
from daemon.storage.database.connections import StoreError, open_for_writing


def make_inspections_anew(connection: Connection) -> None:
    """Add a column to the largest table by moving every row, as SQLite must for most changes."""
    table = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name = 'inspections'").scalar_one()
    made = table.replace("inspections", "moved", 1).replace("(", "(camera TEXT NOT NULL DEFAULT 'first',", 1)
    indexes = connection.exec_driver_sql(
        "SELECT sql FROM sqlite_master WHERE tbl_name = 'inspections' AND type = 'index' AND sql IS NOT NULL"
    ).scalars()
    for statement in (
        made,
        "INSERT INTO moved SELECT source, * FROM inspections",
        "DROP TABLE inspections",
        "ALTER TABLE moved RENAME TO inspections",
        *list(indexes),
    ):
        connection.exec_driver_sql(statement)


NEXT = migrating.Step("0.2.0", make_inspections_anew)


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    migrating.STEPS = (NEXT,)
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
