"""Versions of experts: which are stored, which were in force when, and how one replaces another.

`catalog.yaml` alone says what is in force, and is only ever replaced whole, by a rename. Beside it lie
`versions/EXPERT/WEIGHTS.safetensors`, the weights of each version that was put in, or in force when one was, and
`versions.yaml`: the entry of each, and who did what when. A step is written there before the catalog is replaced; a
step that the catalog does not show did not happen. So a crash leaves the old state or the new one.

A version is named by its weights, `0a1b2c3d4e5f`; with other settings, the same weights are another version, named
`0a1b2c3d4e5f+9f8e7d6c5b4a`.
"""

import errno
import fcntl
import getpass
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from experts.catalog import CatalogEntry, CatalogFile, backbone_file, dump, rendered, settings_of
from experts.catalog_edit import read, replace_entries
from experts.durable import end_cut_off_switch, make_folders, replace_text, replacing, sync, texts_before_switch
from experts.spec import digest_of, setting_changes
from experts.weights import file_sha256

VERSIONS_FILE = "versions.yaml"
VERSIONS_FOLDER = "versions"
_LOCK_FILE = ".versions.lock"
_HEAD = "# Written by `coserve experts put | shadow | promote | …`. What is in force stands in catalog.yaml.\n"
_CHUNK_BYTES = 4 << 20

Action = Literal["found", "put", "promote", "rollback", "prune", "shadow", "unshadow"]


class VersionsError(Exception):
    """A change of versions was refused; the text says why and what to do."""


class VersionsBusyError(VersionsError):
    """Another process changes versions; a later try may succeed."""


class StoredVersion(BaseModel):
    """A version that can be put in force: its future catalog entry, and where it came from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entry: CatalogEntry
    put_at: str
    put_by: str
    source: str


class Step(BaseModel):
    """One action and its author; `before` was in force before. `found`: a read of the catalog met a new version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: str
    by: str
    did: Action
    version: str
    before: str | None = None
    note: str | None = None


class Shadow(BaseModel):
    """A version that answers beside the one in force; images and agreement that it needs for its promotion."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    images: int
    agreement: float


class History(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    versions: dict[str, StoredVersion] = {}
    steps: tuple[Step, ...] = ()
    shadow: Shadow | None = None


class VersionsFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    experts: dict[str, History] = {}


@dataclass(slots=True)
class Expert:
    """One expert's versions. `in_force` is the catalog's entry, `version` its name, None if none was promoted yet."""

    name: str
    in_force: CatalogEntry | None
    versions: dict[str, StoredVersion] = field(default_factory=dict[str, StoredVersion])
    steps: list[Step] = field(default_factory=list[Step])
    version: str | None = None
    shadow: Shadow | None = None

    @property
    def entries(self) -> dict[str, CatalogEntry]:
        """Return the entry in force, then the kept ones, by version."""
        entries = {version: stored.entry for version, stored in self.versions.items()}
        if self.version is None or self.in_force is None:
            return entries
        return {self.version: self.in_force} | entries | {self.version: self.in_force}

    @property
    def lineage(self) -> list[str]:
        """Return the versions that came into force in turn and were not rolled back, the one in force last."""
        line: list[str] = []
        for step in self.steps:
            if step.did == "rollback" and len(line) > 1:
                line.pop()
            if step.did in ("found", "promote", "rollback") and line[-1:] != [step.version]:
                line.append(step.version)
        # Pruned versions cannot come back.
        present = [version for version in line if version in self.versions or version == self.version]
        return [version for place, version in enumerate(present) if present[place - 1 : place] != [version]]

    def named(self, name: str) -> str:
        """Return the stored version with this name, or with these first four letters or more. Raises VersionsError."""
        matches = [version for version in self.versions if version.startswith(name)] if len(name) >= 4 else []
        if len(matches) == 1:
            return matches[0]
        if not self.versions:
            put = f"`coserve experts put {self.name} FOLDER`"
            raise VersionsError(f"{self.name} has no stored versions yet, and so none named {name!r}: {put} adds one")
        listed = ", ".join(self.versions)
        why = "names several of them" if matches else "is none of them"
        raise VersionsError(f"{self.name} has the versions {listed}; {name!r} {why}: `coserve experts show`")


def version_of(entry: CatalogEntry) -> str:
    return entry.sha256[:12]


def weights_of(version: str) -> str:
    """Return the weights' part of a version's name, which is the version in the results."""
    return version.partition("+")[0]


class Versions:
    """The versions beside one catalog. `read` needs only the files; changes go through `changing`."""

    def __init__(self, catalog: Path) -> None:
        self.catalog = catalog
        self.folder = catalog.parent

    def read(self) -> dict[str, Expert]:
        """Return the catalog's experts in its order, then those that were only put in. Raises VersionsError."""
        entries = self._entries()
        path = self.folder / VERSIONS_FILE
        noted = _parsed(VersionsFile, path) if path.exists() else VersionsFile()
        names = [*entries, *(name for name in noted.experts if name not in entries)]
        return {
            name: _settled(name, entries.get(name), noted.experts.get(name, History()), self.folder) for name in names
        }

    @contextmanager
    def changing(self) -> "Iterator[Change]":
        """Hold the right to change them, one process at a time; VersionsError names the process that holds it."""
        with _translated(self.folder), _locked(self.folder / _LOCK_FILE):
            for part in self.folder.glob(f"{VERSIONS_FOLDER}/*/.*.part"):
                part.unlink()  # a killed process left it
            end_cut_off_switch(self.catalog)
            yield Change(self, self.read())

    def steps(self) -> list[tuple[str, Step]]:
        """Return what people did to versions, by expert. Raises VersionsError."""
        return [(name, step) for name, expert in self.read().items() for step in expert.steps if step.did != "found"]

    def weights_file(self, name: str, version: str) -> Path:
        safe = quote(name, safe="")
        safe = "%2E" + safe[1:] if safe.startswith(".") else safe
        return self.folder / VERSIONS_FOLDER / safe / f"{weights_of(version)}.safetensors"

    def _entries(self) -> dict[str, CatalogEntry]:
        if not self.catalog.exists():
            return {}
        with _translated(self.folder):
            text = texts_before_switch(self.catalog).get(str(self.catalog.absolute()))
        return dict(_parsed(CatalogFile, self.catalog, text).experts)


