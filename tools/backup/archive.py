"""`coserve backup`: a whole line into one tar archive, while it runs.

`backup.json` (versions) comes first, `SHA256SUMS` of all members last: an archive without it was cut off. The database
is one state; the journal's segments are opened at that moment, so that the line may delete them meanwhile.
"""

import io
import os
import sqlite3
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field

from daemon.config.settings import is_setting, load_config, read_settings
from daemon.delivery.position import PositionFile
from daemon.errors import ConfigError
from daemon.storage.database.connections import sqlite_path
from daemon.storage.database.upkeep import (
    CopyState,
    copy_database,
    database_bytes,
    kept_images,
    segments_needed,
    state_of,
)
from daemon.storage.journal import segment_file
from experts.durable import sync
from experts.editions.folder import EditionFolder
from experts.editions.history import experts_of, past, waiting_weights
from routing_rules.load import KeyPath
from tools.backup.gentle import PIECE_BYTES, GentleReader, GentleWriter
from tools.terminal.console import CommandError, os_errors_end
from tools.terminal.new_files import claim, need_room

FORMAT = 2
HEAD = "backup.json"
SUMS = "SHA256SUMS"
#: A segment that is gone before it can be opened held images that were finished meanwhile; the next state does without.
_TRIES = 20

Progress = Callable[[str, int, int], None]
CONFIG = "coserve.yaml"
_DATABASE: KeyPath = ("database",)
#: Paths that the daemon itself fills; the snapshot decides what it needs of them.
_FILLED = ("journal", "images", "record")
#: Editions before the one in force whose weights are kept, so that a person may go back.
_EARLIER = 2
_NOTE = "# Written by `coserve backup`: paths lie inside this folder now. The file as it was: {before}\n"


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the archive: its path there, the source of its bytes (an `int` is an open descriptor), its size.

    `sha256` is that of weights. A part that `may_be_gone` is left out if the line has deleted its file.
    """

    name: str
    source: Path | bytes | int
    is_secret: bool = False
    sha256: str | None = None
    may_be_gone: bool = False
    size: int = 0


class Contents:
    """A whole line: its files in their places, `database`, `journal` and `images` as paths in the archive."""

    def __init__(self, path: Path, *, with_secrets: bool, environ: Mapping[str, str] = os.environ) -> None:
        """Find the files that `path` names. Raises ConfigError, CommandError."""
        self.config = load_config(path, environ)
        self.parts: list[Part] = []
        self.warnings: list[str] = []
        self.highest_edition = 0
        self._folder = path.resolve().parent
        self._with_secrets = with_secrets
        self._document = read_settings(path, environ)[0]
        self._moved: dict[KeyPath, str] = {}
        self._names = {CONFIG}
        self.database = self._place(_DATABASE, sqlite_path(self.config.database), "sqlite:///")
        places: dict[KeyPath, str] = {}
        for key, source in _paths(self.config):
            name = places[key] = self._place(key, source)
            if key[0] not in _FILLED:
                self._add_files(key, source, name)
        self.journal, self.images, self.catalog = (places[(key,)] for key in ("journal", "images", "catalog"))
        self._add_positions()
        self._add_configuration(path, any(map(is_setting, environ)))

    def _place(self, key: KeyPath, source: Path, scheme: str = "") -> str:
        """Return the part's path in the archive: as in the line if inside its folder, else by its key."""
        name = PurePosixPath(os.path.relpath(source, self._folder)).as_posix()
        if name.startswith(("..", "/")) or name in self._names:
            name = "/".join([*map(str, key[:-1] or key), source.name]).replace(":", "-")
        if name in self._names or "\n" in name:
            raise CommandError(f"{'.'.join(map(str, key))}: {source} cannot be in the backup beside {name}: rename it")
        self._names.add(name)
        stated = self._document.value(key)
        if stated is not None and stated != scheme + name:
            self._moved[key] = scheme + name
        return name

    def _add_files(self, key: KeyPath, source: Path, name: str) -> None:
        """Add a file, or a folder's public keys. Secret: files of `security`, consumers' passwords and keys."""
        if source.is_dir():
            for file in sorted(source.iterdir()):
                if file.is_file() and not file.name.endswith("_secret"):
                    self.parts.append(Part(f"{name}/{file.name}", file))
            return
        consumer = self.config.consumers.get(str(key[1])) if key[0] == "consumers" else None
        is_secret = key[0] == "security" or (consumer is not None and tuple(map(str, key[2:])) in consumer.secret_files)
        if "$CREDENTIALS_DIRECTORY" in name:
            self.warnings.append(f"{'.'.join(map(str, key))} comes from systemd: it is not in the backup")
        elif is_secret and not self._with_secrets:
            self.warnings.append(
                f"{name} is left out, a secret: take it along with --with-secrets, or put it there after `restore`"
            )
        elif source.is_file():
            self.parts.append(Part(name, source, is_secret))
        else:
            self.warnings.append(f"{source} does not exist, so the backup does not have it")

    def _add_positions(self) -> None:
        """Add each consumer's position: it gets later results from the restored line."""
        config = self.config
        folder = PurePosixPath(os.path.normpath(PurePosixPath(self.journal).parent / config.positions.name))
        for name in config.consumers:
            file = PositionFile(config.positions, name).path
            if file.is_file():
                self.parts.append(Part((folder / file.name).as_posix(), file))

    def add_editions(self, named: Mapping[int, bool]) -> None:
        """Add the editions, what they and candidates need of the weights, and the releases that the line has had.

        `named` are the editions of the copied database, True where a board is still open: the copy was made before, so
        that all of it is there. Raises CommandError, EditionError.
        """
        folder = EditionFolder(self.config.catalog)
        current = folder.current()
        if current is None:
            raise CommandError(f"{folder.pointer}: no edition is in force on this line yet: coserve reload makes it")
        numbers = [number for number in folder.numbers() if number <= current]
        self.highest_edition = max(current, *folder.numbers(), *named)
        if gone := sorted(named.keys() - {*numbers}):
            self.warnings.append(f"{folder.file(gone[0])} is gone: its boards cannot be judged any further")
        self._add_beside(folder, folder.pointer, f"{current}\n".encode())
        for number in numbers:
            self._add_beside(folder, folder.file(number))
        for file in (folder.root / "candidates.json", *sorted((folder.root / "releases").rglob("[!.]*"))):
            if file.is_file():
                self._add_beside(folder, file)
        in_force = folder.read(current)
        earlier = past(folder, in_force.parent or 0)[:_EARLIER]
        earlier += [folder.read(number) for number in numbers if named.get(number)]
        kept = waiting_weights(experts_of(folder).values()).union(*(edition.weights for edition in earlier))
        for sha256 in sorted(in_force.weights | kept):
            file, may_be_gone = folder.weights.place(sha256), sha256 not in in_force.weights
            if file.is_file():
                self._add_beside(folder, file, sha256=sha256, may_be_gone=may_be_gone)
            elif not may_be_gone:
                self.warnings.append(f"{file}: this weights file does not exist, so the backup does not have it")

    def _add_beside(self, folder: EditionFolder, file: Path, source: bytes | None = None, **fields: Any) -> None:
        name = PurePosixPath(self.catalog).parent / file.relative_to(folder.root)
        self.parts.append(Part(name.as_posix(), file if source is None else source, **fields))

    def _add_configuration(self, path: Path, is_overridden: bool) -> None:
        """Add the file; if a path or the environment changes it, a new one with the original beside it."""
        if not self._moved and not is_overridden:
            self.parts.insert(0, Part(CONFIG, path))
            return
        for key, value in self._moved.items():
            parent: Any = self._document.data
            for part in key[:-1]:
                parent = parent[part]
            parent[key[-1]] = value
        before = f"{CONFIG}.before-backup"
        if self._document.problems:
            raise ConfigError(self._document.problems)
        text = yaml.safe_dump(self._document.data, sort_keys=False, allow_unicode=True, width=120)
        changed = f"{_NOTE.format(before=before)}# from {path}\n{text}"
        self.parts[:0] = [Part(CONFIG, changed.encode()), Part(before, path)]


