"""Facts about experts: their versions and who changed them, their use in the rules, false calls and escapes, drift."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from daemon.storage.database.reviews import ExpertCalls, calls_by_version, recent_confidences
from daemon.wire.control import ControlError
from experts.catalog import CatalogEntry
from experts.drift import compare
from experts.errors import WeightsError
from experts.versions import Expert, Versions, VersionsError, version_of
from experts.weights import read_header
from routing_rules.uses import uses
from tools.experts.line import ExpertsLine, entries_in_force

#: By expert and version.
_CallCounts = dict[tuple[str, str], ExpertCalls]
Standing = Literal["in force", "kept", "gone", "not known"]


@dataclass(frozen=True, slots=True)
class CatalogVersions:
    """The experts of a catalog with their versions of today, or the `problem` with which it cannot be read."""

    experts: Mapping[str, Expert]
    problem: str | None = None

    @classmethod
    def of(cls, catalog: Path) -> "CatalogVersions":
        try:
            return cls(Versions(catalog).read())
        except (VersionsError, OSError) as error:
            return cls({}, str(error).splitlines()[0])

    def standing(self, expert: str, version: str) -> Standing:
        if self.problem is not None:
            return "not known"
        return _standing(self.experts[expert], version) if expert in self.experts else "gone"

    def in_words(self, expert: str, version: str) -> str:
        row = self.experts.get(expert)
        in_force = f"in force today is {row.version or 'none'}" if row else "the catalog has no such expert any more"
        match self.standing(expert, version):
            case "in force":
                return "it is in force today"
            case "not known":
                return f"the catalog cannot be read now ({self.problem})"
            case "kept":
                return f"it is kept beside the catalog; {in_force}"
            case _:
                return f"these weights are deleted; {in_force}"


def _standing(expert: Expert, version: str) -> Standing:
    if expert.version == version:
        return "in force"
    return "kept" if version in expert.versions else "gone"


def list_experts(line: ExpertsLine) -> list[dict[str, Any]]:
    """Return a row for each expert: from catalog and disk, and from the database if there is one."""
    calls = _calls(line)
    rows: list[dict[str, Any]] = []
    for expert in line.experts().values():
        entry = expert.in_force or next(version.entry for version in expert.versions.values())
        counts = [count for (name, _), count in calls.items() if name == expert.name]
        first_uses = [count.first_used_at for count in counts if count.first_used_at is not None]
        rows.append(
            {
                "expert": expert.name,
                "architecture": entry.architecture,
                "classes": list(entry.classes),
                "bytes": _weights_bytes(line, entry),
                "version": expert.version,
                "kept": [version for version in expert.versions if version != expert.version],
                "first_used_at": min(first_uses, default=None),
                "verdicts": sum(count.verdicts for count in counts),
            }
        )
    return rows


def describe_expert(line: ExpertsLine, name: str) -> dict[str, Any]:
    """Return everything that is known of one expert; exit with status 1 if there is none."""
    expert = line.expert(name)
    calls = _calls(line, name)
    # Oldest first: versions that gave verdicts and are deleted, those that are kept, the one in force.
    versions = dict.fromkeys([*(version for _, version in calls), *expert.versions])
    if expert.version is not None:
        versions.setdefault(expert.version)
    return {
        "expert": name,
        "version": expert.version,
        "entry": expert.in_force.model_dump(mode="json", exclude={"confidences"}) if expert.in_force else None,
        "versions": [_describe_version(line, expert, version, calls) for version in versions],
        "steps": [step.model_dump(mode="json") for step in expert.steps],
        "rules": _uses(line, name),
        "drift": _drift(line, expert),
        "serving": _serving(line, name),
    }


def _describe_version(line: ExpertsLine, expert: Expert, version: str, calls: _CallCounts) -> dict[str, Any]:
    candidate = expert.versions.get(version)
    entry = candidate.entry if candidate else expert.in_force if version == expert.version else None
    counts = calls.get((expert.name, version))
    state = _standing(expert, version)
    is_candidate = state == "kept" and all(step.did == "put" for step in expert.steps if step.version == version)
    return {
        "version": version,
        "state": "candidate" if is_candidate else state,
        "architecture": entry.architecture if entry else None,
        "bytes": _weights_bytes(line, entry) if entry else None,
        "put_at": candidate.put_at if candidate else None,
        "put_by": candidate.put_by if candidate else None,
        "source": candidate.source if candidate else None,
        "first_used_at": counts.first_used_at if counts else None,
        "verdicts": counts.verdicts if counts else 0,
        "reviewed": counts.reviewed if counts else 0,
        "false_calls": counts.false_calls if counts else 0,
        "escapes": counts.escapes if counts else 0,
    }


def _calls(line: ExpertsLine, name: str | None = None) -> _CallCounts:
    counts = line.in_database(lambda connection: calls_by_version(connection, name)) or []
    return {(count.expert, count.expert_version): count for count in counts}


def _drift(line: ExpertsLine, expert: Expert) -> dict[str, Any] | None:
    """Compare the version in force with its training; None if the catalog does not know how sure it was then."""
    entry = expert.in_force
    if entry is None or not entry.confidences:
        return None
    confidences = line.in_database(lambda connection: recent_confidences(connection, expert.name)) or {}
    recent = confidences.get((expert.name, version_of(entry)), {})
    training = {label: list(counts) for label, counts in entry.confidences.items()}
    return {**asdict(compare(training, recent)), "training": training, "recent": dict(recent)}


def _uses(line: ExpertsLine, name: str) -> list[dict[str, Any]]:
    """Return the steps of the rules that use `name`, with what they make of its answers."""
    catalog, _ = line.catalog(entries_in_force(line.experts()))
    routes = line.routes(catalog)
    return [asdict(use) for use in uses(routes, name)] if routes is not None else []


def _serving(line: ExpertsLine, name: str) -> dict[str, Any] | None:
    """Return the daemon's row of the expert; None if no daemon runs, or it may not be asked."""
    try:
        answer = line.ask("experts") or {"experts": ()}
    except ControlError:
        return None
    return next((row for row in answer["experts"] if row["expert"] == name), None)


def _weights_bytes(line: ExpertsLine, entry: CatalogEntry) -> int | None:
    try:
        return read_header(line.versions.folder / entry.file).region_bytes
    except WeightsError:
        return None
