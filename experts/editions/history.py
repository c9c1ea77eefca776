"""Each expert's versions and what was done to them, told from editions and candidates.

A version is named by its weights, `0a1b2c3d4e5f`; with other settings, the same weights are another version, named
`0a1b2c3d4e5f+9f8e7d6c5b4a`.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby
from pathlib import Path

from experts.catalog import CatalogEntry, CatalogError, read_catalog, settings_of
from experts.editions.candidates import Candidate, Shadow, Step, read_candidates, write_candidates
from experts.editions.edition import Edition, EditionError
from experts.editions.folder import EditionFolder, without_files
from experts.spec import digest_of, setting_changes

#: Editions that are read back: each names all experts, and a page asks for them every few seconds.
_NEWEST = 50


@dataclass(slots=True)
class Expert:
    """One expert's versions. `in_force` is its entry in the edition in force, `version` its name; None before."""

    name: str
    in_force: CatalogEntry | None = None
    #: Versions whose weights are here; the entries' files are relative to the catalog's folder.
    versions: dict[str, Candidate] = field(default_factory=dict[str, Candidate])
    steps: list[Step] = field(default_factory=list[Step])
    version: str | None = None
    shadow: Shadow | None = None
    #: Settings by version, of all that were ever seen: what names are made of.
    known_settings: dict[str, str | None] = field(default_factory=dict[str, str | None])

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
            if step.did == "rollback" and step.version in line:
                del line[len(line) - line[::-1].index(step.version) :]
            if step.did in ("found", "promote", "rollback") and line[-1:] != [step.version]:
                line.append(step.version)
        # Pruned versions cannot come back.
        present = [version for version in line if version in self.versions or version == self.version]
        return [version for place, version in enumerate(present) if present[place - 1 : place] != [version]]

    @property
    def waiting(self) -> list[str]:
        """Return the versions that were put in and have not been in force since."""
        last = {step.version: step.did for step in self.steps if step.did in ("put", "found", "promote", "rollback")}
        return [version for version in self.versions if last.get(version) == "put" and version != self.version]

    def before(self) -> str:
        """Return the version that a rollback brings back. Raises EditionError if there is none."""
        if self.version is None:
            raise EditionError(f"{self.name} is not in force: coserve experts promote {self.name} VERSION")
        if len(self.lineage) < 2:
            raise EditionError(
                f"{self.name} {self.version} is the first version here: there is none before it to go back to"
            )
        return self.lineage[-2]

    def named(self, name: str) -> str:
        """Return the stored version with this name, or with these first four letters or more. Raises EditionError."""
        matches = [version for version in self.versions if version.startswith(name)] if len(name) >= 4 else []
        if len(matches) == 1:
            return matches[0]
        if not self.versions:
            put = f"`coserve experts put {self.name} FOLDER`"
            raise EditionError(f"{self.name} has no stored versions yet, and so none named {name!r}: {put} adds one")
        listed = ", ".join(self.versions)
        why = "names several of them" if matches else "is none of them"
        raise EditionError(f"{self.name} has the versions {listed}; {name!r} {why}: `coserve experts show`")

    def name_of(self, entry: CatalogEntry, root: Path) -> str:
        """Return the version name of an entry whose file is relative to `root`: that of the known version with its
        weights and settings, or a new one.
        """
        weights, settings = version_of(entry), settings_of(entry, root)
        same = [version for version in self.known_settings if weights_of(version) == weights]
        for version in same:
            known = self.known_settings[version]
            if settings is None or known is None or not setting_changes(known, settings):
                return version
        name = f"{weights}+{digest_of(settings)}" if same and settings is not None else weights
        self.known_settings[name] = settings
        return name


def version_of(entry: CatalogEntry) -> str:
    return entry.sha256[:12]


def weights_of(version: str) -> str:
    """Return the weights' part of a version's name, which is the version in the results."""
    return version.partition("+")[0]


def past(folder: EditionFolder, newest: int, depth: int = _NEWEST) -> list[Edition]:
    """Return the edition `newest` and those in force before it, newest first; not what is damaged or was deleted.

    Numbers between an edition and its parent were never in force. One that mended a damaged one has no parent.
    """
    editions: list[Edition] = []
    for number in reversed(folder.numbers()):
        if number <= newest and len(editions) < depth:
            with suppress(EditionError, OSError):
                editions.append(edition := folder.read(number))
                newest = edition.parent or number - 1
    return editions


