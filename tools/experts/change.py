"""Put in, promote, roll back and prune versions: checked as a daemon checks them, durable, and adopted by the daemon.

A version that the line cannot use is refused: missing labels, too little memory, a damaged file.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from daemon.line.making import Draft, Made, draft_of
from daemon.wire.control import ControlError
from experts.catalog import CatalogEntry, CatalogError, CatalogFile, read_catalog, resolve
from experts.editions.candidates import Shadow, read_candidates, write_candidates
from experts.editions.edition import Edition, EditionError
from experts.editions.history import Expert, experts_of, keep_candidates, past, waiting_weights
from experts.errors import ExpertError
from experts.spec import ExpertId
from experts.vision.preprocess import fit
from experts.vision.slot import SlotPool
from tools.experts.line import NO_DAEMON, ExpertsLine, entries_in_force, put_first_in_force
from tools.experts.look import describe_shadow
from tools.experts.measure import answers_of


def find_candidate(name: str, source: Path) -> CatalogEntry:
    """Return the entry for `name` in a folder that training or import wrote, or that of one weights file there.

    Its paths are absolute. Raises EditionError.
    """
    if not source.exists():
        raise EditionError(f"{source}: there is no such file or folder")
    folder = source if source.is_dir() else source.parent
    try:
        entries = read_catalog(folder / "catalog.yaml")
    except CatalogError as error:
        raise EditionError(str(error)) from None
    if source.is_file():
        entries = {key: each for key, each in entries.items() if (folder / each.file).resolve() == source.resolve()}
    if not entries:
        what = "holds" if source.is_dir() else "is described by"
        raise EditionError(f"{source}: {what} no catalog.yaml such as `coserve train` and `coserve import` write")
    if source.is_dir() and name not in entries and len(entries) > 1:
        raise EditionError(f"{source}: its catalog has no {name}, but {', '.join(entries)}")
    return (entries.get(name) or next(iter(entries.values()))).moved_from(folder)


def put(line: ExpertsLine, name: str, source: Path, note: str | None = None, origin: str | None = None) -> str:
    """Check a version from `origin`, else `source`, and keep it as a candidate. EditionError names every problem."""
    candidate = find_candidate(name, source)
    _must_have_none(entry_problems(name, candidate, source, forward=True) or line.new_problems({name: candidate}))
    known, is_here = line.experts().get(name, Expert(name)), all(map(line.folder.weights.is_whole, candidate.weights))
    version = keep_candidates(line.folder, {name: candidate}, origin or str(source.resolve()), note)[name]
    if is_here and version in (known.version, *known.versions):
        standing = "in force" if version == known.version else "here"
        raise EditionError(f"{name} {version} is {standing} already: these are the same weights and settings")
    line.record_versions()
    return version


def _must_have_none(problems: Sequence[str]) -> None:
    if problems:
        raise EditionError("\n".join(problems))


def switch(
    line: ExpertsLine, name: str, requested: str | None, note: str | None = None, *, discard: bool = False
) -> dict[str, Any]:
    """Put the version `requested` in force, without one the version before. Raises EditionError, ConfigError.

    Of what is returned, `heard` says that a daemon judges by it, `shadow` what it lacked in shadow.
    """
    put_first_in_force(line)
    known = line.expert(name)
    in_shadow = known.shadow and known.shadow.version
    shadow = describe_shadow(line, name) if in_shadow and requested and in_shadow.startswith(requested) else None

    def build(in_force: Edition | None) -> Draft:
        expert = line.expert(name)
        version = expert.named(requested) if requested is not None else expert.before()
        if version == expert.version:
            raise EditionError(f"{name} {version} is in force already")
        entry = expert.versions[version].entry
        _must_have_none(entry_problems(name, entry, line.folder.root))
        why = "promote" if requested is not None else "rollback"
        draft = draft_of(in_force or line.edition(), line.folder, why, note)
        return replace(draft, experts={**draft.experts, name: entry.moved_from(line.folder.root)})

    made = line.make_edition(build, discard=discard)
    switches = [step for step in experts_of(line.folder)[name].steps if step.did == made.edition.why]
    last, heard, routes = switches[-1], made.adopted is not None, line.in_force()[1]
    done = {"expert": name, "version": last.version, "before": last.before, "edition": made.edition.number}
    lacks = None if shadow is None or shadow["holds"] else f"its shadow {shadow['sentence']}"
    warnings = routes.warnings if routes and requested else ()
    return done | {"heard": heard, "note": None if heard else NO_DAEMON, "shadow": lacks, "warnings": [*warnings]}


def roll_back(line: ExpertsLine, number: int, note: str | None = None, *, discard: bool = False) -> Made:
    """Make an edition with all that edition `number` holds. Raises EditionError, ConfigError."""
    folder = line.folder

    def build(before: Edition | None) -> Draft:
        if before is not None and before.number == number and not folder.stale_files(before, line.config.rules):
            raise EditionError(f"edition {number} is in force already, and nothing was edited since")
        edition = folder.read(number)
        gone = [name for name, entry in edition.experts.items() if not folder.has_weights(entry)]
        if gone:
            raise EditionError(
                f"edition {number} cannot come back: the weights of {', '.join(gone)} were deleted"
                " (coserve experts prune); put them in once more, or name another edition"
            )
        for name, entry in edition.experts.items():
            if before is None or before.experts.get(name) != entry:
                _must_have_none(entry_problems(name, folder.relative_entry(entry), folder.root))
        return draft_of(edition, folder, "rollback", note)

    return line.make_edition(build, discard=discard, anew=True)


def list_editions(line: ExpertsLine) -> list[dict[str, Any]]:
    """Return the editions that were in force, the newest last; `has_weights` if it can come back."""
    current = line.folder.current()
    facts = ("number", "created_at", "who", "why", "note")
    return [
        {**edition.model_dump(mode="json", include={*facts}), "is_in_force": edition.number == current}
        | {"has_weights": all(map(line.folder.has_weights, edition.experts.values()))}
        for edition in reversed(past(line.folder, current or 0))
    ]


def mark_shadow(line: ExpertsLine, name: str, requested: str, note: str | None = None, **asked: Any) -> str | None:
    """Let the version `requested` answer in shadow, `asked` the rest of Shadow; "" ends it. Raises EditionError."""
    with line.folder.changing():
        expert = line.expert(name)
        version = expert.named(requested) if requested else None
        if version is None and expert.shadow is None:
            raise EditionError(f"{name} has no version in shadow")
        if version is not None and version == expert.version:
            raise EditionError(f"{name} {version} is in force")
        if version is not None:
            entry = expert.versions[version].entry
            entries = {**entries_in_force(line.experts()), name: entry}
            _must_have_none(entry_problems(name, entry, line.folder.root) or line.problems(entries))
        shadow = Shadow(version=version, **asked) if version is not None else None
        marked = read_candidates(line.folder.catalog).shadowed(name, shadow, note)
        write_candidates(line.folder.catalog, marked)
    try:
        line.ask("versions")
    except ControlError as error:
        raise EditionError(f"it is noted, but the daemon did not read it ({error.reason}): coserve reload") from None
    return version


def prune(line: ExpertsLine, keep: int, note: str | None = None) -> list[dict[str, Any]]:
    """Delete weights that nobody needs, and editions that no stored board names. Raises EditionError.

    Kept are those of the edition in force, the newest `keep` before it, what the daemon judges by, open attempts,
    candidates and shadows.
    """
    folder = line.folder
    if folder.current() is None:
        return []
    with folder.changing() as writer:
        experts, candidates = experts_of(folder), read_candidates(folder.catalog)
        named, kept = _needed_editions(line, keep)
        needed = {sha256 for number in kept for sha256 in folder.read(number).weights}
        needed |= waiting_weights(experts.values())
        sizes = {sha256: size for sha256, size in folder.weights.all().items() if sha256 not in needed}
        pruned: list[dict[str, Any]] = []
        for expert in experts.values():
            for version, stored in expert.versions.items():
                if (size := sizes.get(stored.entry.sha256)) is not None:
                    pruned.append({"expert": expert.name, "version": version, "freed_bytes": size})
                    candidates = candidates.without({expert.name: version})
                    candidates = candidates.with_step("prune", expert.name, version, note)
        if pruned:
            write_candidates(folder.catalog, candidates)
        for sha256 in sizes:
            folder.weights.remove(sha256)
        for number in {*folder.numbers()} - kept - named:
            writer.remove(number)
    line.record_versions()
    return pruned


def _needed_editions(line: ExpertsLine, keep: int) -> tuple[set[int], set[int]]:
    """Return the editions that stored boards name, and those whose weights are needed."""
    folder = line.folder
    newest = {edition.number for edition in past(folder, line.edition().number)[: keep + 1]}
    named, is_open = line.named_editions()
    try:
        served = (line.ask("status") or {}).get("edition")
    except ControlError as error:
        raise EditionError(f"what the daemon judges by is not known ({error.reason}): nothing was pruned") from None
    return named, newest | ({*is_open, served} & {*folder.numbers()})


def verify_versions(line: ExpertsLine, names: Sequence[str], *, forward: bool) -> list[dict[str, Any]]:
    """Return a row for each version of `names`, or of all experts, with its file and its problems."""
    experts = [line.expert(name) for name in names] if names else list(line.experts().values())
    rows: list[dict[str, Any]] = []
    for expert in experts:
        for version, entry in expert.entries.items():
            problems = entry_problems(expert.name, entry, line.folder.root, forward=forward)
            row = {"expert": expert.name, "version": version, "in_force": version == expert.version}
            rows.append(row | {"file": str(line.folder.root / entry.file), "problems": problems})
    return rows


def entry_problems(name: str, entry: CatalogEntry, root: Path, *, forward: bool = False) -> list[str]:
    """Return all problems of the weights of `entry`, whose file is relative to `root`; each names the file.

    Checks header and layout, order and shapes of all tensors, sha256, finite numbers; with `forward` an answer.
    """
    catalog, problems = resolve(CatalogFile(experts={name: entry}), root)
    if problems:
        return [_with_file(root / entry.file, f"{where[-1]}: {message}", message) for where, message in problems]
    spec = catalog[ExpertId(name)]
    pool = SlotPool("cpu", spec.resident.weights_bytes)
    try:
        pool.load(spec.resident)
        if spec.backbone is not None:
            pool.slot(spec.backbone.expert).layout.heads.get(spec, spec.backbone)
        if forward and spec.classes:
            noise = np.random.default_rng(7).integers(0, 255, (2, 96, 128, 3), np.uint8)
            answers_of(spec, [fit(image, spec.task, spec.input_size) for image in noise])
    except ExpertError as error:
        return [_with_file(spec.file, error.message, error.message)]
    except (RuntimeError, MemoryError) as error:
        return [f"{spec.file}: cannot be run: {str(error).splitlines()[0]}"]
    return []


def _with_file(file: Path, text: str, message: str) -> str:
    return message if str(file) in message else f"{file}: {text}"
