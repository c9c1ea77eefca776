"""A line's own record of releases, `releases/` beside the catalog: accepted signers, past releases, fetched files."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from daemon.registry.manifest import ReleaseError
from daemon.registry.signing import PublicKey, key_id, read_public_key
from daemon.registry.store import Store, locked
from daemon.wire.keys import KeyFileError
from experts.durable import make_folders, replace_text
from experts.people import current_user, now
from tools.experts.line import ExpertsLine


@dataclass(frozen=True, slots=True)
class InForce:
    """The release of one name that a line has, since when, by whom, and who signed it.

    `seen` has the sha256 of each manifest that the line has had, by number: it never takes two releases of one number.
    """

    number: int
    at: str
    by: str
    signer: str
    seen: dict[str, str]


_NOTES = TypeAdapter(dict[str, InForce])


class LineReleases:
    def __init__(self, line: ExpertsLine) -> None:
        self.line = line
        self.store = Store(line.config.catalog.parent / "releases")
        self._notes = self.store.folder / "in_force.json"

    def pulling(self) -> AbstractContextManager[None]:
        """Hold the right to pull, for one process at a time. Raises ReleaseError."""
        make_folders(self.store.folder, self.line.config.catalog.parent)
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
                make_folders(folder, self.line.config.catalog.parent)
                replace_text(place, file.read_text(encoding="ascii"), like=self.line.config.catalog)
        try:
            known = self.store.revoked()
        except (KeyFileError, OSError) as error:
            raise ReleaseError(str(error)) from None
        return [file for file, key in ids.items() if key in known]

    def in_force(self) -> dict[str, InForce]:
        """Return the newest release of each name put in force here. Raises ReleaseError."""
        try:
            return _NOTES.validate_json(self._notes.read_bytes())
        except FileNotFoundError:
            return {}
        except ValidationError as error:
            raise ReleaseError(
                f"{self._notes} cannot be read ({error.errors()[0]['msg']}): restore it from a backup of this line"
            ) from None

    def unsettled(self, name: str) -> Path:
        """Return the marker that exists from when a pull begins to change the line until `note`, even if it is killed.

        If it was left behind, only another pull settles which release is in force.
        """
        return self.store.folder / f"{name}.unsettled"

    def note(self, name: str, number: int, signer: str, sha256: str) -> None:
        """Note durably that a release is in force; `sha256` is that of its manifest."""
        notes = self.in_force()
        seen = (notes[name].seen if name in notes else {}) | {str(number): sha256}
        notes[name] = InForce(number, now(), current_user(), signer, seen)
        text = _NOTES.dump_json(notes, indent=1).decode() + "\n"
        replace_text(self._notes, text, like=self.line.config.catalog)
        self.unsettled(name).unlink(missing_ok=True)

    def weights(self) -> dict[str, Path]:
        """Return the line's weights and backbones by the sha256 that they should have."""
        folder, files = self.line.versions.folder, dict[str, Path]()
        for expert in self.line.versions.read().values():
            for entry in expert.entries.values():
                files[entry.sha256] = folder / entry.file
                if entry.backbone is not None:
                    files[entry.backbone.sha256] = folder / entry.backbone.file
        return files
