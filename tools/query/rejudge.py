"""`coserve rejudge`: verdicts of stored images under other rules or experts, beside the stored ones and reviews'."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from daemon.storage.database.reviews import EFFECTS, answered_settings, effect_of
from daemon.units import count_text, size_text
from experts.catalog import Catalog, CatalogEntry
from experts.editions.edition import EditionError
from experts.editions.history import version_of
from experts.errors import ExpertError
from experts.spec import ExpertId, setting_changes
from routing_rules.compile import RulesError
from routing_rules.routes import Routes
from tools.experts.change import find_candidate
from tools.experts.line import ExpertsLine, entries_in_force
from tools.query.formats import write_csv
from tools.query.reading import Row, StoredImages, find_stored_images, read_stored_images
from tools.query.rows import RowFilters
from tools.terminal.console import CommandError

#: Memory of the process beside experts: Python, torch and the pictures of a batch; measured 520 MB.
_PROCESS_BYTES = 550_000_000
#: Images in memory at once, whose batches they share; the work of one process on a cluster.
_GROUP = 2000
_COLUMNS = (
    *("inspection_id", "board_type", "serial", "designator", "component"),
    *("verdict", "defect", "would_be", "would_be_defect", "reviewer", "final_verdict", "effect"),
    *("image_path", "sample", "differs"),
)


class RejudgeError(CommandError):
    """Nothing was judged; the text says why."""

    status = 2


@dataclass(frozen=True, slots=True)
class RejudgeRequest:
    """Options of the command. `experts` are NAME=VERSION or NAME=FOLDER; `sample` of the images, or all."""

    rules: Path | None = None
    experts: tuple[str, ...] = ()
    filters: RowFilters = field(default_factory=RowFilters)
    sample: int | None = None


def rejudge_line(
    line: ExpertsLine,
    request: RejudgeRequest,
    *,
    threads: int = 1,
    on_progress: Callable[[int], None] = lambda _total: None,
    announce: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Judge the chosen images again; return a summary, and a row for each change. Raises RejudgeError."""
    entries, replaced = _entries(line, request)
    catalog, problems = line.catalog(entries, elsewhere=True)
    broken = [problem for problem in problems if any(f": {name}:" in problem for name in replaced)]
    if broken:
        raise RejudgeError("\n".join(broken))
    routes = _routes(line, request, catalog)
    # Without other rules only images that one of these experts answered can change.
    answered_by = {"expert": replaced} if replaced and request.rules is None else {}
    filters = replace(request.filters, equal={**request.filters.equal, **answered_by})
    stored: StoredImages | None = line.in_database(lambda connection: find_stored_images(connection, filters))
    if stored is None:
        raise RejudgeError(f"there is no database at {line.config.database} yet: nothing was judged")
    ids = stored.ids
    if request.sample is not None and request.sample < len(ids):
        ids = sorted(random.Random(0).sample(ids, request.sample), reverse=True)

    import cv2
    import torch

    from tools.query.rejudge_run import memory_bytes, rejudge

    torch.set_num_threads(threads)
    cv2.setNumThreads(threads)
    announce(
        f"{count_text(len(ids), 'image')}; takes up to {size_text(memory_bytes(catalog) + _PROCESS_BYTES)} of memory"
    )
    total = _Total(routes.version, catalog, line.in_database(answered_settings) or {})
    groups, folder = _groups(line, ids), line.config.images
    try:
        for images in rejudge(groups, routes, catalog, folder, lambda: on_progress(len(ids))):
            total.add(images)
    except ExpertError as error:
        raise RejudgeError(str(error)) from error
    sample = _sample(len(ids), len(stored.ids), total)
    gone = len(ids) - total.rejudged - len(total.unread)
    summary = {
        **total.summary(),
        "pruned": stored.pruned + gone,
        "unjudged": stored.unjudged,
        "sample": sample,
        "rules": routes.version,
        "experts": {name: version_of(entries[name]) for name in replaced},
        "notes": _notes(line, replace(stored, pruned=stored.pruned + gone), total, sample),
    }
    chosen = None if sample is None else f"{sample['images']} of {sample['of']}"
    return summary, [{**change, "sample": chosen} for change in total.changes]


def _groups(line: ExpertsLine, ids: Sequence[int]) -> Iterator[list[Row]]:
    for start in range(0, len(ids), _GROUP):
        group = ids[start : start + _GROUP]
        yield line.in_database(lambda connection, group=group: read_stored_images(connection, group)) or []


def _sample(images: int, of: int, total: "_Total") -> dict[str, Any] | None:
    """Return a sample's size, and the share of all images that would change: Clopper-Pearson 95 % interval."""
    if images == of:
        return None
    from scipy.stats import binomtest

    found = binomtest(len(total.changes), max(1, total.rejudged)).proportion_ci(0.95)
    share = {"changed_low": round(float(found.low), 6), "changed_high": round(float(found.high), 6)}
    return {"images": images, "of": of, **share}


