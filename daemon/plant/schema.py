"""Make the hub's schema: its tables, and the function that makes a day's partition."""

from sqlalchemy import Connection, Engine, create_engine, select, text
from sqlalchemy.engine import make_url

from daemon.consumers.plant.tables import VIEWS, lines, metadata
from daemon.errors import StartError

#: Two hubs that start at once wait for each other.
_SCHEMA_LOCK = int.from_bytes(b"plant", "big")
#: The version of the tables and of `ensure_day`; a hub refuses a newer one.
SCHEMA_VERSION = 4
#: Columns that came later.
_ADDED = (
    'ALTER TABLE reviews ADD COLUMN IF NOT EXISTS of_epoch text COLLATE "C"',
    "ALTER TABLE lines ADD COLUMN IF NOT EXISTS defects jsonb",
)
_OTHER_DAYS = "CREATE TABLE IF NOT EXISTS inspections_other PARTITION OF inspections DEFAULT"
#: Lines may not make tables: this function, which runs as the hub, makes the day of their rows for them. A day that is
#: far off, or whose rows came before it could be made, stays in `inspections_other`.
_ENSURE_DAY = """
    CREATE OR REPLACE FUNCTION ensure_day(wanted date) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    SET search_path FROM CURRENT AS $$
    BEGIN
        IF wanted < current_date - 3660 OR wanted > current_date + 7 THEN RETURN; END IF;
        IF EXISTS (SELECT FROM partitions WHERE day = wanted) THEN RETURN; END IF;
        PERFORM pg_advisory_xact_lock(hashtext('ensure_day'));
        IF EXISTS (SELECT FROM partitions WHERE day = wanted) THEN RETURN; END IF;
        EXECUTE format(
            'CREATE TABLE IF NOT EXISTS inspections_%s PARTITION OF inspections FOR VALUES FROM (%L) TO (%L)',
            to_char(wanted, 'YYYYMMDD'), wanted::text || ' 00:00:00+00', (wanted + 1)::text || ' 00:00:00+00'
        );
        INSERT INTO partitions VALUES (wanted) ON CONFLICT DO NOTHING;
    EXCEPTION WHEN check_violation THEN NULL;
    END $$
"""


def open_database(url: str, password: str | None = None) -> Engine:
    address = make_url(url)
    if password is not None:
        address = address.set(password=password)
    # Otherwise psycopg returns bytes from a database in SQL_ASCII, and `require_utf8` cannot refuse it in words.
    arguments = {"connect_timeout": 10, "client_encoding": "utf8"}
    return create_engine(address, pool_pre_ping=True, connect_args=arguments)


def require_utf8(connection: Connection) -> None:
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
    if encoding != "UTF8":
        raise StartError(
            f"the hub's database has the encoding {encoding}, which cannot hold every text: create it again with"
            " createdb --encoding UTF8 --template template0"
        )


def make_schema(engine: Engine) -> int:
    """Make what is missing in one transaction; return the version. StartError for a newer one."""
    with engine.begin() as connection:
        require_utf8(connection)
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK})
        connection.execute(text("CREATE TABLE IF NOT EXISTS schema_version (version integer NOT NULL)"))
        present = connection.execute(text("SELECT version FROM schema_version")).scalar()
        if present is not None and present > SCHEMA_VERSION:
            raise StartError(
                f"the hub's database has schema {present}, and this CoServe knows {SCHEMA_VERSION}: upgrade CoServe"
            )
        metadata.create_all(connection)
        # A role's own temporary tables come first unless they are named last: no line's may stand for the hub's.
        connection.execute(text("SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true)"))
        views = [f"CREATE OR REPLACE VIEW {name} AS {select}" for name, select in VIEWS.items()]
        for statement in (_OTHER_DAYS, _ENSURE_DAY, *((*_ADDED, *views) if present != SCHEMA_VERSION else ())):
            connection.execute(text(statement.replace(":", r"\:")))
        connection.execute(text("DELETE FROM schema_version"))
        connection.execute(text("INSERT INTO schema_version VALUES (:version)"), {"version": SCHEMA_VERSION})
        return SCHEMA_VERSION


def unknown_line(connection: Connection, line: str) -> str | None:
    names = connection.execute(select(lines.c.line).order_by(lines.c.line)).scalars().all()
    return None if line in names else f"the hub knows no line {line!r}, only: {', '.join(names) or 'none yet'}"


def database_problem(engine: Engine, error: Exception) -> str:
    cause = str(getattr(error, "orig", None) or error).strip().splitlines()
    return f"{engine.url.render_as_string()}: {cause[0] if cause else type(error).__name__}"
