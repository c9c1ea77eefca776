"""Putting in, promoting, rolling back: checked as the daemon would, durable, and heard by a daemon that runs.

Refused is what would leave the line with an expert it cannot use: classes that the rules miss, memory that is too
small, a damaged file. Where a daemon that runs refuses the catalog all the same, the catalog becomes what it was.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ValidationError

from daemon.wire.control import ControlError
from experts.catalog import CatalogEntry, CatalogFile
from experts.catalog_edit import read
from experts.errors import WeightsError
from experts.versions import Change, Expert, VersionsError, version_of
from experts.weights import file_sha256, read_header
from tools.experts.line import ExpertsLine
from tools.experts.verify import entry_problems

_RELOAD_S = 60.0
_NO_DAEMON = "no daemon runs: it is in force from the next start on"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Weights from elsewhere with their entry, whose `file` is relative to `root`; `note` is worth a person's look."""

    entry: CatalogEntry
    root: Path
    note: str | None = None

    @property
    def weights(self) -> Path:
        return self.root / self.entry.file


@dataclass(frozen=True, slots=True)
class Switched:
    """What was done. `heard`: a daemon serves it now; else `note` says when it will, or what went wrong."""

    expert: str
    version: str
    before: str | None
    heard: bool
    note: str | None
    lost_comments: bool

    @property
    def is_well(self) -> bool:
        """Whether nobody has to do anything more."""
        return self.heard or self.note == _NO_DAEMON


def find_candidate(name: str, source: Path) -> Candidate:
    """What `source` offers for `name`: a folder as training and import write it, or one weights file of such a folder.

    A weights file without a catalog beside it gets what its own header says, and no temperature. VersionsError.
    """
    folder = source if source.is_dir() else source.parent
    entries = _entries(folder / "catalog.yaml")
    if source.is_dir():
        if not entries:
            raise VersionsError(f"{source}: holds no catalog.yaml, as `coserve train` and `coserve import` write it")
        if name not in entries and len(entries) > 1:
            raise VersionsError(f"{source}: its catalog has no {name}, but {', '.join(entries)}")
        return Candidate(entries.get(name) or next(iter(entries.values())), folder)
    if not source.is_file():
        raise VersionsError(f"{source}: there is no such file or folder")
    mine = [entry for entry in entries.values() if (folder / entry.file).resolve() == source.resolve()]
    if mine:
        return Candidate(mine[0], folder)
    return Candidate(_entry_of(source), folder, note="no catalog lies beside it: its temperature is taken as 1")


def put(line: ExpertsLine, name: str, source: Path) -> tuple[str, str | None]:
    """Check and keep; the version, and what is worth a look. Raises VersionsError."""
    candidate = find_candidate(name, source)
    check(line, name, candidate)
    with line.versions.changing() as change:
        version = change.put(name, candidate.entry, candidate.weights, str(source.resolve()))
    return version, candidate.note


def check(line: ExpertsLine, name: str, candidate: Candidate) -> None:
    """Raise VersionsError with everything that speaks against `candidate` for `name`."""
    problems = entry_problems(name, candidate.entry, candidate.root, forward=True)
    if not problems:
        problems = _line_problems(line, name, candidate)
    if problems:
        raise VersionsError("\n".join(problems))


def _line_problems(line: ExpertsLine, name: str, candidate: Candidate) -> list[str]:
    """What would be wrong with the line, and is not already."""
    present = {expert.name: expert.in_force for expert in line.experts().values() if expert.in_force is not None}
    known = set(line.problems(present))
    entry = candidate.entry.model_copy(update={"file": str(candidate.weights.resolve())})
    return [problem for problem in line.problems({**present, name: entry}, elsewhere=True) if problem not in known]


def switch(line: ExpertsLine, name: str, wanted: str | None) -> Switched:
    """Put the version `wanted` in force, or without one the version before. Raises VersionsError."""
    deed: Literal["promote", "rollback"] = "promote" if wanted is not None else "rollback"
    with line.versions.changing() as change:
        expert = change.expert(name)
        if deed == "promote" and wanted == expert.version:
            raise VersionsError(f"{name} {wanted} is in force already")
        version = expert.named(wanted) if wanted is not None else change.before(name)
        if version == expert.version:
            raise VersionsError(f"{name} {version} is in force already")
        _must_serve(line, change, expert, version)
        text, before = _catalog_text(line), expert.in_force
        change.promote(name, version, deed)
        heard, note = _reload(line, change, name, text, before)
    old = version_of(before) if before is not None else None
    return Switched(name, version, old, heard, note, change.lost_comments)


def _catalog_text(line: ExpertsLine) -> str:
    path = line.versions.catalog
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _must_serve(line: ExpertsLine, change: Change, expert: Expert, version: str) -> None:
    """Raise VersionsError where the line could not work with `version`."""
    kept = expert.kept.get(version)
    if kept is None:
        raise VersionsError(f"{expert.name} {version} is not kept any more: put it in again")
    problems = entry_problems(expert.name, kept.entry, line.versions.folder)
    if not problems:
        entries = {one.name: one.in_force for one in change.experts.values() if one.in_force is not None}
        problems = line.problems({**entries, expert.name: kept.entry})
    if problems:
        raise VersionsError("\n".join(problems))


def _reload(
    line: ExpertsLine, change: Change, name: str, text: str, before: CatalogEntry | None
) -> tuple[bool, str | None]:
    """Have the daemon read the catalog again; what it refuses is taken back."""
    try:
        answer = line.ask("reload", timeout_s=_RELOAD_S)
    except ControlError as error:
        if error.code != "bad_rules":
            return False, f"it is in the catalog, but the daemon did not read it again ({error.reason}): coserve reload"
        change.take_back(name, text, before)
        raise VersionsError(f"the daemon refused the catalog, which is as before now: {error.reason}") from None
    return (True, None) if answer is not None else (False, _NO_DAEMON)


def prunable(line: ExpertsLine, expert: Expert, keep: int) -> list[str]:
    """Versions that came out of force and nobody needs: not the newest `keep` to go back to, not what a daemon serves.

    Candidates that were never promoted stay too.
    """
    try:
        answer = line.ask("experts") or {"experts": []}
    except ControlError as error:
        raise VersionsError(f"what the daemon serves is not known ({error.reason}): nothing was pruned") from None
    served = {row["version"] for row in answer["experts"] if row["expert"] == expert.name}
    was = [step.version for step in expert.steps if step.did in ("found", "promote", "rollback")]
    stays = {expert.version, *served, *expert.lineage[-keep - 1 :]}
    return [version for version in expert.kept if version in was and version not in stays]


def _entries(catalog: Path) -> dict[str, CatalogEntry]:
    if not catalog.is_file():
        return {}
    try:
        return CatalogFile.model_validate(read(catalog.read_text(encoding="utf-8"))).experts
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError, OSError) as error:
        raise VersionsError(f"{catalog}: is no catalog of experts: {error}") from None


def _entry_of(weights: Path) -> CatalogEntry:
    """What a weights file says of itself."""
    try:
        said = dict(read_header(weights).metadata)
        fields = {key: said.get(key) for key in ("architecture", "input_size", "normalisation")}
        classes = read(said.get("classes", "[]"))
        return CatalogEntry.model_validate(
            {**fields, "file": weights.name, "classes": classes, "sha256": file_sha256(weights)}, strict=False
        )
    except (WeightsError, OSError) as error:
        raise VersionsError(str(error)) from None
    except ValidationError as error:
        count = error.error_count()
        raise VersionsError(f"{weights}: its header lacks {count} fields of an entry: name its folder") from None
