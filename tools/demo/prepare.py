"""Making the demo's line: render, train, calibrate, write its files, judge it on boards that it was not trained on.

What was made is used again as long as the code that makes it is the same (`prepared.json` names it).
"""

import hashlib
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

import tools.camera.render
import tools.training
from experts.catalog import Catalog, CatalogFile, resolve, write_catalog
from tools.cli.console import console
from tools.cli.progress import Bars
from tools.demo import files, judge, samples, teach, thresholds
from tools.demo.judge import Quality
from tools.demo.samples import Sample
from tools.experts.measure import MeasuredAnswers

PANELS, UNITS = 95, 20
_BOARDS_PER_TASK = 5
#: Boards of the final judgement: four types for each seed, none of which training or the demo's camera renders.
JUDGED_SEEDS = tuple(range(500_000, 500_006))
JUDGED_DEFECT_RATE = 0.2
PREPARED = "prepared.json"


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """`minutes` that training took when it was done; `cached` when an earlier run had done it."""

    key: str
    minutes: float
    quality: Quality
    cached: bool = False

    def summary(self) -> str:
        """What a person wants to know before trusting the line."""
        quality = self.quality
        how = "in an earlier run" if self.cached else "just now"
        missed = ", ".join(f"{count} {kind}" for kind, count in quality.missed.items()) or "none"
        return (
            f"18 experts, trained {how} ({self.minutes:.1f} min), judged on {quality.boards} boards not trained on:\n"
            f"  defects caught {quality.caught} of {quality.defects} ({quality.catch_rate:.3f}; missed: {missed})\n"
            f"  false calls {quality.false_calls} of {quality.good} good parts ({quality.false_call_rate:.3f})"
        )


def prepare(folder: Path) -> PrepareReport:
    """Make the line in `folder`, or find it made. Shows its progress; minutes the first time, at once afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    config = files.write_configuration(folder)
    key = code_key()
    known = _known(folder, key)
    if known is not None:
        return known
    began_s = time.monotonic()
    with _bars() as bars:
        rendered = _render(bars)
        catalog = _teach(rendered, folder / "experts", bars)
        task = bars.add_task("calibrating on parts held out", total=1.0)
        held_out = teach.split(rendered)[1]
        review_below = thresholds.review_below(catalog, held_out)
        files.write_rules(folder, thresholds.choose_all(catalog, held_out), review_below)
        bars.update(task, completed=1.0)
        minutes = (time.monotonic() - began_s) / 60
        task = bars.add_task("judging boards not trained on", total=1.0)
        answers = MeasuredAnswers()
        quality = judge.judge_line(
            config, JUDGED_SEEDS, JUDGED_DEFECT_RATE, lambda share: bars.update(task, completed=share), answers.add
        )
        answers.write_confidences(folder / "experts" / "catalog.yaml")
    report = PrepareReport(key, minutes, quality)
    (folder / PREPARED).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


def code_key() -> str:
    """Names everything that the experts depend on: the renderer, the training, the numbers above."""
    digest = hashlib.sha256()
    folders = [Path(next(iter(package.__path__))) for package in (tools.camera.render, tools.training)]
    sources = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    sources += [Path(str(module.__file__)) for module in (files, samples, teach, thresholds)]
    for path in sources:
        digest.update(path.read_bytes())
    digest.update(repr((PANELS, UNITS, JUDGED_SEEDS, JUDGED_DEFECT_RATE)).encode())
    return digest.hexdigest()[:12]


def _known(folder: Path, key: str) -> PrepareReport | None:
    try:
        found: dict[str, Any] = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
        quality = Quality(**found["quality"])
        present = (folder / "rules.yaml").is_file() and (folder / "experts" / "catalog.yaml").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if found["key"] != key or not present:
        return None
    return PrepareReport(key, found["minutes"], quality, cached=True)


def _render(bars: Progress) -> list[Sample]:
    task = bars.add_task("rendering parts", total=1.0)
    chunks = [
        (render, range(start, min(start + _BOARDS_PER_TASK, count)))
        for render, count in ((samples.render_panels, PANELS), (samples.render_units, UNITS))
        for start in range(0, count, _BOARDS_PER_TASK)
    ]
    found: dict[int, list[Sample]] = {}
    with _two_processes() as pool:
        running = {pool.submit(render, numbers): place for place, (render, numbers) in enumerate(chunks)}
        for done in as_completed(running):
            found[running[done]] = done.result()
            bars.update(task, completed=len(found) / len(chunks))
    everything = [sample for number in range(len(chunks)) for sample in found[number]]
    order = np.random.default_rng(0).permutation(len(everything))  # so that both kinds train, and both calibrate
    return [everything[place] for place in order]


def _teach(rendered: list[Sample], out: Path, bars: Progress) -> Catalog:
    """Two trainings at a time, each on its own core; the catalog of what came out."""
    out.mkdir(exist_ok=True)
    # The longest first: whoever is done takes the next.
    longest = sorted(range(len(teach.DETECTORS)), key=lambda number: -teach.DETECTORS[number].effort)
    jobs = [_Job(f"training {teach.DETECTORS[number].expert} ({teach.DETECTOR})", number) for number in longest]
    jobs.insert(1, _Job(f"training 16 classifiers ({teach.CLASSIFIER})", None))
    with multiprocessing.get_context("spawn").Manager() as manager, _two_processes() as pool:
        shares: Queue[tuple[str, float] | None] = manager.Queue()
        listener = threading.Thread(target=_follow, args=(shares, bars), daemon=True)
        listener.start()
        running: list[Future[dict[str, dict[str, Any]]]] = [
            pool.submit(_in_process, job, rendered, out, shares) for job in jobs
        ]
        entries = {expert: entry for done in running for expert, entry in done.result().items()}
        shares.put(None)
        listener.join()
    write_catalog(out / "catalog.yaml", entries)
    catalog, problems = resolve(CatalogFile.model_validate({"experts": entries}), out)
    assert not problems, problems
    return catalog


@dataclass(frozen=True, slots=True)
class _Job:
    """Something to train: the detector of that number, or the classifiers."""

    title: str
    detector: int | None


def _in_process(job: _Job, rendered: Sequence[Sample], out: Path, shares: "Queue[tuple[str, float] | None]") -> Any:
    import cv2

    cv2.setNumThreads(1)
    shares.put((job.title, 0.0))
    last = 0.0

    def on_share(share: float) -> None:
        nonlocal last
        if share - last >= 0.005 or share >= 1.0:
            last = share
            shares.put((job.title, share))

    if job.detector is None:
        return teach.teach_classifiers(list(rendered), out, on_share)
    return teach.teach_detector(job.detector, list(rendered), out, on_share)


def _follow(shares: "Queue[tuple[str, float] | None]", bars: Progress) -> None:
    """A bar for each job from its first share on: what waits for a core is not shown as if it ran."""
    tasks: dict[str, TaskID] = {}
    while (heard := shares.get()) is not None:
        name, share = heard
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=1.0)
        bars.update(tasks[name], completed=share)


@contextmanager
def _two_processes() -> Iterator[ProcessPoolExecutor]:
    """Fresh interpreters, since torch's threads do not survive a fork."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def _bars() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Bars(*columns, console=console)