def _paths(value: Any, key: KeyPath = ()) -> Iterator[tuple[KeyPath, Path]]:
    if isinstance(value, Path):
        yield key, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _paths(getattr(value, name), (*key, name))
    elif isinstance(value, dict | list | tuple):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(inner, (*key, name))


@dataclass(slots=True)
class _Snapshot:
    """A copy of the database and the open segments that it needs, as (number, descriptor, bytes)."""

    copy: Path
    segments: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    state: CopyState | None = None


class AnyHead(BaseModel):
    """Content of `backup.json`, the first member of an archive, as far as every format has it."""

    model_config = ConfigDict(strict=True, frozen=True)

    coserve_backup: int
    coserve: str
    schema_name: Any = Field(alias="schema")


class Head(AnyHead):
    """All that `backup.json` has in this format."""

    schema_name: str | None = Field(alias="schema")
    made: str
    last_seq: int
    waiting: int
    highest_edition: int
    images: bool = False
    images_left_out: int = 0


class _SegmentGoneError(Exception):
    pass


def write_backup(
    config: Path,
    archive: Path,
    *,
    with_images: bool = False,
    with_secrets: bool = False,
    progress: Progress = lambda _what, _done, _total: None,
) -> dict[str, Any]:
    """Back up a line, whole or not at all; `progress` gets part, bytes done, all bytes. CommandError, ConfigError.

    Of what is returned `versions` are weights kept beside those in force, `left_out` kept images that it lacks.
    """
    contents = Contents(config, with_secrets=with_secrets)
    if archive.exists() and not (archive.is_file() and tarfile.is_tarfile(archive)):
        raise CommandError(f"{archive} exists and is not an archive: name another file")
    part = archive.with_name(f".{archive.name}.part")
    with os_errors_end(archive), _claimed(part, archive) as out, ExitStack() as stack:
        snapshot = _snapshot(contents, archive, stack, progress)
        contents.add_editions(_editions(snapshot))
        members = _members(contents, snapshot, with_images=with_images)
        need_room(contents.config, archive, sum(member.size for member in members), "the backup")
        head = _head(snapshot.state, contents.highest_edition, with_images=with_images)
        text = head.model_dump_json(indent=1, by_alias=True).encode()
        _write(GentleWriter(out), [Part(HEAD, text, size=len(text)), *members], contents.warnings, progress)
        os.fchmod(out, 0o600 if any(member.is_secret for member in members) else 0o640)
    versions = [member.size for member in members if member.may_be_gone and member.sha256]
    report: dict[str, Any] = {"files": len(members), "bytes": archive.stat().st_size, "warnings": contents.warnings}
    report |= {"last_seq": head.last_seq, "waiting": head.waiting, "left_out": head.images_left_out}
    return report | {"versions": len(versions), "versions_bytes": sum(versions)}


