"""Addresses in `coserve.yaml`: endpoints, the database, secrets; checked and made absolute."""

import re
from collections.abc import Mapping
from pathlib import Path

from daemon.wire.sockets import ipc_problem

#: Placeholder in `security` for the folder where systemd puts the secrets of `LoadCredential=`.
CREDENTIALS = "$CREDENTIALS_DIRECTORY"

#: Behind `postgresql://`, as SQLAlchemy reads it.
_POSTGRESQL = re.compile(r"([^@/]+@)?([^@/:?\[\]]*|\[[^@/\]]*\])(:\d{1,5})?/[^@/?]+(\?[^@]*)?")


def http_endpoint(value: str) -> str:
    """Return `value` unchanged; ValueError says what was expected."""
    if re.fullmatch(r"http://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}", value) is None:
        raise ValueError(
            f"expected http://ADDRESS:PORT such as http://127.0.0.1:9470 (TLS: docs/security.md), not {value!r}"
        )
    return value


def absolute_file(given: Path, folder: Path, environ: Mapping[str, str]) -> Path:
    """Return the absolute path. An unset $CREDENTIALS_DIRECTORY stays in it: only a start of the line needs it."""
    return folder / str(given).replace(CREDENTIALS, environ.get(CREDENTIALS[1:]) or CREDENTIALS)


def absolute_database(value: str, folder: Path) -> str:
    """Return the URL with an absolute file for SQLite, with the driver for PostgreSQL."""
    scheme, separator, rest = value.partition("://")
    if not separator or not re.fullmatch(r"[a-z0-9]+(\+[a-z0-9_]+)?", scheme):
        raise ValueError(f"expected a SQLAlchemy URL such as sqlite:///inspection.db, not {scheme!r}")
    if scheme in ("postgresql", "postgresql+psycopg"):
        if _POSTGRESQL.fullmatch(rest) is None:  # and the value, which may hold a password, is not repeated
            raise ValueError(
                "expected postgresql://USER@HOST:PORT/DATABASE, or postgresql://USER@/DATABASE?host=/run/postgresql;"
                " in a password all but letters and digits is percent-encoded"
            )
        return f"postgresql+psycopg://{rest}"
    if scheme.split("+")[0] != "sqlite":
        raise ValueError(f"cannot use {scheme}://: expected sqlite:///FILE or postgresql://USER@HOST/DATABASE")
    file = rest.removeprefix("/")
    if file in ("", ":memory:"):
        raise ValueError("expected a file, for example sqlite:///inspection.db: results in memory are lost")
    return f"{scheme}:///{folder / file}"


def absolute_endpoint(value: str, folder: Path, environ: Mapping[str, str]) -> str:
    if value.startswith("tcp://"):
        if re.fullmatch(r"tcp://[^:/]+(:\d{1,5}|:\*)|tcp://\[[0-9a-fA-F:]+\]:(\d{1,5}|\*)", value) is None:
            raise ValueError(f"expected tcp://ADDRESS:PORT, not {value!r}")
        return value
    if not value.startswith("ipc://"):
        raise ValueError(f"expected an endpoint such as ipc://run/intake.sock or tcp://127.0.0.1:5570, not {value!r}")
    runtime = environ.get("RUNTIME_DIRECTORY") or str(folder / "run")
    path = folder / value.removeprefix("ipc://").replace("$RUNTIME_DIRECTORY", runtime)
    problem = ipc_problem(str(path))
    if problem:
        raise ValueError(problem)
    return f"ipc://{path}"
