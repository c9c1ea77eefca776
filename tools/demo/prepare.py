"""Makes the demo's line: render, train, calibrate, write its files, judge it on boards that it was not trained on.

A line that the same code made (`prepared.json` names it) is used again.
"""

import hashlib
import json
import multiprocessing
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

import tools.camera.render
import tools.training
from experts.catalog import Catalog, CatalogFile, resolve, write_catalog
from experts.spec import Answer
from tools.demo import files, judge, training
from tools.demo.judge import Quality
from tools.demo.training import Sample
from tools.experts.measure import write_confidences
from tools.terminal.console import console
from tools.terminal.progress import Bars

PANELS, UNITS = 95, 20
_BOARDS_PER_TASK = 5
#: Boards of the final judgement: four types for each seed, none of which training or the demo's camera renders.
JUDGED_SEEDS = tuple(range(500_000, 500_006))
JUDGED_DEFECT_RATE = 0.2
#: Panels, units and seeds of a quick line.
_QUICK = (16, 16, JUDGED_SEEDS[:2])
PREPARED = "prepared.json"


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """The quality of the line and the minutes that its training took; `cached` if an earlier run trained it."""

    key: str
    minutes: float
    quality: Quality
    cached: bool = False

    def summary(self) -> str:
        """Return the quality of the line as text for people."""
        quality = self.quality
        when = "in an earlier run" if self.cached else "just now"
        missed = ", ".join(f"{count} {kind}" for kind, count in quality.missed.items()) or "none"
        return (
            f"Experts trained {when} ({self.minutes:.1f} min), judged on {quality.boards} boards not trained on:\n"
            f"  defects caught {quality.caught} of {quality.defects} ({quality.catch_rate:.3f}; missed: {missed})\n"
            f"  false calls {quality.false_calls} of {quality.good} good parts ({quality.false_call_rate:.3f})"
        )


