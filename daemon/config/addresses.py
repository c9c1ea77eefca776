"""Addresses in `coserve.yaml`: endpoints, the database, secrets; checked and made absolute."""

import re
from collections.abc import Mapping
from pathlib import Path

from daemon.wire.sockets import ipc_problem

#: Placeholder in `security` for the folder where systemd puts the secrets of `LoadCredential=`.
CREDENTIALS = "$CREDENTIALS_DIRECTORY"


def http_endpoint(value: str) -> str:
    if re.fullmatch(r"http://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}", value) is None:
        raise ValueError(
            f"expected http://ADDRESS:PORT such as http://127.0.0.1:9470 (TLS: docs/security.md), not {value!r}"
        )
    return value


def absolute_file(given: Path, folder: Path, environ: Mapping[str, str]) -> Path:
    """Make a path absolute. An unset $CREDENTIALS_DIRECTORY stays: only a start needs it."""
    return folder / str(given).replace(CREDENTIALS, environ.get(CREDENTIALS[1:]) or CREDENTIALS)


def absolute_database(value: str, folder: Path) -> str:
    scheme, separator, rest = value.partition("://")
    if not separator or scheme != "sqlite":  # the rest may hold a password, and is not repeated
        raise ValueError(
            f"a line keeps its results in a SQLite file: expected sqlite:///FILE, for example sqlite:///inspection.db,"
            f" not {scheme!r}; a plant's PostgreSQL gets them through the consumer `plant` (docs/plant.md)"
        )
    file = rest.removeprefix("/")
    if file in ("", ":memory:"):
        raise ValueError("expected a file, for example sqlite:///inspection.db: results in memory are lost")
    return f"sqlite:///{folder / file}"


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
