"""`coserve rejudge`: verdicts of stored images under other rules or experts, beside the stored ones and reviews'."""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import torch

from daemon.storage.database.reviews import EFFECTS, answered_settings, effect_of
from daemon.storage.image_archive import as_sent
from daemon.units import count_text
from experts.catalog import Catalog, CatalogEntry
from experts.editions.edition import EditionError
from experts.editions.history import version_of
from experts.errors import ExpertError, ImageError
from experts.spec import Answer, ExpertId, ExpertSpec, setting_changes
from experts.vision.infer import infer
from experts.vision.preprocess import Prepared, prepare
from experts.vision.slot import Slot, loaded_slot
from routing_rules.compile import RulesError
from routing_rules.routes import Judgement, Routes, Step, guarded, judge
from tools.experts.change import find_candidate
from tools.experts.line import ExpertsLine, entries_in_force
from tools.query.reading import Row, StoredImages, find_stored_images, read_stored_images
from tools.query.rows import RowFilters
from tools.terminal.console import CommandError

#: Images of a batch.
_BATCH = 8
#: Images in memory at once, whose batches they share; the work of one process on a cluster.
_GROUP = 2000
COLUMNS = (
    *("inspection_id", "board_type", "serial", "designator", "component"),
    *("verdict", "defect", "would_be", "would_be_defect", "reviewer", "final_verdict", "effect"),
    *("image_path", "sample", "differs"),
)


