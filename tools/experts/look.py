"""What there is to know of experts: versions and who changed them, use in the rules, what reviewers found, drift."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from daemon.storage.database.judged import calls_by_version, recent_confidences
from experts.catalog import CatalogEntry
from experts.drift import compare
from experts.errors import WeightsError
from experts.versions import Expert, version_of
from experts.weights import read_header
from routing_rules.uses import uses
from tools.experts.line import ExpertsLine

Counts = dict[tuple[str, str], Any]


def listed(line: ExpertsLine) -> list[dict[str, Any]]:
    """A row for each expert: from catalog and disk, and from the database where there is one."""
    calls = _calls(line)
    return [_row(line, expert, calls) for expert in line.experts().values()]


def _row(line: ExpertsLine, expert: Expert, calls: Counts) -> dict[str, Any]:
    entry = expert.in_force or next(kept.entry for kept in expert.kept.values())
    mine = [found for (name, _), found in calls.items() if name == expert.name]
    used = [found.first_used_at for found in mine if found.first_used_at is not None]
    return {
        "expert": expert.name,
        "architecture": entry.architecture,
        "classes": list(entry.classes),
        "bytes": _bytes(line, entry),
        "version": expert.version,
        "kept": [version for version in expert.kept if version != expert.version],
        "first_used_at": min(used, default=None),
        "verdicts": sum(found.verdicts for found in mine),
    }


def shown(line: ExpertsLine, expert: Expert) -> dict[str, Any]:
    """Everything of one expert."""
    calls = _calls(line, expert.name)
    served = line.served().get(expert.name)
    return {
        "expert": expert.name,
        "version": expert.version,
        "entry": expert.in_force.model_dump(mode="json", exclude={"confidences"}) if expert.in_force else None,
        "versions": [_version(line, expert, version, calls) for version in _all(expert, calls)],
        "steps": [step.model_dump(mode="json") for step in expert.steps],
        "rules": _uses(line, expert.name),
        "drift": _drift(line, expert),
        "serving": served,
    }


def _version(line: ExpertsLine, expert: Expert, version: str, calls: Counts) -> dict[str, Any]:
    kept = expert.kept.get(version)
    entry = kept.entry if kept else expert.in_force if version == expert.version else None
    found = calls.get((expert.name, version))
    state = "in force" if version == expert.version else "kept" if kept else "gone"
    if state == "kept" and not any(step.version == version and step.did != "put" for step in expert.steps):
        state = "candidate"
    return {
        "version": version,
        "state": state,
        "architecture": entry.architecture if entry else None,
        "bytes": _bytes(line, entry) if entry else None,
        "put_at": kept.put_at if kept else None,
        "put_by": kept.put_by if kept else None,
        "source": kept.source if kept else None,
        "first_used_at": found.first_used_at if found else None,
        "verdicts": found.verdicts if found else 0,
        "reviewed": found.reviewed if found else 0,
        "false_calls": found.false_calls if found else 0,
        "escapes": found.escapes if found else 0,
    }


def _all(expert: Expert, calls: Counts) -> list[str]:
    """Versions oldest first: those that gave verdicts and are gone, those kept, the one in force."""
    found = dict.fromkeys(version for _, version in calls)
    found |= dict.fromkeys(expert.kept)
    if expert.version is not None:
        found.setdefault(expert.version)
    return list(found)


def _calls(line: ExpertsLine, name: str | None = None) -> Counts:
    found = line.in_database(calls_by_version, name) or []
    return {(calls.expert, calls.expert_version): calls for calls in found}


def _drift(line: ExpertsLine, expert: Expert) -> dict[str, Any] | None:
    """The version in force against its training; None where the catalog does not know how sure it was then."""
    entry = expert.in_force
    if entry is None or not entry.confidences:
        return None
    found = line.in_database(recent_confidences, expert.name) or {}
    recent: Mapping[str, list[int]] = found.get((expert.name, version_of(entry)), {})
    training = {label: list(counts) for label, counts in entry.confidences.items()}
    return {**asdict(compare(training, recent)), "training": training, "recent": dict(recent)}


def _uses(line: ExpertsLine, name: str) -> list[dict[str, Any]]:
    """Where the rules in the file use `name`, and what they make of its answers."""
    entries = {one.name: one.in_force for one in line.experts().values() if one.in_force is not None}
    catalog, _ = line.catalog(entries)
    routes = line.routes(catalog)
    return [asdict(use) for use in uses(routes, name)] if routes is not None else []


def _bytes(line: ExpertsLine, entry: CatalogEntry) -> int | None:
    try:
        return read_header(line.versions.folder / entry.file).region_bytes
    except WeightsError:
        return None
