"""A PostgreSQL server in a folder of its own, out of reach of any network."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tools.terminal.console import CommandError


@contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """Run a server over `folder`, which the first run makes; yield its database's address. Raises CommandError."""
    servers = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if int(path.parent.name) >= 15]
    if not servers:
        raise CommandError("there is no PostgreSQL 15 or newer: make system-tools installs it")
    programs, folder = max(servers, key=lambda path: int(path.parent.name)), folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    options: dict[str, Any] = {"cwd": "/", "start_new_session": True}  # a terminal's Ctrl-C must not reach it
    if os.geteuid() == 0:  # the server refuses root, and Debian's package brings this user
        shutil.chown(folder, "postgres", "postgres")
        options |= {"user": "postgres", "group": "postgres", "extra_groups": ()}
    data, log = folder / "data", folder / "server.log"
    if not data.exists():
        command = [programs / "initdb", "-D", data, "--username=coserve", "--auth=trust", "--encoding=UTF8"]
        initdb = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # noqa: S603
        if initdb.returncode:
            raise CommandError(f"PostgreSQL cannot use {folder} (--dir names another place): {initdb.stderr.strip()}")
    command = [programs / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "shared_buffers=32MB"]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, **options)  # noqa: S603
    try:
        while subprocess.run([programs / "pg_isready", "-q", "-U", "coserve", "-h", folder], check=False).returncode:  # noqa: S603
            if server.poll() is not None:
                raise CommandError(f"PostgreSQL did not start: {log.read_text(errors='replace')[-800:].strip()}")
            time.sleep(0.1)
        yield f"postgresql://coserve@/postgres?host={quote(str(folder), safe='')}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