def _entries(line: ExpertsLine, request: RejudgeRequest) -> tuple[dict[str, CatalogEntry], tuple[str, ...]]:
    """Return the entries in force with the requested ones, whose files may lie anywhere, and their names."""
    experts = line.experts()
    entries = entries_in_force(experts)
    replaced: list[str] = []
    for option in request.experts:
        name, _, version = option.partition("=")
        if not version:
            raise RejudgeError(f"--expert {option}: expected NAME=VERSION or NAME=FOLDER")
        if name not in experts:
            raise RejudgeError(f"--expert {option}: there is no expert {name}; there are {', '.join(experts)}")
        expert = experts[name]
        try:
            if ("/" in version or Path(version).exists()) and version not in expert.versions:
                entries[name] = find_candidate(name, Path(version))
            else:
                entries[name] = expert.versions[expert.named(version)].entry
        except EditionError as error:
            raise RejudgeError(f"--expert {option}: {error}") from None
        replaced.append(name)
    return entries, tuple(replaced)


def _routes(line: ExpertsLine, request: RejudgeRequest, catalog: Catalog) -> Routes:
    if request.rules is not None and not request.rules.is_file():
        raise RejudgeError(f"no file {request.rules}: name a rules file")
    try:
        return line.routes(catalog, request.rules)
    except RulesError as error:
        raise RejudgeError("\n".join(map(str, error.problems))) from None


def _notes(line: ExpertsLine, stored: StoredImages, total: "_Total", sample: dict[str, Any] | None) -> list[str]:
    notes: list[str] = []
    if sample is not None:
        low, high = sample["changed_low"], sample["changed_high"]
        notes.append(
            f"a random sample, {sample['images']} of {sample['of']} images: of all {low:.1%} to {high:.1%} would change"
            f" (95 % interval), that is {low * sample['of']:.0f} to {high * sample['of']:.0f}"
        )
    if stored.pruned:
        notes.append(f"{stored.pruned} more have no picture any more, or never had one: their new verdict is not known")
    if "pass" not in line.config.retention.keep:
        notes.append("pictures of passes are not kept (retention.keep), so new verdicts of passes are not shown")
    if stored.unjudged:
        notes.append(
            f"{stored.unjudged} were unknown (late, or not to be judged then) and have nothing to compare with"
        )
    if total.unread:
        notes.append(
            f"{count_text(len(total.unread), 'picture')} could not be judged again, the first: {total.unread[0]}"
        )
    return notes


class _Total:
    """Counts over all groups, and a row for each change. `rules` and `catalog` judge now; `settings` are from then."""

    def __init__(self, rules: str, catalog: Catalog, settings: Mapping[tuple[str, str | None], str]) -> None:
        self._rules, self._catalog, self._settings = rules, catalog, settings
        self._differences: Counter[str] = Counter()
        self.rejudged = self._reviewed = 0
        self.unread: list[str] = []
        self.changes: list[dict[str, Any]] = []

    def add(self, images: Sequence[Row]) -> None:
        judged = [image for image in images if image["unread"] is None]
        self.rejudged += len(judged)
        self._reviewed += sum(image["final_verdict"] is not None for image in judged)
        self.unread += [image["unread"] for image in images if image["unread"] is not None]
        for image in judged:
            differs = self._differing(image)
            self._differences.update(differs)
            if (image["would_be"], image["would_be_defect"]) != (image["verdict"], image["defect"]):
                effect = effect_of(image["verdict"], image["final_verdict"], image["would_be"])
                change = {**image, "effect": effect, "differs": "; ".join(differs)}
                self.changes.append({name: change.get(name) for name in _COLUMNS})

    def _differing(self, image: Row) -> list[str]:
        """Return how today differs from when `image` was judged: rules, versions and settings, then → now."""
        then = image["rules_version"]
        differs = [f"rules {then} → {self._rules}"] if then != self._rules else []
        for expert, version, digest in dict.fromkeys(image["answers"]):
            spec, settings = self._catalog.get(ExpertId(expert)), self._settings.get((expert, digest))
            if spec is None:
                differs.append(f"{expert} is not in the catalog")
                continue
            if version != spec.version:
                differs.append(f"{expert} version {version} → {spec.version}")
            if settings is not None and digest != spec.settings_digest:
                differs += [f"{expert} {change}" for change in setting_changes(settings, spec.settings)]
        return differs

    def summary(self) -> dict[str, Any]:
        """Count changes by verdict before and after, differences from then, effects against reviewers, and boards."""
        verdicts = Counter((change["verdict"], change["would_be"]) for change in self.changes)
        effects = Counter(change["effect"] for change in self.changes)
        return {
            "rejudged": self.rejudged,
            "unchanged": self.rejudged - len(self.changes),
            "changed": len(self.changes),
            "boards": len({(change["board_type"], change["serial"]) for change in self.changes}),
            "unread": len(self.unread),
            "differences": [{"what": what, "images": count} for what, count in sorted(self._differences.items())],
            "changes": [{"from": old, "to": new, "images": count} for (old, new), count in sorted(verdicts.items())],
            "reviewed": self._reviewed,
            "effects": {name: effects[name] for name in EFFECTS},
        }


def write_changes(path: Path, changes: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        write_csv(file, _COLUMNS, map(itemgetter(*_COLUMNS), changes))
