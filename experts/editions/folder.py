"""The editions beside a catalog, and the pointer to the one in force.

`editions/000007.json` is edition 7; `editions/current` holds the number in force and is replaced by one rename.
`editions/rewriting` holds the number of an edition whose rules and catalog are not yet written to the working files,
and the sha256 of what these held: another text is a person's.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from experts.catalog import CatalogEntry, CatalogError, dump, read_catalog, rendered
from experts.durable import give_to_owner_of, make_folders, read_only_mount, replace_durably, replace_text, sync
from experts.editions.edition import Edition, EditionError, decode
from experts.editions.weights import WeightsStore

_FOLDER = "editions"
_FILE = re.compile(r"([0-9]{6,10})\.json")
_HEAD = "# Written from edition {number}; comments are not kept. Edit it, then: coserve reload\n"


class EditionsBusyError(EditionError):
    """Another process is making an edition; a later try may succeed."""


class EditionFolder:
    """Reads need only the files; changes go through `changing`. Raises EditionError, OSError."""

    def __init__(self, catalog: Path) -> None:
        self.catalog = catalog
        self.root = catalog.parent
        self.folder = self.root / _FOLDER
        self.pointer = self.folder / "current"
        self.mark = self.folder / "rewriting"
        self.owner = self.folder / "line"
        self.weights = WeightsStore(catalog)

    def current(self) -> int | None:
        """Return the number in force, None before the first edition."""
        number = _number_in(self.pointer)
        if number is None and self._had_a_pointer():
            known = ", ".join(map(str, self.numbers()[-5:]))
            raise EditionError(f"{self.pointer} is missing, and editions {known} are here: coserve rollback NUMBER")
        return number

    def _had_a_pointer(self) -> bool:
        """Return whether an edition followed another; a first one may have been cut off before it came into force."""
        for number in self.numbers():
            with suppress(EditionError):
                if self.read(number).parent is not None:
                    return True
        return False

    def numbers(self) -> list[int]:
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(match[1]) for file in files if (match := _FILE.fullmatch(file.name)))

    def file(self, number: int) -> Path:
        return self.folder / f"{number:06}.json"

    def read(self, number: int) -> Edition:
        file = self.file(number)
        try:
            edition = decode(file.read_bytes(), file)
        except FileNotFoundError:
            known = ", ".join(map(str, self.numbers()[-5:])) or "none"
            raise EditionError(
                f"there is no edition {number}: {file} is missing; the newest here are {known}:"
                " put it back from a backup, or go back to one of these: coserve rollback"
            ) from None
        if edition.number != number:
            raise EditionError(f"{file} holds edition {edition.number}: it was renamed; put the right file back")
        return edition

    def in_force(self) -> Edition | None:
        number = self.current()
        return None if number is None else self.read(number)

    @property
    def is_rewriting(self) -> bool:
        """Return True if a crash left the working files behind the edition in force."""
        with suppress(EditionError):  # a damaged mark is as good as none
            marked = self.marked()
            return bool(marked) and marked[0] == str(self.current())
        return False

    def marked(self) -> list[str]:
        """Return the lines of the mark: a number, then the sha256 of the working files; none without a mark."""
        with suppress(FileNotFoundError):
            return self.mark.read_text(encoding="ascii", errors="replace").splitlines()
        return []

    def other_line(self, journal: Path) -> Path | None:
        """Return the journal of the other line that owns these editions; None if no other does."""
        try:
            catalog, other = self.owner.read_text(encoding="utf-8").splitlines()
        except (FileNotFoundError, ValueError):
            return None
        is_another = catalog == str(self.catalog.resolve()) and other != str(journal.resolve())
        return Path(other) if is_another and Path(other).exists() else None

    def require_own(self, journal: Path) -> None:
        """Raises EditionError if the editions are another line's: two lines with one would judge by each other's."""
        if (other := self.other_line(journal)) is not None:
            raise EditionError(
                f"{self.folder} belongs to the line whose journal is {other}: give this line a catalog in a folder of"
                f" its own, or delete {self.owner} if that line is gone"
            )

    def stale_files(self, edition: Edition, rules: Path) -> dict[Path, str]:
        """Return the working files that differ from an edition, each with the text that it should have."""
        stale = dict[Path, str]()
        if not rules.is_file() or rules.read_bytes().decode("utf-8-sig", "replace") != edition.rules:
            stale[rules] = edition.rules
        if entries_of(self.catalog) != edition.experts:
            experts = {name: rendered(self.relative_entry(entry)) for name, entry in edition.experts.items()}
            stale[self.catalog] = _HEAD.format(number=edition.number) + dump({"experts": experts})
        return stale

    def relative_entry(self, entry: CatalogEntry) -> CatalogEntry:
        """Return an edition's entry with its weights' paths, relative to the catalog's folder."""
        return entry.with_files(lambda _, sha256: str(self.weights.place(sha256).relative_to(self.root)))

    def absolute_entries(self, edition: Edition) -> dict[str, CatalogEntry]:
        """Return an edition's entries with the absolute paths of their weights."""
        return {
            name: entry.with_files(lambda _, sha256: str(self.weights.place(sha256)))
            for name, entry in edition.experts.items()
        }

    def has_weights(self, entry: CatalogEntry) -> bool:
        return all(map(self.weights.has, entry.weights))

    def enter(self, entries: Mapping[str, CatalogEntry]) -> dict[str, str]:
        """Take in the weights of entries with absolute paths; return those that cannot be, and why.

        Raises EditionError, before anything is copied, if there is no room for them.
        """
        files = {each.backbone.sha256: Path(each.backbone.file) for each in entries.values() if each.backbone}
        for entry in entries.values():
            if entry.sha256 not in files or Path(entry.file).is_file():  # several names may have the same weights
                files[entry.sha256] = Path(entry.file)
        lacking = [file for sha256, file in files.items() if not self.weights.has(sha256) and file.is_file()]
        needed, free = sum(file.stat().st_size for file in lacking), shutil.disk_usage(self.root).free
        if needed > free:
            raise EditionError(
                f"{self.weights.folder}: {needed / 1e6:.1f} MB of weights do not fit in {free / 1e6:.1f} MB of free"
                " space: make room, or delete old versions with coserve experts prune"
            )
        return self.weights.enter(files)

    def may_write(self) -> bool:
        """Return True if this process may make editions here, without trying to."""
        folder = self.folder if self.folder.exists() else self.root
        return os.access(folder, os.W_OK | os.X_OK)

    @contextmanager
    def changing(self) -> "Iterator[EditionWriter]":
        """Hold the right to make editions, one process at a time; EditionsBusyError names the process that has it."""
        with _translated(self.folder):
            make_folders(self.folder, self.root)
            with _locked(self.folder / ".lock"):
                for part in (*self.folder.glob(".*.part"), *self.weights.folder.glob("*/.*.part")):
                    part.unlink(missing_ok=True)  # a killed process left it
                yield EditionWriter(self)


