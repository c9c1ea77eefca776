"""Releases that a line has had: editions name them; `releases/` beside the catalog has manifests and revoked keys."""

import hashlib
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

from daemon.registry.manifest import ReleaseError, SignedManifest
from daemon.registry.signing import PublicKey, key_id, read_public_key
from daemon.registry.store import Store, locked
from daemon.wire.keys import KeyFileError
from experts.durable import make_folders, replace_text
from experts.editions.edition import FromRelease
from experts.editions.history import past
from tools.experts.line import ExpertsLine

#: Editions that are asked for their release: each file names all experts.
_NEWEST = 100


class LineReleases:
    def __init__(self, line: ExpertsLine) -> None:
        self.line = line
        self.editions = line.folder
        self.store = Store(self.editions.root / "releases")

    def pulling(self) -> AbstractContextManager[None]:
        """Hold the right to pull, for one process at a time. Raises ReleaseError."""
        make_folders(self.store.folder, self.editions.root)
        return locked(self.store.folder, busy="another pull is under way on this line: pull again when it is over")

    def signers(self) -> dict[Path, PublicKey]:
        """Return the keys that `plant.signers` names, by their files. Raises ReleaseError."""
        try:
            return {file: read_public_key(file) for file in self.line.config.plant.signers}
        except OSError as error:
            what = f"{error.filename} cannot be read: {error.strerror}"
            raise ReleaseError(f"{self.line.path}: plant.signers: {what}") from None
        except KeyFileError as error:
            raise ReleaseError(f"{self.line.path}: plant.signers: {error}") from None

    def revoked(self, told: Collection[str] = ()) -> list[Path]:
        """Return the key files of signers revoked here before, or by a hub or stick now (`told`: ids of keys).

        The latter are noted here, so that their releases are refused from any source. Raises ReleaseError.
        """
        ids = {file: key_id(key) for file, key in self.signers().items()}
        folder = self.store.folder / "revoked"
        for file, key in ids.items():
            place = folder / f"{key.replace(' ', '-')}.sign"  # its id: a new key may have the old one's name
            if key in told and not place.exists():
                make_folders(folder, self.editions.root)
                replace_text(place, file.read_text(encoding="ascii"), like=self.editions.catalog)
        try:
            known = self.store.revoked()
        except (KeyFileError, OSError) as error:
            raise ReleaseError(str(error)) from None
        return [file for file, key in ids.items() if key in known]

    def taken(self, name: str) -> FromRelease | None:
        """Return the release of this name that the line took last. Raises EditionError."""
        return next(iter(self._taken(name)), None)

    def seen(self, name: str) -> dict[int, str]:
        """Return the sha256 of each manifest that the line has had, by number: none comes twice as another one.

        A pull that was killed before it kept the manifest has left an edition that names it. Raises EditionError.
        """
        seen = {number: manifest_sha256(self.store.manifest(name, number)) for number in self.store.numbers(name)}
        for release in self._taken(name):
            if release.number in seen:
                break  # those before it are kept too
            seen[release.number] = release.sha256
        return seen

    def _taken(self, name: str) -> list[FromRelease]:
        """Return the releases of this name that editions were made of, newest first."""
        in_force = self.editions.in_force()
        if in_force is None:
            return []
        editions = past(self.editions, in_force.number, depth=_NEWEST)
        return [each.release for each in editions if each.release is not None and each.release.name == name]


def manifest_sha256(signed: SignedManifest) -> str:
    return hashlib.sha256(signed.data).hexdigest()
