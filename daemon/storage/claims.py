"""Claims: what a line writes, no other line writes, whether both run or not.

Every path that a line writes is claimed by a lock file: in a folder, beside a file. Two paths of one line that are
equal, or nested, are a mistake, unless both are only read. Locks of sockets end with the run.
"""

import re
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from daemon.config.settings import Config, at_their_keys, sound_config
from daemon.errors import ConfigError, StartError
from daemon.host.folders import FOLDER_LOCK, exclusive_lock, folder_problem, owner
from daemon.storage import quarantine
from daemon.storage.database.connections import sqlite_path

_JOURNAL_NAMES = re.compile(r"segment-\d+\.journal|decoding\.marks")
_IMAGE_NAMES = re.compile(r"\d{4}-\d\d-\d\d")
#: Also on a disk of its own, and of other programs that mark folders.
_ANYWHERE = re.compile(r"\..*|lost\+found")
_DATABASE_SUFFIXES = ("-wal", "-shm", "-journal", ".id")
_TRACE_BEGINS = b'{"trace"'


@dataclass(frozen=True, slots=True)
class _Claim:
    """A path of a line. `names` may lie in a folder before the line has it; `lock` claims the path."""

    key: str
    noun: str
    path: Path
    lock: Path | None = None
    names: re.Pattern[str] | None = None
    is_written: bool = True


def claim(path: Path, config: Config) -> ExitStack:
    """Lock all that the line of `path` writes until the result is closed, or nothing: ConfigError names who has it."""
    problems = claim_problems(path, config)
    with ExitStack() as locks:
        for each in _claims(path, config) if not problems else ():
            try:
                if each.lock is not None:
                    guards, stays = f"{each.key}: {each.noun} {each.path}", not each.key.startswith("endpoints.")
                    locks.enter_context(exclusive_lock(each.lock, guards, path.resolve(), stays=stays))
            except StartError as error:
                problems += error.problems
        if problems:
            raise ConfigError(at_their_keys(path, problems))
        return locks.pop_all()


def claim_problems(path: Path, config: Config) -> list[str]:
    """Return the places that are not the line's own alone, by key; each other line is named once."""
    problems: dict[str, str] = {}  # the first of each key
    of_others: dict[str, str] = {}  # the first of each other line
    ours = _claims(path, config)
    for number, each in enumerate(ours):
        for other in ours[:number]:
            is_close = each.path.is_relative_to(other.path) or other.path.is_relative_to(each.path)
            if is_close and (each.is_written or other.is_written):
                text = f"{_relation(each, other)}: name another place"
                problems.setdefault(each.key, f"{each.key}: {text}")
        if problem := _foreign_problem(each):
            problems.setdefault(each.key, f"{each.key}: {problem}")
        if each.lock is not None:
            process, line = owner(each.lock)
            if line and _is_claimed(each.lock, Path(line), path):
                running = f" (process {process})" if process else ""
                of_others.setdefault(
                    line,
                    f"{each.key}: {each.noun} {each.path} belongs to the line of {line}{running}: name another; if that"
                    f" line is gone for good, rename its coserve.yaml or remove {each.lock}",
                )
    return [*problems.values(), *of_others.values()]


def _is_claimed(lock: Path, other: Path, path: Path) -> bool:
    with suppress(OSError, ConfigError):
        try:
            if other.samefile(path):
                return False
        except (FileNotFoundError, NotADirectoryError):
            return False
        if (config := sound_config(other, {})[0]) is not None:
            return any(claim.lock == lock for claim in _claims(other, config))
    return True  # its file cannot be read


def _claims(path: Path, config: Config) -> list[_Claim]:
    """Return every path of a line: first what it reads, which it must not write."""
    read = {"rules": config.rules, "catalog": config.catalog}
    read |= {f"models.{name}.checkpoint": model.checkpoint for name, model in config.models.items()}
    claims = [_Claim("", "this configuration", path.resolve(), is_written=False)]
    claims += [_Claim(key, "the file", file.resolve(), is_written=False) for key, file in read.items()]

    def folder(key: str, noun: str, place: Path, names: re.Pattern[str] | None = None) -> None:
        place = place.resolve()
        claims.append(_Claim(key, noun, place, place / FOLDER_LOCK, names))

    def file(key: str, noun: str, place: Path) -> None:
        place = place.resolve()
        claims.append(_Claim(key, noun, place, place.with_name(place.name + FOLDER_LOCK)))

    folder("journal", "the journal", config.journal, _JOURNAL_NAMES)
    if folder_problem(config.positions) is None:  # else this line writes nothing there
        folder("journal", "the positions beside the journal,", config.positions)
        folder("journal", "the refused images beside the journal,", config.quarantine, quarantine.NAMES)
        claims.append(_Claim("journal", "the logouts beside the journal,", config.logged_out.resolve()))
    folder("images", "the folder", config.images, _IMAGE_NAMES)
    file("database", "the database", sqlite_path(config.database))
    path = claims[-1].path
    beside = [path.with_name(path.name + suffix) for suffix in _DATABASE_SUFFIXES]
    claims += [_Claim("database", "the database's", each) for each in beside]
    if config.record is not None and config.record.parent.is_dir():  # a folder for a trace is not made
        file("record", "the trace", config.record)
    sockets = [("intake", each) for each in config.endpoints.intake]
    sockets += [("results", config.endpoints.results), ("control", config.endpoints.control)]
    for key, endpoint in sockets:
        socket = Path(endpoint.removeprefix("ipc://"))
        if endpoint.startswith("ipc://") and folder_problem(socket.parent) is None:
            file(f"endpoints.{key}", "the socket", socket)
    return claims


def _relation(each: _Claim, other: _Claim) -> str:
    if each.path == other.path:
        return f"{each.noun} {each.path} is {other.noun} of `{other.key}`" if other.key else f"{each.path} is this file"
    verb = "lies in" if each.path.is_relative_to(other.path) else "holds"
    return f"{each.noun} {each.path} {verb} {other.noun} {other.path}"


def _foreign_problem(each: _Claim) -> str | None:
    with suppress(OSError):
        if each.names is not None and each.lock is not None and not each.lock.exists():
            names = sorted(file.name for file in each.path.iterdir())
            others = [name for name in names if not (each.names.fullmatch(name) or _ANYWHERE.fullmatch(name))]
            if others:
                return f"{each.noun} {each.path} holds {others[0]}, which is not the line's: name an empty folder"
        elif each.names is None and each.lock is not None and each.path.is_file():
            if each.path.stat().st_nlink > 1:
                copy = f"cp -p {each.path} {each.path}.own && mv {each.path}.own {each.path}"
                return f"{each.noun} {each.path} has a second name (a hard link), under which others write it: {copy}"
            if each.key == "record":
                with each.path.open("rb") as file:
                    if file.read(len(_TRACE_BEGINS)) not in (b"", _TRACE_BEGINS):
                        return f"{each.path} is not a trace, and would be overwritten: name another file"
    return None
