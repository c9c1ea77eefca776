"""From a wish to its result: which rules and experts, which images, and what people should know of the answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from daemon.line.line import load_routes
from daemon.storage.database.connections import shown
from daemon.units import size_text
from experts.catalog import Catalog, CatalogEntry
from experts.errors import ExpertError
from experts.versions import VersionsError, version_of
from routing_rules.compile import RulesError
from routing_rules.routes import Routes
from tools.experts.change import find_candidate
from tools.experts.line import ExpertsLine
from tools.query.moments import MomentError, moment
from tools.query.rejudge.choose import Chosen, Filter, choose
from tools.query.rejudge.report import rows, summary

#: What the process takes beside experts: Python, torch and the pictures of a batch; measured 520 MB.
_PROCESS_BYTES = 550_000_000


class JobError(Exception):
    """The wish cannot be fulfilled; the text says why."""


@dataclass(frozen=True, slots=True)
class Wish:
    """As on the command line. `experts` are NAME=VERSION or NAME=FOLDER."""

    rules: Path | None = None
    experts: tuple[str, ...] = ()
    lot: str | None = None
    since: str | None = None
    component: str | None = None
    verdict: str | None = None
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class Result:
    """`summary` in numbers, a row for each change, and sentences that a reader must know to read them rightly."""

    summary: dict[str, Any]
    changes: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list[str])


def rejudge_line(
    line: ExpertsLine,
    wish: Wish,
    *,
    threads: int = 1,
    on_done: Callable[[int, int], None] = lambda _done, _all: None,
    tell: Callable[[str], None] = lambda _: None,
) -> Result:
    """Judge again what `wish` names; the database is opened read-only and closed before. Raises JobError."""
    entries, replaced = _entries(line, wish)
    catalog, problems = line.catalog(entries, elsewhere=True)
    broken = [problem for problem in problems if any(f": {name}:" in problem for name in replaced)]
    if broken:
        raise JobError("\n".join(broken))
    routes = _routes(line, wish, catalog)
    # Without other rules an image is touched only where one of these experts had answered.
    only = replaced if wish.rules is None else ()
    wanted = Filter(wish.lot, _moment(wish.since), wish.component, wish.verdict, only, wish.limit)
    chosen: Chosen | None = line.in_database(choose, wanted)
    if chosen is None:
        raise JobError(f"there is no database at {shown(line.config.database)} yet: nothing was judged")

    import cv2
    import torch

    from tools.query.rejudge.run import memory_bytes, rejudge

    torch.set_num_threads(threads)
    cv2.setNumThreads(threads)
    tell(f"{len(chosen.images)} images; takes up to {size_text(memory_bytes(catalog) + _PROCESS_BYTES)} of memory")
    done = 0

    def finished(count: int) -> None:
        nonlocal done
        done += count
        on_done(done, len(chosen.images))

    try:
        found = rejudge(chosen.images, routes, catalog, line.config.images, finished)
    except ExpertError as error:
        raise JobError(str(error)) from error
    notes = _notes(line, chosen, routes, [one.unread for one in found if one.unread is not None])
    with_counts = {**summary(found), "pruned": chosen.pruned, "unjudged": chosen.unjudged, "rules": routes.version}
    versions = {name: version_of(entries[name]) for name in replaced}
    return Result({**with_counts, "experts": versions, "notes": notes}, rows(found), notes)


def _entries(line: ExpertsLine, wish: Wish) -> tuple[dict[str, CatalogEntry], tuple[str, ...]]:
    """The catalog's entries with those of the wish in place, whose files may lie anywhere; and who was replaced."""
    experts = line.experts()
    entries = {expert.name: expert.in_force for expert in experts.values() if expert.in_force is not None}
    replaced: list[str] = []
    for said in wish.experts:
        name, _, what = said.partition("=")
        if not what:
            raise JobError(f"--expert {said}: expected NAME=VERSION or NAME=FOLDER")
        if name not in experts:
            raise JobError(f"--expert {said}: there is no expert {name}; there are {', '.join(experts)}")
        try:
            if ("/" in what or Path(what).exists()) and what not in experts[name].kept:
                candidate = find_candidate(name, Path(what))
                found = candidate.entry.model_copy(update={"file": str(candidate.weights.resolve())})
            else:
                found = experts[name].kept[experts[name].named(what)].entry
        except VersionsError as error:
            raise JobError(f"--expert {said}: {error}") from None
        entries[name] = found
        replaced.append(name)
    return entries, tuple(replaced)


def _routes(line: ExpertsLine, wish: Wish, catalog: Catalog) -> Routes:
    rules = wish.rules if wish.rules is not None else line.config.rules
    if not rules.is_file():
        raise JobError(f"no file {rules}: name a rules file")
    try:
        return load_routes(rules, catalog)
    except RulesError as error:
        raise JobError("\n".join(map(str, error.problems))) from None


def _moment(since: str | None) -> str | None:
    if since is None:
        return None
    try:
        return moment(since, datetime.now(UTC), "begin")
    except MomentError as error:
        raise JobError(f"--since: {error}") from None


def _notes(line: ExpertsLine, chosen: Chosen, routes: Routes, unread: list[str]) -> list[str]:
    notes: list[str] = []
    if chosen.pruned:
        notes.append(f"{chosen.pruned} more have no picture any more, or never had one: what they would become is open")
    if "pass" not in line.config.retention.keep:
        notes.append("pictures of passes are not kept (retention.keep), so what a pass would become is not shown")
    if chosen.unjudged:
        notes.append(
            f"{chosen.unjudged} were unknown (late, or not to be judged then) and have nothing to compare with"
        )
    if unread:
        notes.append(f"{len(unread)} pictures could not be judged again, the first: {unread[0]}")
    older = sum(image.rules_version != routes.version for image in chosen.images)
    if older and older < len(chosen.images):
        notes.append(f"{older} were judged by other rules than {routes.version}: part of the change is theirs")
    return notes
