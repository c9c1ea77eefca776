"""Put in, promote, roll back and prune versions: checked as a daemon checks them, durable, and read by the daemon.

A version that the line cannot use is refused: missing labels, too little memory, a damaged file. If the running daemon
refuses the new catalog all the same, the old one is restored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import ValidationError

from daemon.wire.control import ControlError
from experts.catalog import CatalogEntry, CatalogFile, resolve
from experts.catalog_edit import read
from experts.errors import ExpertError, WeightsError
from experts.spec import ExpertId, ExpertSpec
from experts.versions import Change, Expert, Shadow, VersionsError, current_user, weights_of
from experts.vision.slot import SlotPool
from experts.weights import file_sha256, read_header
from tools.experts.line import ExpertsLine, entries_in_force
from tools.experts.look import describe_shadow

_RELOAD_S = 60.0
_NO_DAEMON = "no daemon runs: it is in force from the next start on"


@dataclass(frozen=True, slots=True)
class VersionSwitch:
    """A switch of versions. `heard`: the daemon serves `version` now; else `note` says when it will, or what failed.

    `shadow` says what the version still lacked in shadow.
    """

    expert: str
    version: str
    before: str | None
    heard: bool
    note: str | None
    lost_comments: bool
    shadow: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.heard or self.note == _NO_DAEMON


def find_candidate(name: str, source: Path) -> CatalogEntry:
    """Return the entry for `name` in a folder that training or import wrote, or that of one weights file there.

    A weights file that no catalog names gets one from its header (`is_undescribed`). Its paths are absolute. Raises
    VersionsError.
    """
    if not source.exists():
        raise VersionsError(f"{source}: there is no such file or folder")
    folder = source if source.is_dir() else source.parent
    entries = _entries(folder / "catalog.yaml")
    if source.is_file():
        entries = {key: each for key, each in entries.items() if (folder / each.file).resolve() == source.resolve()}
    if not entries and source.is_file():
        return _entry_of(source).moved_from(folder)
    if not entries:
        raise VersionsError(f"{source}: holds no catalog.yaml such as `coserve train` and `coserve import` write")
    if source.is_dir() and name not in entries and len(entries) > 1:
        raise VersionsError(f"{source}: its catalog has no {name}, but {', '.join(entries)}")
    return (entries.get(name) or next(iter(entries.values()))).moved_from(folder)


def is_undescribed(source: Path) -> bool:
    """Return True for a weights file that no catalog beside it names: its temperature is taken as 1."""
    entries = _entries(source.parent / "catalog.yaml") if source.is_file() else {}
    return source.is_file() and not any(
        (source.parent / each.file).resolve() == source.resolve() for each in entries.values()
    )


def put(line: ExpertsLine, name: str, source: Path, note: str | None = None) -> str:
    """Check a version and keep it as a candidate; return the version. Raises VersionsError with every problem."""
    candidate = find_candidate(name, source)
    _must_have_none(entry_problems(name, candidate, source, forward=True) or line.new_problems({name: candidate}))
    with line.versions.changing() as change:
        version = change.put(name, candidate, str(source.resolve()), note)
    line.record_versions()
    return version


def _must_have_none(problems: Sequence[str]) -> None:
    if problems:
        raise VersionsError("\n".join(problems))


def switch(line: ExpertsLine, name: str, requested: str | None, note: str | None = None) -> VersionSwitch:
    """Put the version `requested` in force, without one the version before. Raises VersionsError."""
    action: Literal["promote", "rollback"] = "promote" if requested is not None else "rollback"
    with line.versions.changing() as change:
        expert = change.expert(name)
        if requested is not None and requested == expert.version:
            raise VersionsError(f"{name} {requested} is in force already")
        version = expert.named(requested) if requested is not None else change.before(name)
        _must_serve(line, change, expert, version)
        catalog, before, old = line.versions.catalog, expert.in_force, expert.version
        text = catalog.read_text(encoding="utf-8") if catalog.exists() else ""
        report = describe_shadow(line, name) if expert.shadow and expert.shadow.version == version else None
        change.promote({name: version}, action, note)
        heard, problem = _reload(line, change, name, text, before, note)
    lacks = None if report is None or report["holds"] else f"its shadow {report['sentence']}"
    return VersionSwitch(name, version, old, heard, problem, change.lost_comments, lacks)


def mark_shadow(line: ExpertsLine, name: str, requested: str, note: str | None = None, **asked: Any) -> str | None:
    """Let the version `requested` answer in shadow, `asked` the rest of Shadow; "" ends it. Raises VersionsError."""
    with line.versions.changing() as change:
        expert = change.expert(name)
        version = expert.named(requested) if requested else None
        if version is not None:
            _must_serve(line, change, expert, version)
        change.shadow(name, Shadow(version=version, **asked) if version else None, note)
    try:
        line.ask("versions")
    except ControlError as error:
        raise VersionsError(f"it is noted, but the daemon did not read it ({error.reason}): coserve reload") from None
    return version


def _must_serve(line: ExpertsLine, change: Change, expert: Expert, version: str) -> None:
    candidate = expert.versions.get(version)
    if candidate is None:
        raise VersionsError(f"{expert.name} {version} is not kept any more: put it in once more")
    _must_have_none(
        entry_problems(expert.name, candidate.entry, line.versions.folder)
        or line.problems({**entries_in_force(change.experts), expert.name: candidate.entry})
    )


def _reload(
    line: ExpertsLine, change: Change, name: str, text: str, before: CatalogEntry | None, note: str | None
) -> tuple[bool, str | None]:
    """Have the daemon read the catalog; if it refuses, restore the old one and raise VersionsError."""
    try:
        answer = line.ask("reload", timeout_s=_RELOAD_S, who=current_user(), note=note)
    except ControlError as error:
        if error.code != "bad_rules":
            return False, f"it is in the catalog, but the daemon did not read it again ({error.reason}): coserve reload"
        change.take_back(text, {name: before})
        raise VersionsError(f"the daemon refused the catalog, so the old one is restored: {error.reason}") from None
    return (True, None) if answer is not None else (False, _NO_DAEMON)


def prune(line: ExpertsLine, names: Sequence[str], keep: int, note: str | None = None) -> list[dict[str, Any]]:
    """Delete weights of versions no longer needed, of `names` or of all experts. Raises VersionsError.

    Kept: versions in force, those that a daemon serves, the newest `keep` before them, and candidates.
    """
    pruned: list[dict[str, Any]] = []
    with line.versions.changing() as change:
        for name in names or list(change.experts):
            pruned += [
                {"expert": name, "version": version, "freed_bytes": change.prune(name, version, note)}
                for version in _prunable(line, change.expert(name), keep)
            ]
    line.record_versions()
    return pruned


def _prunable(line: ExpertsLine, expert: Expert, keep: int) -> list[str]:
    try:
        answer = line.ask("experts") or {"experts": []}
    except ControlError as error:
        raise VersionsError(
            f"the versions that the daemon serves are not known ({error.reason}): nothing was pruned"
        ) from None
    served = {row["version"] for row in answer["experts"] if row["expert"] == expert.name}
    was_in_force = {step.version for step in expert.steps if step.did in ("found", "promote", "rollback")}
    needed = {expert.version, *expert.lineage[-keep - 1 :], expert.shadow.version if expert.shadow else None}
    unused = [version for version in expert.versions if weights_of(version) not in served and version not in needed]
    return [version for version in unused if version in was_in_force]


def _entries(catalog: Path) -> dict[str, CatalogEntry]:
    if not catalog.is_file():
        return {}
    try:
        return CatalogFile.model_validate(read(catalog.read_text(encoding="utf-8"), str(catalog))).experts
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError, OSError) as error:
        raise VersionsError(f"{catalog}: is not a catalog of experts: {error}") from None


def _entry_of(weights: Path) -> CatalogEntry:
    try:
        header = dict(read_header(weights).metadata)
        fields = {key: header.get(key) for key in ("architecture", "input_size", "normalisation")}
        classes = read(header.get("classes", "[]"))
        return CatalogEntry.model_validate(
            {**fields, "file": weights.name, "classes": classes, "sha256": file_sha256(weights)}, strict=False
        )
    except (WeightsError, OSError) as error:
        raise VersionsError(str(error)) from None
    except ValidationError as error:
        count = error.error_count()
        raise VersionsError(f"{weights}: its header lacks {count} fields of an entry: name its folder") from None


def verify_versions(line: ExpertsLine, names: Sequence[str], *, forward: bool) -> list[dict[str, Any]]:
    """Return a row for each version of `names`, or of all experts, with its file and its problems."""
    experts = [line.expert(name) for name in names] if names else list(line.experts().values())
    rows: list[dict[str, Any]] = []
    for expert in experts:
        for version, entry in expert.entries.items():
            problems = entry_problems(expert.name, entry, line.versions.folder, forward=forward)
            row = {"expert": expert.name, "version": version, "in_force": version == expert.version}
            rows.append(row | {"file": str(line.versions.folder / entry.file), "problems": problems})
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
        if forward:
            _run(pool, spec)
    except ExpertError as error:
        return [_with_file(spec.file, error.message, error.message)]
    except (RuntimeError, MemoryError) as error:
        return [f"{spec.file}: cannot be run: {str(error).splitlines()[0]}"]
    return []


def _run(pool: SlotPool, spec: ExpertSpec) -> None:
    from experts.vision.infer import infer
    from experts.vision.preprocess import fit

    noise = np.random.default_rng(7).integers(0, 255, (2, 96, 128, 3), np.uint8)
    if spec.classes:
        images = [fit(image, spec.task, spec.input_size) for image in noise]
        infer(pool.slot(spec.resident.expert), images, spec)


def _with_file(file: Path, text: str, message: str) -> str:
    return message if str(file) in message else f"{file}: {text}"
