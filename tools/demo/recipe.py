"""`coserve demo --train`: makes the experts that come with the repository again, from pictures to measured figures.

Ctrl-C and the same command go on. The product is `DIR/experts`: weights, catalog, thresholds, features and provenance.
"""

import json
import multiprocessing
import platform
from collections import defaultdict
from collections.abc import Iterator, MutableMapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from experts.spec import Answer
from experts.weights import file_sha256
from tools.camera.render import board_types, render_board
from tools.demo.export import choose_thresholds, export_experts, observe, write_thresholds
from tools.demo.files import write_configuration, write_rules
from tools.demo.measure import Figures, measure, measured_table
from tools.demo.pictures import Sample, read_files, render_missing, samples_of
from tools.demo.training import BACKBONE, CLASSIFIERS, DETECTORS, spent_s, train_network
from tools.experts.measure import write_confidences
from tools.terminal.console import console
from tools.terminal.progress import Bars

#: Raise the number with every change of renderer, training or export that makes other experts.
NAME, VERSION = "rendered-parts", 1
#: Shares of parts with a defect on the boards that thresholds are chosen on, and the first of their seeds.
_CALIBRATION_RATES, _FIRST_CALIBRATION_SEED = (0.02, 0.5), 400_000
_COLUMNS = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())


@dataclass(frozen=True, slots=True)
class Recipe:
    """Amounts of pictures and boards. `steps_share` shortens the trainings: tests train a thousandth.

    Heads learn from the last `head_files` of the pictures.
    """

    files: int = 50
    held_out_files: int = 6
    head_files: int = 20
    steps_share: float = 1.0
    calibration_boards: int = 120
    measured_boards: int = 200


def train(folder: Path, recipe: Recipe = Recipe()) -> Path:
    """Make the experts in `folder/experts`, or go on making them, and print their figures; return that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "experts"
    with Bars(*_COLUMNS, console=console) as bars:
        _run_jobs(bars, folder, recipe)
        task = bars.add_task("heads on the stored backbone", total=None)
        held_out = read_files(folder / "pictures", range(recipe.files, recipe.files + recipe.held_out_files))
        learn = read_files(folder / "pictures", range(max(0, recipe.files - recipe.head_files), recipe.files))
        catalog = export_experts(folder, out, learn, held_out)
        del learn
        bars.update(task, description="thresholds on boards not trained on")
        observed = observe(catalog, [*held_out, *_calibration_samples(recipe.calibration_boards)])
        thresholds = choose_thresholds(observed)
        write_thresholds(out, thresholds)
        write_rules(folder, thresholds)
        bars.update(task, total=1.0, completed=1.0)
        task = bars.add_task("measuring on boards not trained on", total=1.0)
        answers: dict[str, list[Answer]] = defaultdict(list)
        figures = measure(
            write_configuration(folder),
            boards=recipe.measured_boards,
            on_share=lambda share: bars.update(task, completed=share),
            on_answer=lambda expert, answer: answers[expert].append(answer),
        )
    write_confidences(out / "catalog.yaml", answers)
    write_provenance(folder, out, recipe, figures)
    measured_table(figures)
    console.print(f"The experts are in {out}.")
    return out


def measure_line(folder: Path) -> None:
    """Print the figures of the line in `folder` on boards that no training saw."""
    with Bars(*_COLUMNS, console=console) as bars:
        task = bars.add_task("judging 400 boards", total=1.0)
        figures = measure(folder / "coserve.yaml", on_share=lambda share: bars.update(task, completed=share))
    measured_table(figures)


def _run_jobs(bars: Bars, folder: Path, recipe: Recipe) -> None:
    """Run two at a time, each on its own core: first the pictures, for which the first training waits."""
    networks = (BACKBONE, *(detector.expert for detector in reversed(DETECTORS)))
    with multiprocessing.get_context("spawn").Manager() as manager, two_processes() as pool:
        shares: MutableMapping[str, float] = manager.dict()
        running = [pool.submit(_render, folder, recipe.files + recipe.held_out_files, shares, "rendering pictures")]
        running += [pool.submit(_train, name, folder, recipe, shares, f"training {name}") for name in networks]
        tasks: dict[str, TaskID] = {}  # a job that waits for a core has no bar yet
        is_over = False
        while not is_over:
            is_over = not wait(running, 0.5, FIRST_EXCEPTION).not_done
            for job in running:
                if job.done():
                    job.result()
            for title, share in shares.items():
                if title not in tasks:
                    tasks[title] = bars.add_task(title, total=1.0)
                bars.update(tasks[title], completed=share)


def _render(folder: Path, files: int, shares: MutableMapping[str, float], title: str) -> None:
    import cv2

    cv2.setNumThreads(1)
    for number in render_missing(folder / "pictures", files):
        shares[title] = (number + 1) / files


def _train(expert: str, folder: Path, recipe: Recipe, shares: MutableMapping[str, float], title: str) -> None:
    import cv2

    cv2.setNumThreads(1)
    train_network(expert, folder, recipe.files, recipe.steps_share, lambda share: shares.update({title: share}))


@contextmanager
def two_processes() -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of fresh interpreters: torch's threads do not survive a fork."""
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:  # Ctrl-C and SIGTERM, too: a training would go on for hours
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


def _calibration_samples(boards: int) -> Iterator[Sample]:
    kinds = list(board_types())
    for number in range(boards):
        rate = _CALIBRATION_RATES[number // len(kinds) % len(_CALIBRATION_RATES)]
        yield from samples_of(render_board(kinds[number % len(kinds)], _FIRST_CALIBRATION_SEED + number, rate))


def write_provenance(folder: Path, out: Path, recipe: Recipe, figures: list[Figures]) -> None:
    """Write how the experts came about and what they are worth, and the sha256 of each file."""
    lessons = (CLASSIFIERS, *(detector.lesson for detector in DETECTORS))
    files = sorted(path for path in out.iterdir() if path.name != "provenance.json")
    document = {
        "recipe": NAME,
        "version": VERSION,
        "command": "coserve demo --train",
        "seed": 0,
        "parameters": asdict(recipe) | {"lessons": [asdict(lesson) for lesson in lessons]},
        "hours": {lesson.expert: round(spent_s(lesson.expert, folder) / 3600, 2) for lesson in lessons},
        "processor": _processor(),
        "figures": [each.as_json() for each in figures],
        "files": {path.name: {"sha256": file_sha256(path), "bytes": path.stat().st_size} for path in files},
    }
    (out / "provenance.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.machine()