class Change:
    """The actions of the holder of the lock. Each is durable when it returns."""

    def __init__(self, versions: Versions, experts: dict[str, Expert]) -> None:
        self._versions = versions
        self.experts = experts
        #: True if the catalog had to be written anew without its comments.
        self.lost_comments = False

    def expert(self, name: str) -> Expert:
        """Return an expert with an entry or a candidate. Raises VersionsError."""
        expert = self.experts.get(name)
        if expert is None:
            raise VersionsError(f"there is no expert {name}: {self._versions.catalog} has {', '.join(self.experts)}")
        return expert

    def find(self, name: str, entry: CatalogEntry) -> str | None:
        """Return the version with these weights and settings that is in force or stored whole; None if there is none.

        The file of `entry` is absolute, or relative to the catalog's folder.
        """
        expert = self.experts.get(name)
        version = _name(expert, entry, self._versions.folder) if expert is not None else None
        known = expert.entries.get(version) if expert is not None and version is not None else None
        return version if known is not None and _holds(self._versions.folder / known.file, known) else None

    def put(self, name: str, entry: CatalogEntry, source: str, note: str | None = None) -> str:
        """Store the weights of an entry with absolute paths as a candidate and return its version.

        The version in force stays. A head's backbone is copied beside the catalog unless it is there.
        """
        return self.put_all({name: entry}, source, note)[name]

    def put_all(self, entries: Mapping[str, CatalogEntry], source: str, note: str | None = None) -> dict[str, str]:
        """Store several as `put` does, in one note; return their versions."""
        versions = {name: self._put(name, entry, source, note) for name, entry in entries.items()}
        self._write()
        return versions

    def _put(self, name: str, entry: CatalogEntry, source: str, note: str | None) -> str:
        expert, weights = self.experts.setdefault(name, Expert(name, None)), Path(entry.file)
        version = _name(expert, entry, self._versions.folder)
        place = self._versions.weights_file(name, version)
        if version in expert.versions and _holds(place, entry):
            raise VersionsError(f"{name} has version {version} already: these are the same weights and settings")
        if version == expert.version:
            raise VersionsError(
                f"{name} {version} is in force: these are the same weights and settings; train or import others, or"
                " change a setting of the entry, such as its temperature"
            )
        self._store_in_force(expert)
        if not _holds(place, entry):
            self._copy(weights, place, entry.sha256)
        self._add(expert, version, self._copy_backbone(entry), place, source)
        expert.steps.append(_step("put", version, note=note))
        return version

    def promote(
        self, versions: Mapping[str, str], action: Literal["promote", "rollback"] = "promote", note: str | None = None
    ) -> None:
        """Put one stored version of each of several experts in force, atomically."""
        for name, version in versions.items():
            expert = self.expert(name)
            if version == expert.version:
                raise VersionsError(f"{name} {version} is in force already")
            self._store_in_force(expert)
            expert.steps.append(_step(action, version, expert.version, note))
        self._write()
        entries = {name: self.experts[name].versions[version].entry for name, version in versions.items()}
        self._replace_entries(entries)
        for name, version in versions.items():
            self.experts[name].in_force, self.experts[name].version = entries[name], version

    def shadow(self, name: str, shadow: Shadow | None, note: str | None = None) -> None:
        """Let a stored version answer in shadow; None ends that. Raises VersionsError."""
        expert = self.expert(name)
        version = getattr(shadow or expert.shadow, "version", expert.version)
        if version is None or version == expert.version:
            raise VersionsError(f"{name} {version} is in force" if shadow else f"{name} has no version in shadow")
        expert.shadow = shadow
        expert.steps.append(_step("shadow" if shadow else "unshadow", version, note=note))
        self._write()

    def take_back(self, text: str, entries: Mapping[str, CatalogEntry | None]) -> None:
        """Undo the last `promote`, given the catalog's text before it and its experts' entries there."""
        replace_text(self._versions.catalog, text)
        for name, entry in entries.items():
            expert = self.expert(name)
            expert.in_force, expert.version = entry, expert.steps.pop().before
        self._write()

    def measured(self, name: str, confidences: Mapping[str, tuple[int, ...]]) -> None:
        """Note the confidences of the version in force on held-out images; they stay with the version."""
        expert = self.expert(name)
        if expert.in_force is None or expert.version is None:
            raise VersionsError(f"{name} has no version in force")
        added = {"confidences": dict(confidences)}
        expert.in_force = expert.in_force.model_copy(update=added)
        if stored := expert.versions.get(expert.version):
            expert.versions[expert.version] = stored.model_copy(update={"entry": stored.entry.model_copy(update=added)})
            self._write()
        self._replace_entries({name: expert.in_force})

    def before(self, name: str) -> str:
        """Return the version that a rollback of `name` brings back. Raises VersionsError if there is none."""
        expert = self.expert(name)
        lineage = expert.lineage
        if len(lineage) < 2:
            raise VersionsError(
                f"{name} {expert.version or ''} is the first version here: there is none before it to go back to"
            )
        return lineage[-2]

    def prune(self, name: str, version: str, note: str | None = None) -> int:
        """Delete a version that is not in force, with its weights; return the bytes freed."""
        expert = self.expert(name)
        if version == expert.version:
            raise VersionsError(f"{name} {version} is in force and stays")
        pruned = expert.versions.pop(version)
        expert.steps.append(_step("prune", version, note=note))
        self._write()
        place = self._versions.weights_file(name, version)
        if (self._versions.folder / pruned.entry.file) != place or not place.exists():
            return 0
        if weights_of(version) in {weights_of(other) for other in (*expert.versions, expert.version or "")}:
            return 0  # other settings of them are kept
        freed_bytes = place.stat().st_size
        place.unlink()
        return freed_bytes

    def _store_in_force(self, expert: Expert) -> None:
        """Link the weights in force under their version, so that training into this folder cannot replace them."""
        entry, version = expert.in_force, expert.version
        if entry is None or version is None or version in expert.versions:
            return
        source, place = self._versions.folder / entry.file, self._versions.weights_file(expert.name, version)
        if not _holds(source, entry):
            return  # damaged: there is no way back to it, and a better version can still be promoted
        if not (place.exists() and place.samefile(source)):  # other settings of the same weights may lie there
            make_folders(place.parent, self._versions.folder)
            place.unlink(missing_ok=True)
            try:
                place.hardlink_to(source)
            except OSError:  # another disk, or another user's file
                self._copy(source, place, entry.sha256)
            sync(place.parent)
        self._add(expert, version, entry, place, "in force when first kept")

    def _copy_backbone(self, entry: CatalogEntry) -> CatalogEntry:
        """Copy a head's backbone beside the catalog unless it is there; return the entry with its new path."""
        if entry.backbone is None:
            return entry
        source, sha256 = Path(entry.backbone.file), entry.backbone.sha256
        place = self._versions.folder / source.name
        if not (place.is_file() and file_sha256(place) == sha256):
            place = self._versions.folder / backbone_file(sha256)  # never the name of another file of the line
        if not (place.is_file() and file_sha256(place) == sha256):
            self._copy(source, place, sha256)
        return entry.model_copy(update={"backbone": entry.backbone.model_copy(update={"file": place.name})})

    def _add(self, expert: Expert, version: str, entry: CatalogEntry, place: Path, source: str) -> None:
        entry = entry.model_copy(update={"file": str(place.relative_to(self._versions.folder))})
        expert.versions[version] = StoredVersion(entry=entry, put_at=now(), put_by=current_user(), source=source)

    def _copy(self, source: Path, place: Path, sha256: str) -> None:
        """Copy weights whole and durably, or not at all. Raises VersionsError if the bytes are not the entry's."""
        make_folders(place.parent, self._versions.folder)
        digest = hashlib.sha256()
        catalog = self._versions.catalog
        mode = catalog.stat().st_mode & 0o777 if catalog.exists() else None  # the catalog's readers read the weights
        with source.open("rb") as reader, replacing(place, mode) as part:
            with part.open("wb") as writer:
                while piece := reader.read(_CHUNK_BYTES):
                    digest.update(piece)
                    writer.write(piece)
            if digest.hexdigest() != sha256:
                actual = digest.hexdigest()[:12]
                raise VersionsError(f"{source} is damaged: its sha256 is {actual}…, its entry says {sha256[:12]}…")

    def _replace_entries(self, entries: Mapping[str, CatalogEntry]) -> None:
        if replace_entries(self._versions.catalog, self._versions._entries(), entries):
            self.lost_comments = True

    def _write(self) -> None:
        document = {
            "experts": {
                name: {
                    "versions": {
                        version: stored.model_dump(mode="json", exclude={"entry"}) | {"entry": rendered(stored.entry)}
                        for version, stored in expert.versions.items()
                    },
                    "steps": [step.model_dump(mode="json", exclude_none=True) for step in expert.steps],
                    **({"shadow": expert.shadow.model_dump(mode="json")} if expert.shadow else {}),
                }
                for name, expert in self.experts.items()
                if expert.versions or any(step.did != "found" for step in expert.steps)
            }
        }
        replace_text(self._versions.folder / VERSIONS_FILE, _HEAD + dump(document), like=self._versions.catalog)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def current_user() -> str:
    """Return the user's name; under sudo, of the person who called it."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a process number without a name
        return str(os.getuid())


def _settled(name: str, in_force: CatalogEntry | None, noted: History, folder: Path) -> Expert:
    """Combine the notes and the catalog into an expert; where they differ, the catalog is right."""
    steps = list(noted.steps)
    expert = Expert(name, in_force, dict(noted.versions), steps)
    expert.version = _name(expert, in_force, folder) if in_force is not None else None
    moves = [place for place, step in enumerate(steps) if step.did in ("promote", "rollback")]
    if moves and (last := steps[moves[-1]]).version != expert.version and last.before == expert.version:
        del steps[moves[-1]]  # the command ended before it replaced the catalog
    if expert.version is not None and expert.lineage[-1:] != [expert.version]:
        steps.append(_step("found", expert.version))
    if noted.shadow is not None and noted.shadow.version in expert.versions.keys() - {expert.version}:
        expert.shadow = noted.shadow  # one that was promoted or pruned since is none any more
    return expert


def _name(expert: Expert, entry: CatalogEntry, folder: Path) -> str:
    """Return an entry's version name: that of the known version with these weights and settings, or a new one.

    The file of `entry` is relative to `folder`. A new name has the settings if the weights are known with others.
    """
    weights = version_of(entry)
    known = {version: other for version, other in expert.entries.items() if other.sha256 == entry.sha256}
    settings = settings_of(entry, folder) if known or expert.steps else None
    if settings is None:
        return weights
    for version, other in known.items():
        if not setting_changes(settings_of(other, folder) or settings, settings):
            return version
    name = f"{weights}+{digest_of(settings)}"
    return name if known or any(step.version == name for step in expert.steps) else weights


def _holds(file: Path, entry: CatalogEntry) -> bool:
    return file.is_file() and file_sha256(file) == entry.sha256


def _step(did: Action, version: str, before: str | None = None, note: str | None = None) -> Step:
    return Step(at=now(), by=current_user(), did=did, version=version, before=before, note=note)


def _parsed(model: type[Any], path: Path, text: str | None = None) -> Any:
    try:
        return model.model_validate(read(path.read_text(encoding="utf-8") if text is None else text, str(path)))
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise VersionsError(f"{path} cannot be read: {error}; `coserve check` says where") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a+", encoding="ascii") as file:
        with suppress(PermissionError):
            os.fchmod(file.fileno(), 0o664)  # the next one may be another member of the group
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another"
            raise VersionsBusyError(
                f"versions of experts are being changed by process {owner}: wait until it is done, then look again"
            ) from None
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
        remedy = "nothing else has changed; see to the disk"
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            remedy = "who changes experts must be able to write in this folder (group coserve-experts of the service)"
        raise VersionsError(f"{what}: {remedy}") from None
