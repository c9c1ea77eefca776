"""The command's side of each kind of long work: make the tasks that workers get, and take their answers."""

from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import tee
from pathlib import Path
from typing import Any

import torch

from daemon.cluster.messages import plain_spec
from experts.catalog import Catalog
from experts.catalog_edit import add_to_catalog
from experts.durable import replace_durably
from experts.errors import ExpertError
from experts.spec import Answer, ExpertSpec
from routing_rules.routes import Routes, chain
from tools.cluster.work import LongWork, Task
from tools.query.reading import StoredImage
from tools.query.rejudge_run import RejudgedImage
from tools.terminal.console import CommandError
from tools.training.backbone import load_backbone, read_entries
from tools.training.classifier import TrainingPlan
from tools.training.everything import TypeReport, earlier_report, pictures_of


def train_each_on_cluster(
    work: LongWork, folders: list[Path], out: Path, plan: TrainingPlan, on_type: Callable[[TypeReport], None]
) -> list[TypeReport]:
    """Train as `train_each` does, on the workers. Raises TrainingError, CommandError."""
    known = load_backbone(out / "catalog.yaml", plan.backbone)
    entries = {name: entry for name, entry in read_entries(out / "catalog.yaml").items() if not entry.classes}
    weights: dict[str, Path] = {}
    if known is not None:
        file = known.folder / known.entry.file
        weights = {f"{out.absolute()}/{each.name}": each for each in (file, file.with_suffix(".pt"))}
        entries[known.name] = known.entry.model_copy(update={"file": file.name})
    catalog = {name: entry.model_dump(mode="json", exclude_defaults=True) for name, entry in entries.items()}
    values = {"out": str(out.absolute()), "catalog": catalog}
    values["plan"] = asdict(replace(plan, backbone=known and known.name))

    def task(folder: Path) -> Task:
        folders = {f"{each}/.folder": b"" for each in (folder, *folder.glob("*/"))}
        pictures = {str(file): file.read_bytes() for file in pictures_of(folder)}
        return Task("train", values | {"folder": str(folder)}, folders | pictures, weights)

    def take(folder: Path, answer: dict[str, Any]) -> TypeReport:
        if error := answer.get("error"):
            return TypeReport(folder.name, error=error)
        (out / "reports").mkdir(parents=True, exist_ok=True)
        for name, content in answer["files"].items():
            replace_durably(out / name, b64decode(content))
        if known is not None and "backbone" in answer["entry"]:
            answer["entry"]["backbone"]["file"] = known.entry.file
        add_to_catalog(out / "catalog.yaml", folder.name, answer["entry"])
        report = earlier_report(folder, out, plan)
        return replace(report, is_kept=False) if report else TypeReport(folder.name, error="its pictures have changed")

    reports = {folder: earlier_report(folder, out, plan) for folder in folders}
    new = [folder for folder, report in reports.items() if report is None]
    for report in filter(None, reports.values()):
        on_type(report)
    for folder, answer in zip(new, work.answers(task(folder.absolute()) for folder in new), strict=True):
        reports[folder] = report = take(folder, answer)
        on_type(report)
    return [report for report in reports.values() if report is not None]


def rejudge_on_cluster(
    work: LongWork,
    threads: int,
    groups: Iterable[Sequence[StoredImage]],
    routes: Routes,
    catalog: Catalog,
    folder: Path,
    on_progress: Callable[[], None],
) -> Iterator[list[RejudgedImage]]:
    """Yield what `rejudge` yields, from the workers. Raises CommandError."""
    folder = folder.absolute()
    values = {"rules": routes.text, "specs": [*map(plain_spec, catalog.values())], "threads": threads}

    def task(images: Sequence[StoredImage]) -> Task:
        files = [folder.parent / image.image_path for image in images]
        inside = [file for file in files if file.is_file() and file.resolve().is_relative_to(folder.resolve())]
        firsts = {routes.first_step(image.board_type, image.component) for image in images}
        names = {step.expert for first in firsts if first is not None for step in chain(first)}
        rows = [asdict(image) | {"answers": ()} for image in images]
        contents = {str(file): file.read_bytes() for file in inside}
        weights = _weights(spec for name, spec in catalog.items() if name in names)
        return Task("rejudge", values | {"folder": str(folder), "images": rows}, contents, weights)

    sent, ours = tee(groups)
    for answer, images in zip(work.answers(map(task, sent)), ours, strict=True):
        if error := answer.get("error"):
            raise CommandError(error)
        for _ in images:
            on_progress()
        yield [RejudgedImage(image, *row) for image, row in zip(images, answer["verdicts"], strict=True)]


def answer_on_cluster(work: LongWork, spec: ExpertSpec, groups: Iterable[Sequence[Path]]) -> Iterator[list[Answer]]:
    """Yield an expert's answers to the images of each group of files, from the workers. Raises ExpertError."""

    def task(files: Sequence[Path]) -> Task:
        contents = {f"/images/{number:06}": file.read_bytes() for number, file in enumerate(files)}
        values = {"spec": plain_spec(spec), "threads": torch.get_num_threads()}
        return Task("measure", values, contents, _weights([spec]))

    for answer in work.answers(map(task, groups)):
        if error := answer.get("error"):
            raise ExpertError(spec.expert, error)
        yield [Answer(label, confidence) for label, confidence in answer["answers"]]


def _weights(specs: Iterable[ExpertSpec]) -> dict[str, Path]:
    """Return the files of experts that exist, by the path that workers read them from."""
    files = {f"/{each.sha256}": each.file for spec in specs for each in (spec, spec.resident)}
    return {name: file for name, file in files.items() if file.is_file()}
