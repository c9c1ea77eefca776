"""Each expert's versions and what was done to them, told from editions and candidates.

A version is named by its weights, `0a1b2c3d4e5f`; with other settings, the same weights are another version, named
`0a1b2c3d4e5f+9f8e7d6c5b4a`.
"""

from dataclasses import dataclass, field
from typing import Literal

from experts.catalog import CatalogEntry, settings_of
from experts.editions.candidates import Candidates, Shadow, read_candidates
from experts.editions.edition import Edition, EditionError
from experts.editions.folder import EditionFolder
from experts.spec import digest_of, setting_changes

#: Editions that are read back: each names all experts, and a page asks for them every few seconds.
_NEWEST = 100

Action = Literal["found", "put", "promote", "rollback", "prune", "shadow", "unshadow"]


@dataclass(frozen=True, slots=True)
class Step:
    """One action and its author; `before` was in force before. `found`: a reload, pull or restore brought it."""

    at: str
    by: str
    did: Action
    version: str
    before: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version whose weights are here; the entry's file is relative to the catalog's folder."""

    entry: CatalogEntry
    put_at: str
    put_by: str
    source: str


@dataclass(slots=True)
class Expert:
    """One expert's versions. `in_force` is its entry in the edition in force, `version` its name; None before."""

    name: str
    in_force: CatalogEntry | None = None
    versions: dict[str, StoredVersion] = field(default_factory=dict[str, StoredVersion])
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
            if step.did == "rollback" and len(line) > 1:
                line.pop()
            if step.did in ("found", "promote", "rollback") and line[-1:] != [step.version]:
                line.append(step.version)
        # Pruned versions cannot come back.
        present = [version for version in line if version in self.versions or version == self.version]
        return [version for place, version in enumerate(present) if present[place - 1 : place] != [version]]

    def before(self) -> str:
        """Return the version that a rollback brings back. Raises EditionError if there is none."""
        if len(self.lineage) < 2:
            raise EditionError(
                f"{self.name} {self.version or ''} is the first version here: there is none before it to go back to"
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

    def name_of(self, entry: CatalogEntry, folder: EditionFolder) -> str:
        """Return the version name of an entry without files: that of the known version with its weights and settings,
        or a new one.
        """
        weights = entry.sha256[:12]
        settings = settings_of(folder.in_place(entry), folder.root)
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


def candidate_weights(folder: EditionFolder) -> set[str]:
    """Return the sha256 of weights that candidates and shadows need. Raises EditionError."""
    candidates = read_candidates(folder.catalog)
    in_shadow = {weights_of(shadow.version) for shadow in candidates.shadows.values()}
    weights = {sha256 for sha256 in folder.weights.all() if sha256[:12] in in_shadow}
    return weights.union(*(candidate.entry.weights for candidate in candidates.candidates))


def experts_of(folder: EditionFolder) -> dict[str, Expert]:
    """Return the experts in force in the catalog's order, then those of candidates. Raises EditionError, OSError."""
    in_force, candidates = folder.in_force(), read_candidates(folder.catalog)
    experts = {name: Expert(name) for name in (in_force.experts if in_force else {})}
    current = in_force.number if in_force else 0
    for number in [number for number in folder.numbers() if number <= current][-_NEWEST:]:
        _tell(experts, folder, in_force if in_force and number == current else folder.read(number))
    for candidate in candidates.candidates:
        expert = experts.setdefault(candidate.expert, Expert(candidate.expert))
        _keep(expert, folder, candidate.entry, candidate.version, candidate.put_at, candidate.put_by, candidate.source)
    _add_steps(experts, candidates)
    for name, shadow in candidates.shadows.items():
        if name in experts and shadow.version in experts[name].versions.keys() - {experts[name].version}:
            experts[name].shadow = shadow
    return {name: expert for name, expert in experts.items() if expert.in_force or expert.versions}


def _tell(experts: dict[str, Expert], folder: EditionFolder, edition: Edition) -> None:
    at = edition.created_at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    source = edition.release.name if edition.release else edition.why
    for name, entry in edition.experts.items():
        expert = experts.setdefault(name, Expert(name))
        version, before = expert.name_of(entry, folder), expert.version
        if version != before:
            did = edition.why if edition.why in ("promote", "rollback") else "found"
            expert.steps.append(Step(at, edition.who, did, version, before, edition.note))
        _keep(expert, folder, entry, version, at, edition.who, source)
        expert.in_force, expert.version = folder.in_place(entry), version
    for name in experts.keys() - edition.experts.keys():
        experts[name].in_force = experts[name].version = None


def _keep(
    expert: Expert, folder: EditionFolder, entry: CatalogEntry, version: str, at: str, by: str, source: str
) -> None:
    """Note a version whose weights are here. One that was put in keeps who put it, though it came into force since."""
    expert.known_settings.setdefault(version, settings_of(folder.in_place(entry), folder.root))
    if folder.weights.has(entry.sha256):
        known = expert.versions.get(version)
        first = (known.put_at, known.put_by, known.source) if known else (at, by, source)
        expert.versions[version] = StoredVersion(folder.in_place(entry), *first)


def _add_steps(experts: dict[str, Expert], candidates: Candidates) -> None:
    for step in candidates.steps:
        expert = experts.setdefault(step.expert, Expert(step.expert))
        expert.steps.append(Step(step.at, step.by, step.did, step.version, None, step.note))
    for expert in experts.values():
        expert.steps.sort(key=lambda step: step.at)
