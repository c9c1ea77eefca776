"""The parts of a line and their places in its backup: relative paths that work wherever it is restored."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import BaseModel

from daemon.config.settings import is_setting, load_config, read_settings
from daemon.delivery.position import PositionFile
from daemon.errors import ConfigError
from daemon.storage.database.connections import sqlite_path
from experts.editions.folder import EditionFolder
from experts.editions.history import experts_of, past, waiting_weights
from routing_rules.load import Document, KeyPath
from tools.terminal.console import CommandError

CONFIG = "coserve.yaml"
_DATABASE: KeyPath = ("database",)
#: Paths that the daemon itself fills; the snapshot decides what it needs of them.
_FILLED = ("journal", "images", "record")
#: Editions before the one in force whose weights are kept, so that a person may go back.
_EARLIER = 2
_NOTE = "# Written by `coserve backup`: paths lie inside this folder now. The file as it was: {before}\n"


class BackupError(CommandError):
    """The backup failed; the text says why and what to do."""


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
        """Find the files that `path` names. Raises ConfigError, BackupError."""
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
            raise BackupError(f"{'.'.join(map(str, key))}: {source} cannot be in the backup beside {name}: rename it")
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
        that all of it is there. Raises BackupError, EditionError.
        """
        folder = EditionFolder(self.config.catalog)
        current = folder.current()
        if current is None:
            raise BackupError(f"{folder.pointer}: no edition is in force on this line yet: coserve reload makes it")
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
        changed = _NOTE.format(before=before).encode() + _dumped(self._document, path)
        self.parts[:0] = [Part(CONFIG, changed), Part(before, path)]


def _paths(value: Any, key: KeyPath = ()) -> Iterator[tuple[KeyPath, Path]]:
    if isinstance(value, Path):
        yield key, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _paths(getattr(value, name), (*key, name))
    elif isinstance(value, dict | list | tuple):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(inner, (*key, name))


def _dumped(document: Document, source: Path) -> bytes:
    if document.problems:
        raise ConfigError(document.problems)
    text = yaml.safe_dump(document.data, sort_keys=False, allow_unicode=True, width=120)
    return f"# from {source}\n{text}".encode()
