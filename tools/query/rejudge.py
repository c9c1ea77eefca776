"""`coserve rejudge`: verdicts of stored images under other rules or experts, compared with the stored ones and reviews.

It changes nothing. `rejudge_run` computes the verdicts.
"""

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daemon.line.line import load_routes
from daemon.storage.database.connections import redacted_url
from daemon.units import size_text, spreadsheet_cell
from experts.catalog import Catalog, CatalogEntry
from experts.errors import ExpertError
from experts.versions import VersionsError, version_of
from routing_rules.compile import RulesError
from routing_rules.routes import Routes
from tools.experts.change import find_candidate
from tools.experts.line import ExpertsLine, entries_in_force
from tools.query.reading import StoredImages, read_stored_images
from tools.query.rows import RowFilters
from tools.terminal.console import CommandError

if TYPE_CHECKING:
    from tools.query.rejudge_run import RejudgedImage

#: Memory of the process beside experts: Python, torch and the pictures of a batch; measured 520 MB.
_PROCESS_BYTES = 550_000_000
_COLUMNS = (
    *("inspection_id", "board_type", "serial", "designator", "component"),
    *("verdict", "defect", "would_be", "would_be_defect", "reviewer", "final_verdict", "effect", "image_path"),
)
#: Changes against reviewers: corrections that would no longer be needed, and new ones that would.
EFFECTS = {
    "false_calls_gone": "false calls that would go",
    "escapes_caught": "escapes that would be caught",
    "new_false_calls": "reviewers' passes that would fail",
    "new_escapes": "reviewers' fails that would pass",
}


class RejudgeError(CommandError):
    """Nothing was judged; the text says why."""

    status = 2


@dataclass(frozen=True, slots=True)
class RejudgeRequest:
    """Options of the command. `experts` are NAME=VERSION or NAME=FOLDER, `since` is UTC text."""

    rules: Path | None = None
    experts: tuple[str, ...] = ()
    lot: str | None = None
    since: str | None = None
    component: str | None = None
    verdict: str | None = None
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class RejudgeReport:
    """`summary` in numbers, a row for each change, and sentences that a reader needs to understand them."""

    summary: dict[str, Any]
    changes: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list[str])


def rejudge_line(
    line: ExpertsLine,
    request: RejudgeRequest,
    *,
    threads: int = 1,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    announce: Callable[[str], None] = lambda _: None,
) -> RejudgeReport:
    """Judge the chosen images once more. The database is opened read-only and closed before. Raises RejudgeError."""
    entries, replaced = _entries(line, request)
    catalog, problems = line.catalog(entries, elsewhere=True)
    broken = [problem for problem in problems if any(f": {name}:" in problem for name in replaced)]
    if broken:
        raise RejudgeError("\n".join(broken))
    routes = _routes(line, request, catalog)
    stored: StoredImages | None = line.in_database(
        lambda connection: read_stored_images(connection, _filters(request, replaced), request.limit, lot=request.lot)
    )
    if stored is None:
        raise RejudgeError(f"there is no database at {redacted_url(line.config.database)} yet: nothing was judged")

    import cv2
    import torch

    from tools.query.rejudge_run import memory_bytes, rejudge

    torch.set_num_threads(threads)
    cv2.setNumThreads(threads)
    total = len(stored.images)
    announce(f"{total} images; takes up to {size_text(memory_bytes(catalog) + _PROCESS_BYTES)} of memory")
    try:
        images = rejudge(stored.images, routes, catalog, line.config.images, lambda done: on_progress(done, total))
    except ExpertError as error:
        raise RejudgeError(str(error)) from error
    notes = _notes(line, stored, routes, [image.unread for image in images if image.unread is not None])
    summary = {
        **_summary(images),
        "pruned": stored.pruned,
        "unjudged": stored.unjudged,
        "rules": routes.version,
        "experts": {name: version_of(entries[name]) for name in replaced},
        "notes": notes,
    }
    return RejudgeReport(summary, [_change(image) for image in images if image.is_changed], notes)


def _filters(request: RejudgeRequest, replaced: tuple[str, ...]) -> RowFilters:
    # Without other rules only images that one of these experts answered can change.
    experts = replaced if request.rules is None else ()
    equal = {"component": [request.component], "daemon_verdict": [request.verdict], "expert": list(experts)}
    return RowFilters({name: values for name, values in equal.items() if any(values)}, request.since)


