"""`coserve restore`: a backup into an empty folder; every byte is compared before the folder gets its name.

The backup's editions keep their numbers. What was in force comes into force as a new one, above them all.
"""

import io
import os
import shutil
import tarfile
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from pydantic import ValidationError

from daemon.config.settings import load_config
from daemon.errors import ConfigError
from daemon.host.folders import make_folder
from daemon.storage.database.migrate import known_schemas
from daemon.storage.database.upkeep import room_problem
from experts.durable import sync
from experts.editions.edition import EditionError
from experts.editions.folder import EditionFolder
from experts.people import current_user
from tools.backup.archive import CONFIG, FORMAT, HEAD, SUMS, AnyHead, Head, Progress, forget_members
from tools.backup.gentle import PIECE_BYTES
from tools.terminal.console import CommandError, os_errors_end

_HEAD_BYTES = 64 * 2**10
#: A line has a few, such as an empty catalog.
_MAX_EMPTY = 100
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


@dataclass(frozen=True, slots=True)
class Restored:
    """`left_out` counts kept images that the archive lacks."""

    config: Path
    files: int
    made: str
    last_seq: int
    waiting: int
    left_out: int
    edition: int


def unpack(
    archive: Path, folder: Path, progress: Progress = lambda _what, _done, _total: None, note: str | None = None
) -> Restored:
    """Unpack `archive` whole or not at all; CommandError names a damaged member. The new edition has `note`."""
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CommandError(f"{folder} is not an empty folder: name a new one", status=2)
    part = folder.with_name(f".{folder.name}.part")
    with os_errors_end(folder), ExitStack() as stack:
        total = archive.stat().st_size
        make_folder(folder.parent)
        problem = room_problem(folder.parent, total, "the restored line")
        if problem:
            raise CommandError(problem)
        if part.exists():
            shutil.rmtree(part)  # left by a restore that was killed
        stack.callback(shutil.rmtree, part, ignore_errors=True)
        make_folder(part)
        head, files = _Unpacking(archive, part, total, progress).run()
        note = archive.name if note is None else f"{archive.name}: {note}"
        edition = _put_in_force(archive, part, head.highest_edition + 1, note)
        part.replace(folder)
        sync(folder.parent)
    return Restored(folder / CONFIG, files, head.made, head.last_seq, head.waiting, head.images_left_out, edition)


def _put_in_force(archive: Path, part: Path, number: int, note: str) -> int:
    """Make the edition `number` of the one that was in force, and write the working files from it."""
    try:
        config = load_config(part / CONFIG, {})
        if not all(file.resolve().is_relative_to(part.resolve()) for file in (config.catalog, config.rules)):
            raise CommandError(f"{archive}: {CONFIG} leads out of its folder: the archive was altered")
        folder = EditionFolder(config.catalog)
        before = folder.in_force()
        if before is None:
            raise CommandError(f"{archive} has no edition in force: the archive was altered")
        made = {"number": number, "parent": before.number, "created_at": datetime.now(UTC), "who": current_user()}
        edition = before.model_copy(update={**made, "why": "restore", "note": note, "ends_earlier": False})
        with folder.changing() as writer:
            writer.add(edition)
            writer.point(edition, config.rules)
            config.catalog.unlink(missing_ok=True)  # it may name weights that are elsewhere
            writer.follow(config.rules)
    except (ConfigError, EditionError) as error:
        raise CommandError(f"{archive}: what was in force cannot be put in force again: {error}") from None
    return edition.number


