"""Trains an expert for each folder of a line's pictures, and goes on where an earlier run ended."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experts.catalog import read_catalog
from experts.durable import replace_durably
from experts.weights import file_sha256
from tools.experts.measure import label_folders
from tools.pictures import find_pictures
from tools.terminal.console import CommandError
from tools.training import TrainingError
from tools.training.backbone import load_backbone
from tools.training.classifier import TrainingPlan, train_classifier
from tools.training.expert_file import make_in
from tools.training.labelled import UNSORTED
from tools.training.report import draw_report, figures


@dataclass(frozen=True, slots=True)
class TypeReport:
    """One folder's end: the figures of its expert (report.figures), kept from an earlier run or new, or its error."""

    expert: str
    figures: dict[str, Any] | None = None
    is_kept: bool = False
    error: str | None = None


def type_folders(folder: Path) -> list[Path]:
    """Return the folders of component types in `folder`, without the undecided pictures that `dataset export` puts
    there. Raises TrainingError if there is none.
    """
    folders = [path for name, path in label_folders(folder, 0).items() if name != UNSORTED]
    if not folders:
        raise TrainingError(f"{folder}: holds no folder of a component type, such as {folder}/R0402/ok/1.png")
    return folders


def train_each(
    folders: list[Path], out: Path, plan: TrainingPlan, on_share: Callable[[float], None]
) -> list[TypeReport]:
    """Train an expert for each folder, named as the folder is. One that cannot be trained costs no other one.

    An expert is kept if its pictures, its backbone and the plan are those of the earlier run that made it.
    """
    reports: list[TypeReport] = []
    for done, folder in enumerate(folders, 1):
        try:
            report = _train_one(folder, out, plan)
        except CommandError as error:
            report = TypeReport(folder.name, error=str(error))
        reports.append(report)
        on_share(done / len(folders))
    return reports


def _train_one(folder: Path, out: Path, plan: TrainingPlan) -> TypeReport:
    key, earlier = _key_of(folder, out, plan), _earlier(out / "reports" / f"{folder.name}.json")
    if earlier.get("key") == key and _is_whole(out, folder.name):
        return TypeReport(folder.name, earlier["figures"], is_kept=True)
    train = partial(train_classifier, folder, expert=folder.name, plan=plan)
    report, _ = make_in(out, folder.name, folder, train)
    draw_report(report, out / "reports")
    taken = next(row for row in figures(report) if row["is_taken"])
    replace_durably(out / "reports" / f"{folder.name}.json", json.dumps({"key": key, "figures": taken}) + "\n")
    return TypeReport(folder.name, taken)


def _key_of(folder: Path, out: Path, plan: TrainingPlan) -> str:
    """Return a digest of all that an expert depends on. Raises TrainingError."""
    known = load_backbone(out / "catalog.yaml", plan.backbone)
    digest = hashlib.sha256(repr((replace(plan, backbone=None), known and known.entry.sha256)).encode())
    for file in find_pictures(folder, depth=2).files:
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _is_whole(out: Path, expert: str) -> bool:
    """Return True if the catalog has the expert, and its file is what the entry says."""
    entry = read_catalog(out / "catalog.yaml").get(expert)
    file = out / entry.file if entry is not None else out
    return entry is not None and file.is_file() and file_sha256(file) == entry.sha256


def _earlier(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
