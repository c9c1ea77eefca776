"""Alembic's entry point: run the revisions in `versions/` on the connection that migrate.py hands over."""

import warnings

from alembic import context

from daemon.storage.database.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # One transaction for all: a migration that fails half-way leaves the database as it was. SQLite can do that.
    transactional_ddl=True,
    # SQLite alters a table by rebuilding it.
    render_as_batch=True,
)
with warnings.catch_warnings():
    # Alembic reflects no index on an expression, such as `ix_boards_serial`: a revision that makes `boards` anew has to
    # make that index too.
    warnings.filterwarnings("ignore", "Skipped unsupported reflection of expression-based index")
    context.run_migrations()
