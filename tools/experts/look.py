"""Facts about experts: their versions and who changed them, their use in the rules, false calls and escapes, drift."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from daemon.shadow.comparison import shadow_report
from daemon.storage.database.reviews import (
    ExpertCalls,
    VersionKey,
    answered_settings,
    calls_by_version,
    recent_confidences,
)
from daemon.wire.control import ControlError
from experts.catalog import CatalogEntry, settings_of
from experts.drift import compare
from experts.editions.edition import EditionError
from experts.editions.folder import EditionFolder
from experts.editions.history import Expert, experts_of, version_of, weights_of
from experts.errors import WeightsError
from experts.spec import SettingChange, digest_of, setting_changes
from experts.weights import read_header
from routing_rules.routes import uses
from tools.experts.line import ExpertsLine

_CallCounts = dict[VersionKey, ExpertCalls]
#: `other settings`: the weights are in force or kept, but not with the settings in question.
Standing = Literal["in force", "kept", "other settings", "gone", "not known"]
_STANDING = {
    "kept": "it is kept beside the catalog",
    "other settings": "its weights are here, but not with these settings",
    "gone": "these weights are deleted",
}


@dataclass(frozen=True, slots=True)
class CatalogVersions:
    """A catalog's experts with their versions of today, or the `problem` with which it cannot be read."""

    folder: Path
    experts: Mapping[str, Expert]
    problem: str | None = None

    @classmethod
    def from_catalog(cls, catalog: Path) -> "CatalogVersions":
        try:
            return cls(catalog.parent, experts_of(EditionFolder(catalog)))
        except (EditionError, OSError) as error:
            return cls(catalog.parent, {}, str(error).splitlines()[0])

    def standing(self, expert: str, version: str, settings: str | None) -> Standing:
        """Return where a version is today with these settings (ExpertSpec.settings, None: not recorded)."""
        if self.problem is not None:
            return "not known"
        row = self.experts.get(expert, Expert(expert))
        same_weights = [name for name in row.entries if weights_of(name) == version]
        for name in same_weights:
            if settings is None or _is_same(settings, settings_of(row.entries[name], self.folder)):
                return "in force" if name == row.version else "kept"
        return "other settings" if same_weights else "gone"

    def differing(self, expert: str, settings: str | None) -> list[SettingChange]:
        """Return the settings that have other values in force today."""
        entry = self.experts[expert].in_force if expert in self.experts else None
        today = settings_of(entry, self.folder) if entry is not None else None
        return setting_changes(settings, today) if settings is not None and today is not None else []

    def in_words(self, expert: str, version: str, settings: str | None) -> str:
        standing, row = self.standing(expert, version, settings), self.experts.get(expert)
        if self.problem is not None:
            return f"the catalog cannot be read now ({self.problem})"
        if standing == "in force":
            same = "with the same settings" if settings is not None else "but its settings then are not known"
            return f"it is in force today, {same}"
        in_force = f"in force today is {row.version or 'none'}" if row else "the catalog has no such expert any more"
        changes = ", ".join(map(str, self.differing(expert, settings)))
        others = f" with other settings (then → today): {changes}" if changes else ""
        return f"{_STANDING[standing]}; {in_force}{others}"


def _is_same(settings: str, today: str | None) -> bool:
    return today is not None and not setting_changes(settings, today)


def list_experts(line: ExpertsLine) -> list[dict[str, Any]]:
    """Return a row for each expert, from catalog, disk, and the database if there is one."""
    calls = _calls(line)
    rows: list[dict[str, Any]] = []
    for expert in line.experts().values():
        entry = expert.in_force or next(version.entry for version in expert.versions.values())
        counts = [count for (name, _, _), count in calls.items() if name == expert.name]
        first_uses = [count.first_used_at for count in counts if count.first_used_at is not None]
        rows.append(
            {
                "expert": expert.name,
                "architecture": entry.architecture,
                "network": entry.network,
                "classes": list(entry.classes),
                "bytes": _weights_bytes(line, entry),
                "version": expert.version,
                "settings": _settings_in_force(line, expert),
                "kept": [version for version in expert.versions if version != expert.version],
                "first_used_at": min(first_uses, default=None),
                "verdicts": sum(count.verdicts for count in counts),
            }
        )
    return rows


def describe_expert(line: ExpertsLine, name: str) -> dict[str, Any]:
    """Return all that is known of one expert. Raises EditionError if there is none."""
    expert = line.expert(name)
    return {
        "expert": name,
        "version": expert.version,
        "settings": _settings_in_force(line, expert),
        "network": expert.in_force.network if expert.in_force else None,
        "entry": expert.in_force.model_dump(mode="json", exclude={"confidences"}) if expert.in_force else None,
        "versions": _describe_versions(line, expert),
        "steps": [step.model_dump(exclude={"expert"}) for step in expert.steps],
        "rules": _uses(line, name),
        "drift": _drift(line, expert),
        "serving": _serving(line, name),
    }


