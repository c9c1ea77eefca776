"""`coserve export`: an audit package of chosen boards, complete under its name or absent.

First the rows, in one read transaction; then the pictures, while the writer can checkpoint its log; last the manifest
and the checksums of every file.
"""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from sqlalchemy import Engine

from daemon.config.settings import Config
from daemon.registry.signing import SIGNATURE, key_id, read_signing_key, sign
from daemon.storage.database.upkeep import room_problem
from experts.durable import sync
from experts.versions import current_user
from experts.weights import file_sha256
from tools.query.evidence import check_evidence
from tools.query.package.contents import copy_experts, copy_pictures, write_rows
from tools.query.reading import BoardSelection
from tools.terminal.console import CommandError

SUMS = "SHA256SUMS"
MANIFEST = "manifest.json"
_FORMAT = 1
#: A file that marks an unfinished package; the export that writes the package holds its lock.
_MARK = ".coserve-export"
#: A generous estimate for the rows of an image.
_ROW_BYTES = 4000


class PackageError(CommandError):
    """The package cannot be written; the text says why, and what to do."""


class OutputInUseError(CommandError):
    """The place is in use, or holds files that no export has written."""

    status = 2


@dataclass(frozen=True, slots=True)
class PackageReport:
    """`fingerprint` is the sha256 of the package's SHA256SUMS."""

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
    selection: BoardSelection,
    out: Path,
    *,
    with_weights: bool,
    sign_with: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> PackageReport:
    """Write the package `out`. After PackageError, OutputInUseError or OSError nothing is left of it."""
    key = None if sign_with is None else read_signing_key(sign_with)
    with unfinished_folder(out) as part:
        progress("rows")
        with engine.connect() as connection:
            written = write_rows(connection, selection, part / "rows")
            if not written.counts["boards"]:
                raise PackageError("no board matches: `coserve results --boards` lists those that closed last")
            evidence = check_evidence(
                lambda: nullcontext(connection), settings.images, selection.condition(), with_tables=False
            )
        need_room(settings, out, written.picture_bytes + _ROW_BYTES)
        progress("pictures")
        pictures = copy_pictures(settings, written, part)
        progress("experts")
        experts, warnings = copy_experts(settings.catalog, written, part / "experts", with_weights=with_weights)
        deleted = sorted(name for name, text in written.rules.items() if text is None)
        warnings = [
            *(f"rules {name}: the database no longer has their text" for name in deleted),
            *warnings,
            *(f"inspection {number}: its picture is not what the camera sent (sha256)" for number in pictures.damaged),
            *evidence.problems,
            *evidence.gaps,
        ]
        (part / "rules").mkdir()
        for name, text in written.rules.items():
            if text is not None:
                (part / "rules" / f"{name}.yaml").write_text(text, encoding="utf-8", newline="")
        manifest = {
            "coserve_export": _FORMAT,
            "coserve": version("coserve"),
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "line": {
                "name": settings.line,
                "epoch": written.epoch,
                "host": socket.gethostname(),
                "config": str(config.resolve()),
                "database": settings.database,
            },
            "selection": asdict(selection),
            "last_seq": written.last_seq,
            "rows": written.counts,
            "pictures": asdict(pictures),
            "rules": sorted(written.rules),
            "experts": experts,
            "judged_once_more": evidence.counts,
            "signed_by": {"key": key_id(key.public_key()), "user": current_user()} if key else None,
            "warnings": warnings,
        }
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        shutil.copyfile(Path(__file__).with_name("README.txt"), part / "README.txt")
        progress("checksums")
        files, size_bytes = _write_sums(part)
        if key is not None:
            sign(part / SUMS, key)
            sync(part / SIGNATURE)
            files += 1
        fingerprint = file_sha256(part / SUMS)
    return PackageReport(
        boards=written.counts["boards"],
        images=written.counts["inspections"],
        pictures=pictures.copied,
        files=files,
        bytes=size_bytes,
        missing=pictures.missing,
        warnings=warnings,
        fingerprint=fingerprint,
    )


@contextmanager
def unfinished_folder(out: Path) -> Iterator[Path]:
    """Yield `OUT.part`, locked by this process; it becomes `out` at the end, or is deleted after an error."""
    part = out.with_name(f"{out.name}.part")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputInUseError(f"{out} is there and not empty: name another folder, or move that one away")
    mark = part / _MARK
    if part.exists() and any(part.iterdir()) and not mark.is_file():
        raise OutputInUseError(f"{part} was not left by an export: move it away")
    part.mkdir(mode=0o750, exist_ok=True)
    with mark.open("w", encoding="utf-8") as locked:
        claim(locked.fileno(), mark, out)
        try:
            _empty(part)  # an export that was killed left its files
            yield part
            mark.unlink()
            sync(part)
            part.rename(out)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    sync(out.absolute().parent)


def claim(fd: int, part: Path, out: Path) -> None:
    """Lock `part`, open as `fd`. Raises OutputInUseError if another process writes `out`, or has just finished."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputInUseError(f"{out} is being written by another process: wait for it, or name another") from None
    if not part.exists() or part.stat().st_ino != os.fstat(fd).st_ino:
        raise OutputInUseError(f"{out} was written by another process just now")


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _MARK:
            entry.unlink()


def need_room(settings: Config, out: Path, size_bytes: int, what: str = "the package") -> None:
    """Raise CommandError if `what` would take space that a line on the same disk reserves."""
    folder = out.absolute().parent
    if settings.journal.exists() and settings.journal.stat().st_dev == folder.stat().st_dev:
        size_bytes += settings.retention.reserve + (settings.retention.free or 0)
        what += ", with what the line keeps free,"
    problem = room_problem(folder, size_bytes, what)
    if problem:
        raise CommandError(problem)


def _write_sums(package: Path) -> tuple[int, int]:
    """Write checksums of all other files as `sha256sum` does; return the number of files, and their bytes."""
    files = sorted(path for path in package.rglob("*") if path.is_file() and path.name != _MARK)
    size_bytes = 0
    with (package / SUMS).open("w", encoding="utf-8") as sums:
        for path in files:
            sums.write(f"{file_sha256(path)}  {path.relative_to(package).as_posix()}\n")
            size_bytes += path.stat().st_size
            sync(path)
    for path in (package / SUMS, *filter(Path.is_dir, package.rglob("*"))):
        sync(path)
    return len(files) + 1, size_bytes