def rejudge_line(
    line: ExpertsLine,
    filters: RowFilters,
    experts: Sequence[str],
    *,
    rules: Path | None = None,
    sample: int | None = None,
    threads: int = 1,
    on_progress: Callable[[int], None] = lambda _total: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Judge the chosen images again; return a summary, and a row for each change. Raises CommandError.

    `experts` are NAME=VERSION or NAME=FOLDER; `sample` of the images are judged, or all.
    """
    entries, replaced = _entries(line, experts)
    catalog, problems = line.catalog(entries, elsewhere=True)
    broken = [problem for problem in problems if any(f": {name}:" in problem for name in replaced)]
    if broken:
        raise CommandError("\n".join(broken), status=2)
    if rules is not None and not rules.is_file():
        raise CommandError(f"no file {rules}: name a rules file", status=2)
    try:
        routes = line.routes(catalog, rules)
    except RulesError as error:
        raise CommandError("\n".join(map(str, error.problems)), status=2) from None
    # Without other rules only images that one of these experts answered can change.
    if replaced and rules is None:
        filters = replace(filters, equal={**filters.equal, "expert": replaced})
    stored: StoredImages | None = line.in_database(lambda connection: find_stored_images(connection, filters))
    if stored is None:
        raise CommandError(f"there is no database at {line.config.database} yet: nothing was judged", status=2)
    ids = stored.ids
    if sample is not None and sample < len(ids):
        ids = sorted(random.Random(0).sample(ids, sample), reverse=True)
    torch.set_num_threads(threads)
    cv2.setNumThreads(threads)
    total = _Total(routes.version, catalog, line.in_database(answered_settings) or {})
    groups, folder = _groups(line, ids), line.config.images
    try:
        for images in rejudge(groups, routes, catalog, folder, lambda: on_progress(len(ids))):
            total.add(images)
    except ExpertError as error:
        raise CommandError(str(error), status=2) from error
    chosen = _sample(len(ids), len(stored.ids), total)
    gone = len(ids) - total.rejudged - len(total.unread)
    summary = {
        **total.summary(),
        "pruned": stored.pruned + gone,
        "unjudged": stored.unjudged,
        "sample": chosen,
        "rules": routes.version,
        "experts": {name: version_of(entries[name]) for name in replaced},
        "notes": _notes(line, replace(stored, pruned=stored.pruned + gone), total, chosen),
    }
    of_all = None if chosen is None else f"{chosen['images']} of {chosen['of']}"
    return summary, [{**change, "sample": of_all} for change in total.changes]


def _groups(line: ExpertsLine, ids: Sequence[int]) -> Iterator[list[Row]]:
    for start in range(0, len(ids), _GROUP):
        group = ids[start : start + _GROUP]
        yield line.in_database(lambda connection, group=group: read_stored_images(connection, group)) or []


def _sample(images: int, of: int, total: "_Total") -> dict[str, Any] | None:
    """Return a sample's size, and the share of all images that would change: Clopper-Pearson 95 % interval."""
    if images == of:
        return None
    from scipy.stats import binomtest

    low, high = binomtest(len(total.changes), max(1, total.rejudged)).proportion_ci(0.95)
    return {"images": images, "of": of, "changed_low": round(float(low), 6), "changed_high": round(float(high), 6)}


def _entries(line: ExpertsLine, options: Sequence[str]) -> tuple[dict[str, CatalogEntry], tuple[str, ...]]:
    """Return the entries in force with the requested ones, whose files may lie anywhere, and their names."""
    experts = line.experts()
    entries = entries_in_force(experts)
    replaced: list[str] = []
    for option in options:
        name, _, version = option.partition("=")
        if not version:
            raise CommandError(f"--expert {option}: expected NAME=VERSION or NAME=FOLDER", status=2)
        if name not in experts:
            raise CommandError(f"--expert {option}: no expert {name}; there are {', '.join(experts)}", status=2)
        expert = experts[name]
        try:
            if ("/" in version or Path(version).exists()) and version not in expert.versions:
                entries[name] = find_candidate(name, Path(version))
            else:
                entries[name] = expert.versions[expert.named(version)].entry
        except EditionError as error:
            raise CommandError(f"--expert {option}: {error}", status=2) from None
        replaced.append(name)
    return entries, tuple(replaced)


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
                self.changes.append({name: change.get(name) for name in COLUMNS})

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


def rejudge(
    groups: Iterable[Sequence[Row]],
    routes: Routes,
    catalog: Catalog,
    folder: Path,
    on_progress: Callable[[], None] = lambda: None,
) -> Iterator[list[Row]]:
    """Yield each group's images, of the line's `folder`, with their new verdict: `would_be`, `would_be_defect`.

    `unread` says why a picture could not be judged, else it is None. ExpertError if an expert cannot be loaded.
    """
    slots: dict[ExpertId, Slot] = {}

    def slot_of(spec: ExpertSpec) -> Slot:
        """Replace the loaded network unless it is the same: heads share their backbone."""
        if spec.expert not in slots:
            slots.clear()
            slots[spec.expert] = loaded_slot(spec)
        return slots[spec.expert]

    for images in groups:
        # None: the rules have no component like this any more.
        firsts = [routes.first_step(image["board_type"], image["component"]) for image in images]
        read = lambda number, spec, images=images: _prepare(folder, images[number], spec)  # noqa: E731
        ends = judge_images(firsts, read, catalog, slot_of, on_end=on_progress)
        yield [{**image, **_new_verdict(end, image["reason"])} for image, end in zip(images, ends, strict=True)]


def _new_verdict(end: Judgement | ImageError | None, guard: str | None) -> dict[str, str | None]:
    if isinstance(end, Judgement):
        would_be, _ = guarded(end.verdict, (guard,) if guard else ())
        return {"would_be": would_be, "would_be_defect": end.defect, "unread": None}
    return {"would_be": "unknown", "would_be_defect": None, "unread": None if end is None else str(end)}


def judge_images(
    firsts: Sequence[Step | None],
    read: Callable[[int, ExpertSpec], Prepared],
    catalog: Catalog,
    slot_of: Callable[[ExpertSpec], Slot],
    *,
    on_answer: Callable[[int, str, Answer], None] = lambda *_: None,
    on_end: Callable[[], None] = lambda: None,
) -> list[Judgement | ImageError | None]:
    """Return each image's judgement by its chain from a first step, None without one, or why it could not be read.

    `read` prepares an image, by its number, for an expert; `slot_of` gives the slot of a network. `on_answer` gets each
    answer, with the image's number and the expert's name.
    """
    ends: list[Judgement | ImageError | None] = [None] * len(firsts)
    waiting: dict[str, list[tuple[int, Step]]] = {}

    def go_on(number: int, step: Step | None) -> None:
        if step is None:
            on_end()
        else:
            waiting.setdefault(step.expert, []).append((number, step))

    for number, step in enumerate(firsts):
        go_on(number, step)
    while waiting:
        expert = max(waiting, key=lambda name: len(waiting[name]))  # chains meet behind the one with the most
        spec, queue = catalog.get(ExpertId(expert)), waiting.pop(expert)
        if spec is None:
            raise ExpertError(ExpertId(expert), "is not in the catalog")
        slot = slot_of(spec.resident)
        for start in range(0, len(queue), _BATCH):
            ready: list[tuple[int, Step, Prepared]] = []
            for number, step in queue[start : start + _BATCH]:
                try:
                    ready.append((number, step, read(number, spec)))
                except ImageError as error:
                    ends[number] = error
                    on_end()
            answers = infer(slot, [prepared for *_, prepared in ready], spec) if ready else []
            for (number, step, prepared), answer in zip(ready, answers, strict=True):
                on_answer(number, expert, answer)
                size, so_far = (prepared.width, prepared.height), ends[number]
                assert not isinstance(so_far, ImageError)
                ends[number] = judgement = judge(step, answer.label, answer.confidence, answer.detections, so_far, size)
                go_on(number, judgement.next)
    return ends


def _prepare(images: Path, image: Row, spec: ExpertSpec) -> Prepared:
    """Preprocess the payload that the camera sent. Raises ImageError."""
    file = images.parent / image["image_path"]
    if not file.resolve().is_relative_to(images.resolve()):
        raise ImageError(f"{image['image_path']} lies outside {images}")
    try:
        payload, shape = as_sent(file.read_bytes(), file.suffix)
    except OSError as error:
        raise ImageError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ImageError(f"{file}: its header is damaged") from error
    if hashlib.sha256(payload).hexdigest() != image["image_sha256"]:
        raise ImageError(f"{file}: is not what the camera sent (its sha256 differs)")
    return prepare(payload, "image" if shape is None else "raw", shape, spec)
