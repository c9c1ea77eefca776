"""A real PostgreSQL server of a test's own: a Unix socket, a port of loopback, nothing synced."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_port
from tests.waiting import PATIENCE_S

WANTED = "no PostgreSQL 15 or newer, or no psycopg: apt-get install postgresql, and the extra `postgresql`"
#: Who may not be root.
_USER = "postgres"


def programs() -> Path | None:
    """The newest server's programs, where they can be run here."""
    if os.geteuid() == 0 and _USER not in {user.pw_name for user in pwd.getpwall()}:
        return None
    servers = [path for path in Path("/usr/lib/postgresql").glob("*/bin/postgres") if int(path.parts[-3]) >= 15]
    return max(servers, key=lambda path: int(path.parts[-3])).parent if servers else None


class Server:
    """`with server:` it answers. Stopped and started again it has its databases still."""

    def __init__(self, folder: Path, *settings: str) -> None:
        folder_of_programs = programs()
        assert folder_of_programs is not None, WANTED
        self._programs = folder_of_programs
        self._folder = folder
        self._settings = [
            option for setting in ("listen_addresses=127.0.0.1", "fsync=off", *settings) for option in ("-c", setting)
        ]
        self._port = free_port()
        self._databases = count(1)
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            shutil.chown(folder, _USER, _USER)
            self._as = {"user": _USER, "group": _USER, "extra_groups": ()}
        self._process: subprocess.Popen[bytes] | None = None
        # A language's order, which is not that of SQLite.
        order = ("--encoding=UTF8", "--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US")
        self._run("initdb", "--pgdata", folder / "data", "--username=coserve", "--auth=trust", "--no-sync", *order)

    def url(self, name: str, host: str = "") -> str:
        """A new database, behind the Unix socket or at `host`, which is loopback."""
        import psycopg

        name = f"{name}_{next(self._databases)}"
        with psycopg.connect(self._conninfo("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://coserve:secret@/{name}?host={host or self._folder}&port={self._port}"

    def start(self) -> None:
        options = ("-k", self._folder, "-p", str(self._port), *self._settings)
        with (self._folder / "log").open("ab") as log:
            program = [self._programs / "postgres", "-D", self._folder / "data", *options]
            self._process = subprocess.Popen(program, stdout=log, stderr=log, cwd=self._folder, **self._as)
        import psycopg

        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                psycopg.connect(self._conninfo("postgres")).close()
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self._folder / "log").read_text()
                assert time.monotonic() < until_s, (self._folder / "log").read_text()
                time.sleep(0.02)
            else:
                return

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT ends its sessions in order; after SIGQUIT it recovers what was committed, as after a power cut."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE_S)

    def kill(self) -> None:
        """SIGKILL to every process of the server at once."""
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        processes = [server, *server.children()]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(PATIENCE_S)
        psutil.wait_procs(processes, PATIENCE_S)

    def _conninfo(self, database: str) -> str:
        return f"host={self._folder} port={self._port} user=coserve dbname={database}"

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(self._programs / program), *map(str, arguments)]
        run = subprocess.run(command, capture_output=True, text=True, cwd=self._folder, check=False, **self._as)
        assert run.returncode == 0, run.stderr


@contextmanager
def a_server(*settings: str) -> Iterator[Server]:
    """A server in a folder with a short name, for its socket's sake."""
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        server = Server(Path(folder), *settings)
        try:
            server.start()
            yield server
        finally:
            server.stop(signal.SIGQUIT)