def experts_of(folder: EditionFolder) -> dict[str, Expert]:
    """Return the experts in force in the catalog's order, then those of candidates. Raises EditionError, OSError.

    Before the first edition those of the working catalog count as in force.
    """
    in_force, candidates = folder.in_force(), read_candidates(folder.catalog)
    if in_force is None:
        experts = _working(folder)
    else:
        experts = {name: Expert(name) for name in in_force.experts}
        for edition in reversed([in_force, *past(folder, in_force.parent or 0)]):
            _add_edition(experts, folder, edition)
    for candidate in candidates.candidates:
        expert = experts.setdefault(candidate.expert, Expert(candidate.expert))
        entry, known = folder.relative_entry(candidate.entry), expert.versions.get(candidate.version)
        expert.known_settings.setdefault(candidate.version, settings_of(entry, folder.root))
        expert.versions[candidate.version] = candidate.model_copy(update={"entry": known.entry if known else entry})
    for name, steps in groupby(sorted(candidates.steps, key=lambda step: step.expert), key=lambda step: step.expert):
        expert = experts.setdefault(name, Expert(name))
        # Editions stay in their order even where the clock was set back between two of them.
        expert.steps = list(merge(expert.steps, steps, key=lambda step: step.at))
    for name, shadow in candidates.shadows.items():
        if name in experts and shadow.version in experts[name].versions.keys() - {experts[name].version}:
            experts[name].shadow = shadow
    return {name: expert for name, expert in experts.items() if expert.in_force or expert.versions}


def waiting_weights(experts: Iterable[Expert]) -> set[str]:
    """Return the sha256 of the weights of candidates and of versions in shadow."""
    return {
        sha256
        for expert in experts
        for version in (*expert.waiting, *([expert.shadow.version] if expert.shadow else ()))
        for sha256 in expert.versions[version].entry.weights
    }


def keep_candidates(
    folder: EditionFolder, entries: Mapping[str, CatalogEntry], source: str, note: str | None = None
) -> dict[str, str]:
    """Take in weights, at the absolute paths of `entries`, as candidates unless they are known; return their versions.

    Damaged ones are replaced. Raises EditionError.
    """
    with folder.changing():
        for sha256 in set[str]().union(*(entry.weights for entry in entries.values())):
            if folder.weights.has(sha256) and not folder.weights.is_whole(sha256):
                folder.weights.remove(sha256)
        if lacking := folder.enter(entries):
            raise EditionError("\n".join(lacking.values()))
        experts, candidates, versions = experts_of(folder), read_candidates(folder.catalog), dict[str, str]()
        for name, entry in entries.items():
            expert = experts.get(name) or Expert(name)
            versions[name] = version = expert.name_of(folder.relative_entry(entry), folder.root)
            if version not in expert.versions and version != expert.version:
                candidates = candidates.put(name, version, without_files(entry), source, note)
        write_candidates(folder.catalog, candidates)
    return versions


def _working(folder: EditionFolder) -> dict[str, Expert]:
    try:
        entries = read_catalog(folder.catalog)
    except CatalogError as error:
        raise EditionError(f"{error}; `coserve check` says where") from None
    return {
        name: Expert(
            name, entry, version=version_of(entry), known_settings={version_of(entry): settings_of(entry, folder.root)}
        )
        for name, entry in entries.items()
    }


def _add_edition(experts: dict[str, Expert], folder: EditionFolder, edition: Edition) -> None:
    at = edition.created_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    source = edition.release.name if edition.release else edition.why
    for name, released in edition.experts.items():
        expert, entry = experts.setdefault(name, Expert(name)), folder.relative_entry(released)
        if entry == expert.in_force:
            continue
        version, before = expert.name_of(entry, folder.root), expert.version
        if version != before:
            did = edition.why if edition.why in ("promote", "rollback") else "found"
            step = {"at": at, "by": edition.who, "did": did, "version": version, "before": before}
            expert.steps.append(Step(expert=name, note=edition.note, **step))
        if folder.weights.has(entry.sha256):
            first = {"put_at": at, "put_by": edition.who, "source": source, "version": version}
            known = expert.versions.get(version) or Candidate(expert=name, entry=entry, **first)
            expert.versions[version] = known.model_copy(update={"entry": entry})
        expert.in_force, expert.version = entry, version
    for name in experts.keys() - edition.experts.keys():
        experts[name].in_force = experts[name].version = None