def prepare(folder: Path, *, quick: bool = False) -> PrepareReport:
    """Make the line in `folder` unless it is there, in minutes; `quick` in two, without detectors, blind to solder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = files.write_configuration(folder)
    key = code_key(quick=quick)
    earlier = earlier_report(folder, key)
    if earlier is not None:
        return earlier
    panels, units, seeds = _QUICK if quick else (PANELS, UNITS, JUDGED_SEEDS)
    began_s = time.monotonic()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console) as bars:
        samples = _render(bars, panels, units)
        catalog = _train(samples, folder / "experts", bars, detectors=not quick)
        task = bars.add_task("calibrating on parts held out", total=1.0)
        held_out = training.split(samples)[1]
        review_below = judge.review_below(catalog, held_out)
        if quick:
            write_quick_rules(folder, review_below)
        else:
            files.write_rules(folder, judge.fail_thresholds(catalog, held_out), review_below)
        bars.update(task, completed=1.0)
        minutes = (time.monotonic() - began_s) / 60
        task = bars.add_task("judging boards not trained on", total=1.0)
        answers: dict[str, list[Answer]] = defaultdict(list)
        quality = judge.judge_line(
            config,
            seeds,
            JUDGED_DEFECT_RATE,
            lambda share: bars.update(task, completed=share),
            lambda expert, answer: answers[expert].append(answer),
        )
        write_confidences(folder / "experts" / "catalog.yaml", answers)
    report = PrepareReport(key, minutes, quality)
    (folder / PREPARED).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


def write_quick_rules(folder: Path, review_below: float) -> None:
    """Write `folder/rules.yaml` for classifiers alone."""
    rules = files.write_rules(folder, {detector.expert: {} for detector in training.DETECTORS}, review_below)
    solder = r", then: .*?(?=})|; what passes.*|(?s:^detectors:.*?\n\n)|^  (bridge|insufficient|lifted_lead):.*\n"
    rules.write_text(re.sub(solder, "", rules.read_text("utf-8"), flags=re.MULTILINE), "utf-8")


def code_key(*, quick: bool = False) -> str:
    """Return a digest of all that the experts depend on: the renderer, the training, the numbers above."""
    digest = hashlib.sha256()
    folders = [Path(next(iter(package.__path__))) for package in (tools.camera.render, tools.training)]
    sources = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    sources += [Path(str(module.__file__)) for module in (files, judge, training)]
    for path in sources:
        digest.update(path.read_bytes())
    digest.update(repr((PANELS, UNITS, JUDGED_SEEDS, JUDGED_DEFECT_RATE)).encode())
    digest.update(repr(_QUICK).encode() if quick else b"")
    return digest.hexdigest()[:12]


def earlier_report(folder: Path, key: str) -> PrepareReport | None:
    """Return the report of the line in `folder` if the code of `key` made it and it is complete."""
    try:
        report: dict[str, Any] = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
        quality = Quality(**report["quality"])
        present = (folder / "rules.yaml").is_file() and (folder / "experts" / "catalog.yaml").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if report["key"] != key or not present:
        return None
    return PrepareReport(key, report["minutes"], quality, cached=True)


def _render(bars: Progress, panels: int, units: int) -> list[Sample]:
    task = bars.add_task("rendering parts", total=1.0)
    chunks = [
        (render, range(start, min(start + _BOARDS_PER_TASK, count)))
        for render, count in ((training.render_panels, panels), (training.render_units, units))
        for start in range(0, count, _BOARDS_PER_TASK)
    ]
    by_chunk: dict[int, list[Sample]] = {}
    with _two_processes() as pool:
        running = {pool.submit(render, numbers): place for place, (render, numbers) in enumerate(chunks)}
        for done in as_completed(running):
            by_chunk[running[done]] = done.result()
            bars.update(task, completed=len(by_chunk) / len(chunks))
    samples = [sample for number in range(len(chunks)) for sample in by_chunk[number]]
    order = np.random.default_rng(0).permutation(len(samples))  # so that both kinds train, and both calibrate
    return [samples[place] for place in order]


def _train(samples: list[Sample], out: Path, bars: Progress, *, detectors: bool) -> Catalog:
    """Run two trainings at a time, each on its own core, and return the catalog of the experts."""
    out.mkdir(exist_ok=True)
    # The longest first, so that both processes end at about the same time.
    longest = sorted(range(len(training.DETECTORS)), key=lambda number: -training.DETECTORS[number].effort)
    jobs: list[tuple[str, int | None]] = [
        (f"training {training.DETECTORS[number].expert} ({training.DETECTOR})", number)
        for number in longest
        if detectors
    ]
    jobs.insert(1, (f"training 16 classifiers ({training.CLASSIFIER})", None))
    with multiprocessing.get_context("spawn").Manager() as manager, _two_processes() as pool:
        shares: Queue[tuple[str, float]] = manager.Queue()
        running: list[Future[dict[str, dict[str, Any]]]] = [
            pool.submit(_run_job, *job, samples, out, shares) for job in jobs
        ]
        tasks: dict[str, TaskID] = {}  # a job that waits for a core has no bar yet
        while not all(job.done() for job in running) or not shares.empty():
            with suppress(Empty):
                title, share = shares.get(timeout=0.5)
                if title not in tasks:
                    tasks[title] = bars.add_task(title, total=1.0)
                bars.update(tasks[title], completed=share)
        entries = {expert: entry for done in running for expert, entry in done.result().items()}
    write_catalog(out / "catalog.yaml", entries)
    catalog, problems = resolve(CatalogFile.model_validate({"experts": entries}), out)
    assert not problems, problems
    return catalog


def _run_job(
    title: str, detector: int | None, samples: Sequence[Sample], out: Path, shares: "Queue[tuple[str, float]]"
) -> Any:
    """Train the detector of this number, or (None) the classifiers."""
    import cv2

    cv2.setNumThreads(1)
    shares.put((title, 0.0))
    last = 0.0

    def on_share(share: float) -> None:
        nonlocal last
        if share - last >= 0.005 or share >= 1.0:
            last = share
            shares.put((title, share))

    if detector is None:
        return training.train_classifiers(list(samples), out, on_share)
    return training.train_detector(detector, list(samples), out, on_share)


@contextmanager
def _two_processes() -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of fresh interpreters: torch's threads do not survive a fork."""
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:  # Ctrl-C and SIGTERM, too: a training would go on for minutes
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