@contextmanager
def _claimed(part: Path, archive: Path) -> Iterator[int]:
    """Yield `part`, open, empty and locked; it becomes `archive` at the end, or is removed after an error."""
    with part.open("ab") as file:
        fd = file.fileno()
        claim(fd, part, archive)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, 0)
            yield fd
            part.replace(archive)
            sync(archive.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _snapshot(contents: Contents, archive: Path, stack: ExitStack, progress: Progress) -> _Snapshot:
    """Copy one state of the database beside the archive, and hold every journal segment that it needs open."""
    snapshot = _Snapshot(archive.with_name(f".{archive.name}.db"))
    database = sqlite_path(contents.config.database)
    if not database.exists():
        contents.warnings.append(f"{database}: this database does not exist yet, so the backup has none")
        return snapshot
    need_room(contents.config, archive, database_bytes(database), "a copy of the database")
    stack.callback(snapshot.copy.unlink, missing_ok=True)
    tries = _TRIES

    def hold_segments(connection: sqlite3.Connection) -> None:
        for _, fd, _ in snapshot.segments:
            os.close(fd)
        snapshot.segments.clear()
        for number, size in segments_needed(connection).items():
            path = segment_file(contents.config.journal, number)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                if tries:
                    raise _SegmentGoneError from None
                contents.warnings.append(f"{path} is gone: images that wait in it are lost")
                continue
            snapshot.segments.append((number, fd, min(size, os.fstat(fd).st_size)))

    stack.callback(lambda: [os.close(fd) for _, fd, _ in snapshot.segments])
    while True:
        try:
            copy_database(
                database,
                snapshot.copy,
                at_snapshot=hold_segments,
                on_progress=lambda done, total: progress("the database", done, total),
            )
            break
        except _SegmentGoneError:
            tries -= 1
            time.sleep(0.01)
    snapshot.state = state_of(snapshot.copy)
    return snapshot


def _editions(snapshot: _Snapshot) -> dict[int, bool]:
    """Return the editions that the copied rows name, True for those of open boards."""
    if snapshot.state is None:
        return {}
    open_ = "SELECT 1 FROM boards WHERE boards.edition = editions.edition AND verdict IS NULL"
    query = f"SELECT edition, EXISTS ({open_}) FROM editions"  # noqa: S608 - our own words
    with closing(sqlite3.connect(f"{snapshot.copy.absolute().as_uri()}?immutable=1", uri=True)) as database:
        try:
            return {number: bool(is_open) for number, is_open in database.execute(query)}
        except sqlite3.OperationalError:
            raise CommandError("the line's database is from before 0.1.0: coserve check says what to do") from None


def _members(contents: Contents, snapshot: _Snapshot, *, with_images: bool) -> list[Part]:
    """Return the members in order, with sizes; kept images are those that the copied rows name."""
    parts = list(contents.parts)
    if snapshot.state is not None:
        journal, source, target = Path(contents.journal), contents.config.images.parent, Path(contents.images).parent
        parts.append(Part(contents.database, snapshot.copy))
        parts += [
            Part(segment_file(journal, number).as_posix(), fd, size=size) for number, fd, size in snapshot.segments
        ]
        images = kept_images(snapshot.copy) if with_images else ()
        parts += [Part((target / path).as_posix(), source / path, may_be_gone=True) for path in images]
    return [replace(part, size=size) for part in parts if (size := _size_of(part)) is not None]


def _size_of(part: Part) -> int | None:
    """Return the bytes of a part; None if it may be gone and is."""
    if not isinstance(part.source, Path):
        return len(part.source) if isinstance(part.source, bytes) else part.size
    try:
        return part.source.stat().st_size
    except FileNotFoundError:
        if part.may_be_gone:
            return None
        raise


def _head(state: CopyState | None, highest_edition: int, *, with_images: bool) -> Head:
    made = datetime.now(UTC).isoformat(timespec="seconds")
    of_program = {"coserve_backup": FORMAT, "coserve": version("coserve"), "made": made}
    facts: dict[str, Any] = {**of_program, "highest_edition": highest_edition, "images": with_images}
    if state is None:
        return Head(schema=None, last_seq=0, waiting=0, **facts)
    left_out = 0 if with_images else state.kept
    return Head(schema=state.schema, last_seq=state.last_seq, waiting=state.waiting, images_left_out=left_out, **facts)


def _write(out: GentleWriter, members: list[Part], warnings: list[str], progress: Progress) -> None:
    total = sum(member.size for member in members)
    done = 0
    sums: list[str] = []
    with tarfile.TarFile(fileobj=cast("Any", out), mode="w", format=tarfile.PAX_FORMAT, copybufsize=PIECE_BYTES) as tar:
        for member in members:
            with _opened(member) as fd:
                if fd is None:
                    continue
                size = member.size if isinstance(member.source, int) else os.fstat(fd).st_size
                reader = GentleReader(fd, size, lambda at, m=member.name, before=done: progress(m, before + at, total))
                tar.addfile(_entry(member, size), cast("Any", reader))
                forget_members(tar)
            done += member.size
            sums.append(f"{reader.sha256}  {member.name}\n")
            if member.sha256 not in (None, reader.sha256):
                warnings.append(f"{member.source}: not what its edition says: its sha256 is {reader.sha256}")
        text = os.fsencode("".join(sums))
        tar.addfile(_entry(Part(SUMS, text), len(text)), io.BytesIO(text))
    out.flush()


@contextmanager
def _opened(member: Part) -> Iterator[int | None]:
    """Yield a descriptor to read the member from; None if it may be gone and is."""
    match member.source:
        case int():
            yield member.source
            return
        case bytes():
            fd = os.memfd_create(member.name, os.MFD_CLOEXEC)
            os.write(fd, member.source)
        case path:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                if not member.may_be_gone:
                    raise
                yield None
                return
    try:
        yield fd
    finally:
        os.close(fd)


def forget_members(tar: Any) -> None:
    """Clear the members that tarfile remembers: a million images would fill memory."""
    tar.members.clear()


def _entry(member: Part, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(member.name)
    entry.size = size
    entry.mode = 0o600 if member.is_secret else 0o640
    entry.mtime = int(time.time())
    return entry
