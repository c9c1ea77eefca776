"""`coserve export`: an audit package of chosen boards, complete under its name or not there at all.

First the rows, in one read transaction; then the pictures, when the line's log is free again; last the manifest and
the checksums of every file.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from daemon.config.settings import Config
from daemon.storage.database.connections import shown
from daemon.storage.database.copies import room_problem
from experts.durable import sync
from tools.query.package.chosen import Selection, Taken, take_rows
from tools.query.package.experts import Experts, take_experts
from tools.query.package.pictures import Pictures, copy_pictures
from tools.query.package.readme import README

FORMAT = 1
SUMS = "SHA256SUMS"
MANIFEST = "manifest.json"
#: In the unfinished folder: it is ours, and whoever holds its lock is writing.
_MARK = ".coserve-export"
#: Of an image's rows, generously, in all forms.
_ROW_BYTES = 8000

Progress = Callable[[str], None]


class PackageError(Exception):
    """There is no package; the text says why and what to do."""


class FolderInUseError(Exception):
    """The folder is not ours to fill."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a package holds. `fingerprint` is the sha256 of its SHA256SUMS."""

    boards: int
    images: int
    pictures: int
    files: int
    bytes: int
    missing: dict[str, int]
    warnings: list[str]
    fingerprint: str


def write_package(
    config: Path,
    settings: Config,
    engine: Engine,
    selection: Selection,
    out: Path,
    *,
    with_weights: bool,
    progress: Progress = lambda _: None,
) -> Report:
    """Write the package `out`; PackageError, FolderInUseError or OSError say why not, and nothing is left then."""
    with _unfinished(out) as part:
        rows = part / "rows"
        rows.mkdir()
        progress("rows")
        with engine.connect() as connection:
            taken = take_rows(connection, selection, rows)
        if not taken.rows.get("boards"):
            raise PackageError("no board is like that: `coserve results --boards` lists those that closed last")
        _need_room(settings, out, taken.picture_bytes + _ROW_BYTES)
        progress("pictures")
        pictures = copy_pictures(settings, taken, rows, part)
        progress("experts")
        experts = take_experts(settings.catalog, taken, part / "experts", with_weights=with_weights)
        _write_rules(taken, part / "rules")
        warnings = _warnings(taken, pictures, experts)
        manifest = _manifest(config, settings, selection, taken, pictures, experts, warnings)
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (part / "README.txt").write_text(README, encoding="utf-8")
        progress("checksums")
        files, size = _write_sums(part)
        fingerprint = sha256_of(part / SUMS)
    return Report(
        *(taken.rows["boards"], taken.rows["inspections"], pictures.copied, files, size, pictures.missing, warnings),
        fingerprint,
    )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _unfinished(out: Path) -> Iterator[Path]:
    """`OUT.part`, of this process alone; it becomes `out` at the end, and goes where that fails."""
    part = out.with_name(f"{out.name}.part")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FolderInUseError(f"{out} is there and not empty: name another folder, or move that one away")
    mark = part / _MARK
    if part.exists() and any(part.iterdir()) and not mark.is_file():
        raise FolderInUseError(f"{part} is not left from an export of ours: move it away")
    try:
        part.mkdir(mode=0o750, exist_ok=True)
        with mark.open("w", encoding="utf-8") as held:
            _claim(held.fileno(), mark, out)
            try:
                _empty(part, but=_MARK)  # what one that was killed has left
                yield part
                mark.unlink()
                sync(part)
                part.rename(out)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
    except BaseException:
        _remove_unless_held(part)
        raise
    sync(out.absolute().parent)


def _claim(fd: int, mark: Path, out: Path) -> None:
    """FolderInUseError where `mark`, open as `fd`, is or was another export's."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FolderInUseError(f"{out} is being written by another export: wait for it, or name another") from None
    if not mark.exists() or mark.stat().st_ino != os.fstat(fd).st_ino:
        raise FolderInUseError(f"{out} was written by another export just now")


def _remove_unless_held(part: Path) -> None:
    """Remove `part`, if no export writes it: a signal may have come before its own claim was known."""
    with suppress(OSError), (part / _MARK).open("r+b") as left:  # NFS locks nothing that is open for reading
        fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(part, ignore_errors=True)
    with suppress(OSError):
        part.rmdir()  # one without a mark yet


def _empty(folder: Path, but: str) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != but:
            entry.unlink()


def _need_room(settings: Config, out: Path, size: int) -> None:
    """PackageError where pictures do not fit, or would take the room that a line on the same disk keeps for itself."""
    folder, what = out.absolute().parent, "the package"
    if settings.journal.exists() and settings.journal.stat().st_dev == folder.stat().st_dev:
        size += settings.retention.reserve + (settings.retention.free or 0)
        what += ", with what the line keeps free,"
    problem = room_problem(folder, size, what)
    if problem:
        raise PackageError(problem)


def _write_rules(taken: Taken, folder: Path) -> None:
    folder.mkdir()
    for rules_version, text in taken.rules.items():
        if text is not None:
            (folder / f"{rules_version}.yaml").write_text(text, encoding="utf-8", newline="")


def _warnings(taken: Taken, pictures: Pictures, experts: Experts) -> list[str]:
    gone = sorted(name for name, text in taken.rules.items() if text is None)
    found = [f"rules {name}: their text is no longer in the database" for name in gone]
    found += experts.warnings
    found += [f"inspection {number}: its picture is not what the camera sent (sha256)" for number in pictures.damaged]
    if not taken.is_with_parquet:
        found.append("no Parquet files: they need pyarrow, the extra `export`")
    return found


def _manifest(
    config: Path,
    settings: Config,
    selection: Selection,
    taken: Taken,
    pictures: Pictures,
    experts: Experts,
    warnings: list[str],
) -> dict[str, Any]:
    return {
        "coserve_export": FORMAT,
        "coserve": version("coserve"),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "line": {"host": socket.gethostname(), "config": str(config.resolve()), "database": shown(settings.database)},
        "selection": asdict(selection),
        "last_seq": taken.last_seq,
        "rows": taken.rows,
        "pictures": asdict(pictures),
        "rules": sorted(taken.rules),
        "experts": experts.listed,
        "warnings": warnings,
    }


def _write_sums(package: Path) -> tuple[int, int]:
    """Checksums as `sha256sum` writes them, of all files but themselves; how many files, and their bytes."""
    files = sorted(path for path in package.rglob("*") if path.is_file() and path.name != _MARK)
    size = 0
    with (package / SUMS).open("w", encoding="utf-8") as sums:
        for path in files:
            sums.write(f"{sha256_of(path)}  {path.relative_to(package).as_posix()}\n")
            size += path.stat().st_size
            sync(path)
    sync(package / SUMS)
    return len(files) + 1, size