def describe_shadow(line: ExpertsLine, name: str) -> dict[str, Any] | None:
    """Return an expert's shadow_report and its process's `problem`; None without a shadow or any results."""
    expert = line.expert(name)
    shadow, in_force = expert.shadow, (weights_of(expert.version or ""), _settings_in_force(line, expert) or "")
    if shadow is None:
        return None
    report = line.in_database(
        lambda connection: shadow_report(lambda query: connection.execute(query).all(), name, in_force, shadow)
    )
    daemon = _serving(line, name, "status", "shadows") or {"problem": "no daemon runs here, or it has not read this"}
    return report and {**report, **daemon}


def _settings_in_force(line: ExpertsLine, expert: Expert) -> str | None:
    settings = settings_of(expert.in_force, line.folder.root) if expert.in_force is not None else None
    return digest_of(settings) if settings is not None else None


def _describe_versions(line: ExpertsLine, expert: Expert) -> list[dict[str, Any]]:
    """Return a row for each version with its settings: those that gave verdicts, oldest first, then those not yet used.

    Settings kept nowhere have their digest in the version's name if the weights answered with others too.
    """
    folder, calls = line.folder.root, _calls(line, expert.name)
    answered = line.in_database(answered_settings) or {}
    texts = {digest: text for (name, digest), text in answered.items() if name == expert.name}
    today, in_shadow = CatalogVersions(folder, {expert.name: expert}), expert.shadow.version if expert.shadow else None
    names: dict[tuple[str, str | None], str] = {}
    for name, entry in reversed(expert.entries.items()):
        text = settings_of(entry, folder) or ""
        digest = next((known for known, other in texts.items() if text and _is_same(other, text)), digest_of(text))
        texts.setdefault(digest, text)
        names[weights_of(name), digest] = name
    keys = dict.fromkeys([*((version, settings) for _, version, settings in calls), *names])
    uses = Counter(version for version, _ in keys)
    rows: list[dict[str, Any]] = []
    for version, settings in keys:
        name = f"{version}+{settings}" if settings is not None and uses[version] > 1 else version
        name, text = names.get((version, settings), name), texts.get(settings)
        entry, stored = expert.entries.get(name), expert.versions.get(name)
        state = today.standing(expert.name, version, text) if text else "not recorded"
        is_candidate = state == "kept" and name in expert.waiting
        counts = calls.get((expert.name, version, settings))
        rows.append(
            {
                "version": name,
                "settings": settings,
                "differs": [str(change) for change in today.differing(expert.name, text)],
                "state": "in shadow" if name == in_shadow else "candidate" if is_candidate else state,
                "architecture": entry.architecture if entry else None,
                "bytes": _weights_bytes(line, entry) if entry else None,
                "put_at": stored.put_at if stored else None,
                "put_by": stored.put_by if stored else None,
                "source": stored.source if stored else None,
                "first_used_at": counts.first_used_at if counts else None,
                **{name: getattr(counts, name, 0) for name in ("verdicts", "reviewed", "false_calls", "escapes")},
            }
        )
    return rows


def _calls(line: ExpertsLine, name: str | None = None) -> _CallCounts:
    counts = line.in_database(lambda connection: calls_by_version(connection, name)) or []
    return {(count.expert, count.expert_version, count.expert_settings): count for count in counts}


def _drift(line: ExpertsLine, expert: Expert) -> dict[str, Any] | None:
    """Compare the version in force with its training; None if the catalog lacks its confidences then."""
    entry = expert.in_force
    if entry is None or not entry.confidences:
        return None
    confidences = line.in_database(lambda connection: recent_confidences(connection, expert.name)) or {}
    recent = confidences.get((expert.name, version_of(entry), _settings_in_force(line, expert)), {})
    training = {label: list(counts) for label, counts in entry.confidences.items()}
    return {**asdict(compare(training, recent)), "training": training, "recent": dict(recent)}


def _uses(line: ExpertsLine, name: str) -> list[dict[str, Any]]:
    _, routes = line.in_force()
    return [asdict(use) for use in uses(routes, name)] if routes is not None else []


def _serving(line: ExpertsLine, name: str, kind: str = "experts", rows: str = "experts") -> dict[str, Any] | None:
    """Return the daemon's row of the expert; None if no daemon runs, or it may not be asked."""
    try:
        answer = line.ask(kind) or {}
    except ControlError:
        return None
    return next((row for row in answer.get(rows, ()) if row["expert"] == name), None)


def _weights_bytes(line: ExpertsLine, entry: CatalogEntry) -> int | None:
    try:
        return read_header(line.folder.root / entry.file).region_bytes
    except WeightsError:
        return None
