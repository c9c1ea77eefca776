"""Shared by the checks of the doctor: findings, the machine, the line if one is named, its daemon if one runs."""

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from daemon.config.settings import Config, load_config
from daemon.errors import ConfigError
from daemon.host.folders import FOLDER_LOCK, owner
from daemon.storage.database.connections import StoreError, sqlite_path
from daemon.wire.control import ControlError, ask
from tools.setup.doctor.gpu import Driver, find_driver
from tools.setup.service_files import Places, started_config

_ANSWER_S = 5.0

Grade = Literal["ok", "warn", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: `so` is the state, `do` the remedy, None if none is needed."""

    check: str
    grade: Grade
    so: str
    do: str | None = None


def ok(check: str, so: str) -> Finding:
    """Return a finding for something that is as it should be."""
    return Finding(check, "ok", so)


def warn(check: str, so: str, do: str) -> Finding:
    """Return a finding for a line that runs worse or less safely than it could."""
    return Finding(check, "warn", so, do)


def wrong(check: str, so: str, do: str) -> Finding:
    """Return a finding for a line that does not run, or loses data."""
    return Finding(check, "wrong", so, do)


@dataclass(frozen=True, slots=True)
class DoctorContext:
    """Facts that several checks need. `places` are the service's files, `user` runs the line, or will.

    `status` is the daemon's answer, `silent` why there is none; `daemon_pid` holds the line's lock.
    """

    path: Path | None
    config: Config | None
    mistakes: tuple[str, ...]
    places: Places
    is_service: bool
    user: pwd.struct_passwd
    status: dict[str, Any] | None
    silent: str
    daemon_pid: int | None
    driver: Driver | None

    @property
    def folders(self) -> dict[str, Path]:
        """Return the folders that the daemon writes to, by configuration key."""
        if self.config is None:
            return {}
        folders = {"journal": self.config.journal, "images": self.config.images}
        if (database := database_of(self.config)) is not None:
            folders["database"] = database.parent
        return folders

    @property
    def is_running(self) -> bool:
        return self.status is not None


def examine_line(path: Path | None, user: str | None = None, root: Path = Path("/")) -> DoctorContext:
    """Read the line of `path` and ask its daemon; KeyError if `user` does not exist."""
    config, mistakes = None, ()
    if path is not None:
        try:
            config = load_config(path)
        except ConfigError as error:
            mistakes = tuple(map(str, error.problems))
    places = Places(root)
    unit = places.unit.read_text(encoding="utf-8") if places.unit.is_file() else ""
    is_service = path is not None and started_config(unit) == path.resolve()
    status, silent = _ask(config)
    return DoctorContext(
        path=path,
        config=config,
        mistakes=mistakes,
        places=places,
        is_service=is_service,
        user=_user(user, "coserve" if is_service else None),
        status=status,
        silent=silent,
        daemon_pid=_owner(config),
        driver=find_driver(),
    )


def database_of(config: Config) -> Path | None:
    """Return the database's file, None if the database is not a file."""
    try:
        return sqlite_path(config.database)
    except (StoreError, ValueError):
        return None


def _user(named: str | None, service: str | None) -> pwd.struct_passwd:
    if named is not None:
        return pwd.getpwnam(named)
    if service is not None:
        try:
            return pwd.getpwnam(service)
        except KeyError:
            pass  # the check of the service says so
    return pwd.getpwuid(os.geteuid())


def _ask(config: Config | None) -> tuple[dict[str, Any] | None, str]:
    if config is None:
        return None, ""
    try:
        return ask(config.endpoints.control, "status", timeout_s=_ANSWER_S), ""
    except (ControlError, OSError) as error:
        return None, getattr(error, "code", "no_daemon")


def _owner(config: Config | None) -> int | None:
    """Return the process that holds the lock of the journal, if it lives."""
    if config is None:
        return None
    pid, _ = owner(config.journal / FOLDER_LOCK)
    return pid if pid and psutil.pid_exists(pid) else None


@contextmanager
def acting_as(user: pwd.struct_passwd) -> Iterator[bool]:
    """Run the body with the rights of `user` if root asks; else yield False and change nothing."""
    if user.pw_uid == os.geteuid():
        yield True
        return
    if os.geteuid() != 0:
        yield False
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield True
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)
