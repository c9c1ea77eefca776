"""A content-addressed folder of releases: the hub's, a line's own, a USB stick's.

`objects/ab/abcd…` are files by their sha256, `manifests/NAME/NUMBER.json` and `.sig` the releases. Final names are
complete files, and reads compare the digest.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon.errors import ReleaseError
from daemon.registry.manifest import MAX_MANIFEST_BYTES, SignedManifest, decode, is_name
from daemon.registry.signing import key_id, read_public_key
from experts.catalog import is_digest
from experts.durable import make_folders, replace_durably, sync
from experts.weights import file_sha256

_CHUNK_BYTES = 1 << 20
#: Suffix of an incomplete file: the next fetch goes on where the last one stopped.
_PART = ".part"
_SPARE_BYTES = 64 << 20
#: Files that one `prune` deletes: a push must not wait long for it.
_MAX_PRUNED = 1000
_MAX_KEY_BYTES = 1 << 16
_Pieces = Callable[[str, int], Iterable[bytes]]


class Store:
    """One folder. Raises ReleaseError for what is missing, damaged or refused, OSError if the disk fails."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._objects, self._manifests = folder / "objects", folder / "manifests"

    def __str__(self) -> str:
        return str(self.folder)

    def names(self) -> list[str]:
        places = self._manifests.iterdir() if self._manifests.is_dir() else ()
        return sorted(place.name for place in places if is_name(place.name))

    def numbers(self, name: str) -> list[int]:
        files = self._manifest(name, 1).parent.glob("*.json")
        return sorted(int(file.stem) for file in files if file.stem.isascii() and file.stem.isdecimal())

    def revoked(self) -> list[str]:
        """Return the ids of the revoked keys, those in `revoked/*.sign`. Raises KeyFileError."""
        files = sorted((self.folder / "revoked").glob("*.sign"))
        return [key_id(read_public_key(file)) for file in files if _small(file, _MAX_KEY_BYTES)]

    def manifest(self, name: str, number: int) -> SignedManifest:
        file = self._manifest(name, number)
        try:
            return SignedManifest(_small(file, MAX_MANIFEST_BYTES), _small(file.with_suffix(".sig"), _MAX_KEY_BYTES))
        except FileNotFoundError as error:
            raise ReleaseError(f"{self} has no release {name}/{number}: there is no {error.filename}") from None

    def add_manifest(self, name: str, number: int, signed: SignedManifest, *, needs_files: bool = True) -> None:
        """Add a release whose files are all here; ReleaseError if another one has this number already."""
        manifest = decode(signed.data, f"{name}/{number}")
        if (manifest.name, manifest.number) != (name, number):
            raise ReleaseError(f"{name}/{number}: its manifest says {manifest.release}")
        file = self._manifest(name, number)
        make_folders(self._manifests, self.folder)
        with locked(self._manifests):
            missing = [sha256 for sha256 in manifest.files if not self.has(sha256)]
            if missing and needs_files:
                raise ReleaseError(
                    f"{name}/{number}: {len(missing)} of its files are missing, such as {missing[0][:12]}…: push again"
                )
            if file.exists():
                present = self.manifest(name, number)
                if (present.data, present.signature.strip()) == (signed.data, signed.signature.strip()):
                    return  # over HTTP a signature loses its trailing newline
                raise ReleaseError(f"{self} has another {name}/{number} already: push again")
            make_folders(file.parent, self.folder)
            replace_durably(file.with_suffix(".sig"), signed.signature)
            replace_durably(file, signed.data)

    def place(self, sha256: str) -> Path:
        if not is_digest(sha256):
            raise ReleaseError(f"{sha256!r} is not a sha256")
        return self._objects / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Check only the name; `checked` reads the file."""
        return self.place(sha256).is_file()

    def checked(self, sha256: str, size_bytes: int) -> Path:
        place = self._present(sha256)
        if place.stat().st_size != size_bytes or file_sha256(place) != sha256:
            raise ReleaseError(f"{place} is damaged: its bytes are not those of its name; delete it and copy it again")
        return place

    def pieces(self, sha256: str, start: int) -> Iterable[bytes]:
        return _pieces(self._present(sha256), start)

    def add_object(self, file: Path, sha256: str) -> None:
        if not self.has(sha256):
            self.fetch(lambda _, start: _pieces(file, start), sha256, file.stat().st_size)

    def fetch(self, pieces: _Pieces, sha256: str, size_bytes: int) -> Path:
        """Fetch one file, going on where an earlier try stopped; verify it and return its place."""
        place = self.place(sha256)
        if place.is_file():
            return self.checked(sha256, size_bytes)
        make_folders(place.parent, self.folder)
        fetch_file(pieces, sha256, size_bytes, place)
        return place

    def prune(self, is_kept: Callable[[str, int], bool], before_s: float) -> int:
        """Delete releases not kept, and files from before `before_s` that none names; return how many files.

        A push under way loses nothing: its new files stay, and if an old one is gone it is refused and tried again.
        """
        if not self._manifests.is_dir():
            return 0
        with locked(self._manifests):
            named: set[str] = set()
            for name, number in [(each, number) for each in self.names() for number in self.numbers(each)]:
                if is_kept(name, number):
                    named |= decode(self.manifest(name, number).data, f"{name}/{number}").files.keys()
                else:
                    self._manifest(name, number).unlink()
                    self._manifest(name, number).with_suffix(".sig").unlink(missing_ok=True)
            files = (file for file in self._objects.glob("*/*") if file.name.removesuffix(_PART) not in named)
            old = [file for file in files if file.stat().st_mtime < before_s][:_MAX_PRUNED]
            for file in old:
                file.unlink()
            return len(old)

    def _present(self, sha256: str) -> Path:
        if not self.has(sha256):
            raise ReleaseError(f"{self} lacks the file {sha256[:12]}…: copy the release again")
        return self.place(sha256)

    def _manifest(self, name: str, number: int) -> Path:
        if not is_name(name):
            raise ReleaseError(f"{name!r} does not name releases: use letters, digits, dash and underscore, at most 64")
        return self._manifests / name / f"{number}.json"


def fetch_file(pieces: _Pieces, sha256: str, size_bytes: int, place: Path, mode: int | None = None) -> None:
    """Fetch a file whose folder exists, durably, going on where an earlier try stopped. ReleaseError if it differs."""
    part = place.with_name(place.name + _PART)
    if part.exists() and not os.access(part, os.W_OK):
        part.unlink()  # another user's, whose pull was cut off
    with part.open("ab") as target:
        if target.tell() > size_bytes:
            target.truncate(0)
        began = start = target.tell()
        check_free_space(place.parent, size_bytes - start)
        for piece in pieces(sha256, start) if start < size_bytes else ():
            start += len(piece)
            if start > size_bytes:
                break  # a source that does not end must not fill the disk
            target.write(piece)
    if part.stat().st_size != size_bytes or file_sha256(part) != sha256:
        part.unlink()
        if began:  # what an earlier try, or a power cut, left was wrong
            return fetch_file(pieces, sha256, size_bytes, place, mode)
        raise ReleaseError(f"the file {sha256[:12]}… is damaged: its bytes do not have that sha256, and were deleted")
    if mode is not None:
        part.chmod(mode)
    sync(part)
    part.replace(place)
    return sync(place.parent)


def check_free_space(folder: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
    if size_bytes + _SPARE_BYTES > free:
        lacks = size_bytes + _SPARE_BYTES - free
        raise ReleaseError(f"{folder}: {lacks} more bytes of free disk space are needed: free some, then try again")


@contextmanager
def locked(folder: Path, busy: str | None = None) -> Iterator[None]:
    """Exclude processes and threads that lock this folder too: wait for them, or raise ReleaseError with `busy`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise ReleaseError(busy) from None
        yield
    finally:
        os.close(descriptor)


def _small(file: Path, max_bytes: int) -> bytes:
    """Limit what is read: a pipe, or a file of any size on a stick, must not hold a pull up."""
    if file.exists() and not (file.is_file() and file.stat().st_size <= max_bytes):
        raise ReleaseError(f"{file} is not a file of at most {max_bytes} bytes: see who made it")
    return file.read_bytes()


def _pieces(file: Path, start: int) -> Iterator[bytes]:
    with file.open("rb") as opened:
        opened.seek(start)
        while piece := opened.read(_CHUNK_BYTES):
            yield piece