class _Archive(io.FileIO):
    """Reads in pieces: tarfile would read a member's extended head whole, however long it claims to be."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= PIECE_BYTES:
            raise tarfile.ReadError(f"a head of {size} bytes")
        return super().read(size) or b""


class _Unpacking:
    """One pass over the archive: nothing in it is trusted before it is checked."""

    def __init__(self, archive: Path, part: Path, total: int, progress: Progress) -> None:
        self._archive = archive
        self._part = part
        self._total = total
        self._progress = progress
        self._sums: dict[str, str] = {}
        self._empty = 0
        self._last = "its beginning"

    def run(self) -> tuple[Head, int]:
        try:
            with _Archive(self._archive) as file, tarfile.open(fileobj=file, mode="r:") as tar:
                head = self._head(tar)
                while (member := tar.next()) is not None and member.name != SUMS:
                    self._take(tar, member)
                    forget_members(tar)
                most = sum(len(digest) + len(os.fsencode(name)) + 3 for name, digest in self._sums.items())
                self._compare(self._read(tar, member, most).decode(errors="surrogateescape"))
            for folder in {(self._part / name).parent for name in self._sums if name != HEAD}:
                sync(folder)
        except (tarfile.TarError, EOFError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise CommandError(f"{self._archive} is damaged at {self._last}: {error}; take another archive") from error
        return head, len(self._sums)

    def _head(self, tar: tarfile.TarFile) -> Head:
        """Read the versions, which come first; CommandError if this program cannot read the rest."""
        member = tar.next()
        if member is None or member.name != HEAD:
            raise CommandError(f"{self._archive} is not a backup of a line: it does not begin with {HEAD}")
        text = self._read(tar, member, _HEAD_BYTES)
        self._sums[HEAD] = sha256(text).hexdigest()
        try:
            found = AnyHead.model_validate_json(text)
            head = Head.model_validate_json(text) if found.coserve_backup == FORMAT else None
        except ValidationError:
            raise ValueError("it does not describe a backup") from None
        number, schema, writer = found.coserve_backup, found.schema_name, found.coserve
        if head is None or schema not in (None, *known_schemas()):
            here = version("coserve")
            remedy = f"install CoServe {writer} or newer"
            if writer == here:
                remedy = "a development version made it, and only that version restores it"
            raise CommandError(
                f"{self._archive} was made by CoServe {writer} (format {number}, schema {schema}), and this is"
                f" {here}: {remedy}"
            )
        return head

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write one member, a plain file whose path stays inside."""
        self._last = member.name
        confined = tarfile.data_filter(member, str(self._part))
        if not _is_plain(member) or confined is None or confined.name != member.name or member.name in self._sums:
            raise CommandError(f"{self._archive}: {member.name} is not a file of a backup: the archive was altered")
        self._empty += member.size == 0
        if self._empty > _MAX_EMPTY:
            raise ValueError(f"no backup has over {_MAX_EMPTY} empty files")
        source = tar.extractfile(member)
        assert source is not None
        target = self._part / member.name
        make_folder(target.parent)
        digest = sha256()
        mode = 0o640 if (member.mode or 0) & 0o077 else 0o600
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with source, open(fd, "wb") as file:  # noqa: PTH123 - a descriptor with its mode
            os.fchmod(fd, mode)
            while piece := source.read(PIECE_BYTES):
                digest.update(piece)
                file.write(piece)
                self._progress(member.name, tar.offset, self._total)
            file.flush()
            os.fsync(fd)
        if target.stat().st_size != member.size:
            raise tarfile.ReadError("unexpected end of data")
        self._sums[member.name] = digest.hexdigest()

    def _read(self, tar: tarfile.TarFile, member: tarfile.TarInfo | None, most_bytes: int) -> bytes:
        if member is None:
            raise EOFError("it is cut off there")
        self._last = member.name
        source = tar.extractfile(member) if _is_plain(member) and member.size <= most_bytes else None
        data = source.read() if source is not None else b""
        if source is None or len(data) != member.size:
            raise EOFError(f"expected a plain file of {member.size} bytes, at most {most_bytes}")
        return data

    def _compare(self, text: str) -> None:
        expected = {name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}
        wrong = sorted(
            name for name in {*expected, *self._sums} if expected.get(name, "-") != self._sums.get(name, "+")
        )
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ValueError(f"{', '.join(wrong[:3])}{more} differ from it")


def _is_plain(member: tarfile.TarInfo) -> bool:
    """Return True for a file whose bytes are all in the archive: a sparse one could expand without end."""
    return member.type in _PLAIN and not member.issparse()