class EditionWriter:
    """The steps of the holder of the lock. Each is durable when it returns."""

    def __init__(self, folder: EditionFolder) -> None:
        self._folder = folder

    def add(self, edition: Edition) -> None:
        """Write an edition that nothing names yet, after its weights have entered the store."""
        file = self._folder.file(edition.number)
        if file.exists():
            raise EditionError(f"{file} exists: an edition never changes; this one needs another number")
        replace_durably(file, edition.encoded(), self._folder.weights.mode, self._folder.folder)

    def claim(self, journal: Path) -> None:
        """Note whose editions these are. Raises EditionError if they are another line's."""
        self._folder.require_own(journal)
        text = f"{self._folder.catalog.resolve()}\n{journal.resolve()}\n"
        if not self._folder.owner.exists() or self._folder.owner.read_text(encoding="utf-8") != text:
            replace_text(self._folder.owner, text, like=self._folder.catalog)

    def remove(self, number: int) -> None:
        """Delete an edition that nothing names: one that the daemon refused, or an old one."""
        self._folder.file(number).unlink(missing_ok=True)
        sync(self._folder.folder)

    def point(self, edition: Edition, rewrites: Path | None = None) -> None:
        """Put an edition in force; with `rewrites`, the rules' file, the working files must follow (`follow`)."""
        if rewrites is not None:
            lines = (str(edition.number), _digest(rewrites), _digest(self._folder.catalog))
            replace_text(self._folder.mark, "".join(f"{line}\n" for line in lines), like=self._folder.catalog)
        replace_text(self._folder.pointer, f"{edition.number}\n", like=self._folder.catalog)

    def require_writable(self, edition: Edition, rules: Path) -> None:
        """Raises EditionError if this user may not write the working files that differ from an edition."""
        for file in self._folder.stale_files(edition, rules):
            if not os.access(file.resolve().parent, os.W_OK | os.X_OK):
                remedy = read_only_mount(file.resolve().parent) or "run this with sudo"
                raise EditionError(
                    f"{file}: edition {edition.number} would change it, and this user may not write it: {remedy};"
                    " nothing has changed"
                )

    def follow(self, rules: Path) -> None:
        """Write the working files that the mark says are behind the edition in force, and take the mark away.

        Raises EditionError for one that a person has saved since the mark was written, and leaves it.
        """
        edition = None
        with suppress(EditionError):  # one that is damaged cannot be written
            edition = self._folder.in_force() if self._folder.is_rewriting else None
        if edition is not None:
            self._write_stale_files(edition, rules)
        self._folder.mark.unlink(missing_ok=True)
        sync(self._folder.mark.parent)

    def _write_stale_files(self, edition: Edition, rules: Path) -> None:
        marked = self._folder.marked()[1:]
        edited: list[Path] = []
        for file, text in self._folder.stale_files(edition, rules).items():
            if file.exists() and _digest(file) not in marked:
                edited.append(file)
                continue
            try:
                replace_text(file.resolve(), text, like=self._folder.catalog)  # a link stays one
            except OSError as error:
                raise EditionError(
                    f"edition {edition.number} is in force, but {file} could not be written anew ({error.strerror}):"
                    " mend that, then coserve reload"
                ) from None
        if edited:
            raise EditionError(
                f"{edited[0]} was saved while edition {edition.number} came into force, and is left as it is: move it"
                " aside, coserve reload writes the one in force, then bring the edit in again"
            )


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "missing"