def _entries(line: ExpertsLine, request: RejudgeRequest) -> tuple[dict[str, CatalogEntry], tuple[str, ...]]:
    """Return the catalog's entries with the requested ones in place, whose files may lie anywhere, and their names."""
    experts = line.experts()
    entries = entries_in_force(experts)
    replaced: list[str] = []
    for option in request.experts:
        name, _, version = option.partition("=")
        if not version:
            raise RejudgeError(f"--expert {option}: expected NAME=VERSION or NAME=FOLDER")
        if name not in experts:
            raise RejudgeError(f"--expert {option}: there is no expert {name}; there are {', '.join(experts)}")
        kept_versions = experts[name].versions
        try:
            if ("/" in version or Path(version).exists()) and version not in kept_versions:
                candidate = find_candidate(name, Path(version))
                entries[name] = candidate.entry.model_copy(update={"file": str(candidate.weights.resolve())})
            else:
                entries[name] = kept_versions[experts[name].named(version)].entry
        except VersionsError as error:
            raise RejudgeError(f"--expert {option}: {error}") from None
        replaced.append(name)
    return entries, tuple(replaced)


def _routes(line: ExpertsLine, request: RejudgeRequest, catalog: Catalog) -> Routes:
    rules = request.rules if request.rules is not None else line.config.rules
    if not rules.is_file():
        raise RejudgeError(f"no file {rules}: name a rules file")
    try:
        return load_routes(rules, catalog)
    except RulesError as error:
        raise RejudgeError("\n".join(map(str, error.problems))) from None


def _notes(line: ExpertsLine, stored: StoredImages, routes: Routes, unread: list[str]) -> list[str]:
    notes: list[str] = []
    if stored.pruned:
        notes.append(f"{stored.pruned} more have no picture any more, or never had one: their new verdict is not known")
    if "pass" not in line.config.retention.keep:
        notes.append("pictures of passes are not kept (retention.keep), so new verdicts of passes are not shown")
    if stored.unjudged:
        notes.append(
            f"{stored.unjudged} were unknown (late, or not to be judged then) and have nothing to compare with"
        )
    if unread:
        notes.append(f"{len(unread)} pictures could not be judged again, the first: {unread[0]}")
    older = sum(image.rules_version != routes.version for image in stored.images)
    if older and older < len(stored.images):
        notes.append(f"{older} were judged by other rules than {routes.version}: part of the change is due to them")
    return notes


def _summary(images: Sequence["RejudgedImage"]) -> dict[str, Any]:
    """Count `changes` by verdict before and after, `effects` against reviewers, and boards with a change."""
    judged = [image for image in images if image.unread is None]
    changed = [image for image in judged if image.is_changed]
    verdicts = Counter((image.stored.verdict, image.verdict) for image in changed)
    effects = Counter(map(_effect, changed))
    return {
        "rejudged": len(judged),
        "unchanged": len(judged) - len(changed),
        "changed": len(changed),
        "boards": len({(image.stored.board_type, image.stored.serial) for image in changed}),
        "unread": len(images) - len(judged),
        "changes": [{"from": old, "to": new, "images": count} for (old, new), count in sorted(verdicts.items())],
        "reviewed": sum(image.stored.final is not None for image in judged),
        "effects": {name: effects[name] for name in EFFECTS},
    }


def _effect(image: "RejudgedImage") -> str | None:
    """Return the key of EFFECTS that a changed image counts to."""
    old, final, new = image.stored.verdict, image.stored.final, image.verdict
    if final == "pass" and old == "fail" and new == "pass":
        return "false_calls_gone"
    if final == "fail" and old == "pass" and new in ("fail", "review"):
        return "escapes_caught"
    if final == "pass" and old != "fail" and new == "fail":
        return "new_false_calls"
    if final == "fail" and old != "pass" and new == "pass":
        return "new_escapes"
    return None


def _change(image: "RejudgedImage") -> dict[str, Any]:
    fields = asdict(image.stored) | {
        "would_be": image.verdict,
        "would_be_defect": image.defect,
        "final_verdict": image.stored.final,
        "effect": _effect(image),
    }
    return {name: fields[name] for name in _COLUMNS}


def write_csv(path: Path, changes: Sequence[dict[str, Any]]) -> None:
    """Write the rows of all changes; the header alone if there are none."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        writer.writerows([spreadsheet_cell(row[name]) for name in _COLUMNS] for row in changes)
