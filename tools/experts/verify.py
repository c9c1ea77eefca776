"""Check of weights against their entries, as a daemon checks them: by loading them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experts.catalog import CatalogEntry, CatalogFile, resolve
from experts.errors import ExpertError
from experts.spec import ExpertId, ExpertSpec
from experts.vision.slot import SlotPool
from tools.experts.line import ExpertsLine


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

    Checked are header and layout, order and shapes of all tensors, sha256, finite numbers; with `forward` an answer.
    """
    catalog, problems = resolve(CatalogFile(experts={name: entry}), root)
    if problems:
        return [_with_file(root / entry.file, f"{where[-1]}: {message}", message) for where, message in problems]
    spec = catalog[ExpertId(name)]
    return load_problems(spec, forward=forward)


def load_problems(spec: ExpertSpec, *, forward: bool) -> list[str]:
    """Return the reasons why `spec` cannot be loaded and, with `forward`, run."""
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