def without_files(entry: CatalogEntry) -> CatalogEntry:
    """Return an entry as editions hold it: weights are named by their sha256 alone."""
    return entry.with_files(lambda *_: "")


def entries_of(catalog: Path) -> dict[str, CatalogEntry] | None:
    """Return a working catalog's entries without paths; None if it is missing or cannot be read."""
    try:
        entries = read_catalog(catalog) if catalog.exists() else None
    except CatalogError:
        entries = None
    if entries is None:
        return None
    return {name: without_files(entry) for name, entry in entries.items()}


def _number_in(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,9}\n", text):
        raise EditionError(f"{file} holds no number of an edition: name one: coserve rollback NUMBER")
    return int(text)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Never through a link: root gives the file to the owner of a folder that others may write.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
    with open(fd, "r+", encoding="ascii", errors="replace") as file:  # noqa: PTH123 - a descriptor
        with suppress(PermissionError):
            os.fchmod(fd, 0o664)  # the next one may be another member of the group
        give_to_owner_of(path.parent, fd)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another"
            raise EditionsBusyError(f"process {owner} is making an edition: try again when it is done") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Turn the operating system's refusals into one sentence."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or folder}: {error.strerror or error}"
        remedy = "see to the disk, then repeat the command"
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            rights = "who makes editions must be able to write in this folder (group coserve-experts of the service)"
            remedy = read_only_mount(folder) or rights
        raise EditionError(f"{what}: {remedy}") from None
