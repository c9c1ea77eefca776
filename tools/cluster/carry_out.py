"""The worker's side of long work: Ray calls `carry_out` by its name. Arguments and answers are texts and bytes."""

import json
import os
import shutil
import tempfile
from base64 import b64encode
from pathlib import Path
from typing import Any

from daemon.cluster.expert_cache import ExpertCache
from daemon.cluster.messages import code_version, spec_of
from daemon.cluster.worker import CACHE, CACHE_SIZE, NAME

_NICENESS = 10


def work_version() -> str:
    """Return the version of the code that does long work: command and workers need the same."""
    return code_version("tools/cluster", "tools/experts", "tools/query", "tools/training")


def carry_out(version: str, kind: str, values: str, contents: dict[str, bytes], weights: dict[str, Any]) -> str:
    """Do a task here; return JSON: its answer, an `error`, or `refused` if this code has another version.

    `contents` are files by their paths on the command's PC. `weights` are paths with a sha256 and a reference to the
    bytes, which this PC's cache keeps. All are laid out below a temporary folder; the answer has the original paths.
    """
    import cv2
    import ray
    import torch

    from experts.errors import ExpertError

    if version != work_version():
        refused = f"{os.environ.get(NAME)} has CoServe {work_version()}, this PC {version}: install the same on both"
        return json.dumps({"refused": f"{refused}, and start its worker again"})
    given = json.loads(values)
    if threads := given.pop("threads", None):  # as many as the command's
        torch.set_num_threads(threads)
        cv2.setNumThreads(threads)
    os.nice(max(0, _NICENESS - os.nice(0)))
    cache = ExpertCache(Path(os.environ[CACHE]).resolve(), int(os.environ[CACHE_SIZE]))
    for stale in cache.folder.glob("work-*"):  # left by a process that was killed
        if not Path("/proc", stale.name.split("-")[1]).exists():
            shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"work-{os.getpid()}-", dir=cache.folder) as root:
        for name in (*contents, *weights):
            Path(root + name).parent.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            Path(root + name).write_bytes(content)
        for name, (digest, stored) in weights.items():
            if cache.drop_altered([digest]):
                content: Any = ray.get(stored)
                cache.take(digest, len(content), 0, content)
            Path(root + name).hardlink_to(cache.folder / digest)
        kinds = {"train": _train, "rejudge": _rejudge, "measure": _measure}
        try:
            answer = kinds[kind](root, **given)
        except ExpertError as error:
            answer = {"error": str(error)}
        return json.dumps(answer).replace(root, "")


def _train(root: str, folder: str, out: str, plan: dict[str, Any], catalog: dict[str, Any]) -> dict[str, Any]:
    """Train the expert of a folder; return its catalog entry and all files, in base64."""
    from experts.catalog import write_catalog
    from tools.training.backbone import read_entries
    from tools.training.classifier import TrainingPlan
    from tools.training.everything import train_each
    from tools.training.fit import Schedule

    pictures, experts = Path(root + folder), Path(root + out)
    write_catalog(experts / "catalog.yaml", catalog)
    plan |= {"schedule": Schedule(**plan["schedule"]), "kinds": tuple(plan["kinds"])}
    (report,) = train_each([pictures], experts, TrainingPlan(**plan), lambda _: None)
    if report.error is not None:
        return {"error": report.error}
    entry = read_entries(experts / "catalog.yaml")[pictures.name]
    paths = [experts / entry.file, *sorted((experts / "reports").iterdir(), key=lambda file: file.suffix == ".json")]
    files = {str(file.relative_to(experts)): b64encode(file.read_bytes()).decode() for file in paths}
    return {"entry": entry.model_dump(mode="json", exclude_defaults=True), "files": files}


def _rejudge(root: str, rules: str, specs: list[Any], images: list[Any], folder: str) -> dict[str, Any]:
    """Judge stored images; return of each its verdict, its defect and the reason if it could not be judged."""
    from daemon.line.line import compile_kept_rules
    from experts.catalog import Catalog
    from tools.query.reading import StoredImage
    from tools.query.rejudge_run import rejudge

    catalog = Catalog({spec.expert: spec for spec in (spec_of(plain, Path(root)) for plain in specs)}, {})
    routes = compile_kept_rules(rules, catalog)
    assert routes is not None, "the command has compiled them"
    (judged,) = rejudge([[StoredImage(**image) for image in images]], routes, catalog, Path(root + folder))
    return {"verdicts": [(each.verdict, each.defect, each.unread) for each in judged]}


def _measure(root: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return an expert's label and confidence for each image that was sent."""
    from tools.experts.measure import answers_of, images_in

    expert = spec_of(spec, Path(root))
    answers = answers_of(expert, images_in(Path(root + "/images"), expert))
    return {"answers": [(answer.label, answer.confidence) for answer in answers]}
