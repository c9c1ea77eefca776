"""The experts of a package: what is known of each version, its catalog entry, and its weights where they are wanted."""

import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from experts.catalog import CatalogEntry, write_catalog
from experts.versions import Versions, version_of
from tools.query.explain.experts_now import ExpertsNow
from tools.query.package.chosen import Taken

CATALOG = "catalog.yaml"


@dataclass(slots=True)
class Experts:
    """For each version that answered: its checksum, where it stands today, and the file of its weights."""

    listed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    warnings: list[str] = field(default_factory=list[str])


def take_experts(catalog: Path, taken: Taken, folder: Path, *, with_weights: bool) -> Experts:
    """Write `experts/catalog.yaml` with the entries of the versions that answered, and their weights."""
    folder.mkdir()
    now, found = ExpertsNow.of(catalog), Experts()
    entries: dict[str, Any] = {}
    if now.problem:
        found.warnings.append(f"the catalog cannot be read, so there are no entries of experts: {now.problem}")
    for expert, expert_version in sorted(taken.experts):
        said: dict[str, Any] = {
            "expert": expert,
            "expert_version": expert_version,
            "sha256": taken.versions.get((expert, expert_version)),
            "today": now.standing(expert, expert_version),
            "weights": None,
        }
        found.listed.append(said)
        entry, weights = _entry(catalog, now, expert, expert_version)
        if entry is None or weights is None:
            if not now.problem:
                found.warnings.append(
                    f"expert {expert} {expert_version}: its catalog entry and weights are kept no longer"
                )
            continue
        name = f"{quote(expert, safe='').replace('%', '_')}-{expert_version}.safetensors"
        if with_weights:
            said["weights"] = _copy(weights, folder / name, entry.sha256, found)
        entries[f"{expert} {expert_version}"] = entry.model_dump(mode="json", exclude_unset=True) | {"file": name}
    if entries:
        write_catalog(folder / CATALOG, entries)
    return found


def _entry(catalog: Path, now: ExpertsNow, expert: str, expert_version: str) -> tuple[CatalogEntry | None, Path | None]:
    known = now.experts.get(expert)
    if known is None:
        return None, None
    if known.in_force is not None and version_of(known.in_force) == expert_version:
        return known.in_force, catalog.parent / known.in_force.file
    kept = known.kept.get(expert_version)
    return (kept.entry, Versions(catalog).weights_file(expert, expert_version)) if kept else (None, None)


def _copy(source: Path, target: Path, sha256: str, found: Experts) -> str | None:
    """Copy weights, and compare them with the catalog's checksum; the file's name, None where there is none."""
    if not source.is_file():
        found.warnings.append(f"{source}: there is no such weights file")
        return None
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            found.warnings.append(f"{source}: these are not the weights that the catalog names (sha256)")
    return f"experts/{target.name}"
