"""`coserve demo --train`: makes the experts that come with the repository again, from pictures to measured figures.

Ctrl-C and the same command go on. The product is `DIR/experts`: weights, catalog, thresholds and provenance.
"""

import json
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
from rich.progress import track

from daemon.line.line import load_line
from daemon.line.profile import this_machine
from experts.catalog import read_catalog, write_catalog
from experts.drift import histograms
from experts.spec import Answer
from experts.weights import file_sha256
from tools.camera.render import board_types, render_board
from tools.camera.render.images import DEFECT_RATE
from tools.demo.export import choose_thresholds, export_experts, observe, write_thresholds
from tools.demo.judge import OnAnswer, PartToJudge, judge_parts, loaded_pool
from tools.demo.line import write_configuration, write_rules
from tools.demo.pictures import Sample, read_files, render_missing, samples_of
from tools.demo.training import BACKBONE, CLASSIFIERS, DETECTORS, spent_s, train_network
from tools.terminal.console import console, print_table
from tools.training.held_out import Rate

#: Defect rates, boards of each, and the first seed, which no training and no camera uses.
RATES = (DEFECT_RATE, 0.2)
BOARDS, FIRST_SEED = 200, 600_000
_AT_ONCE = 20


@dataclass(frozen=True, slots=True)
class JudgedPart:
    board: int
    component: str
    truth: str
    verdict: str
    guard: str | None = None

    @property
    def is_good(self) -> bool:
        return self.truth == "ok"

    @property
    def is_called(self) -> bool:
        return self.verdict != "pass"


@dataclass(frozen=True, slots=True)
class Figures:
    """Verdicts on boards of one rate of defects."""

    rate: float
    parts: tuple[JudgedPart, ...]

    def rates(self) -> dict[str, Rate]:
        bad = [part for part in self.parts if not part.is_good]
        good = [part for part in self.parts if part.is_good]
        with_defects = {part.board for part in bad}
        stopped = {part.board for part in self.parts if part.is_called}
        boards = {part.board for part in self.parts}
        without = boards - with_defects
        return {
            "defects caught": Rate(sum(part.is_called for part in bad), len(bad)),
            "good parts called": Rate(sum(part.is_called for part in good), len(good)),
            "good parts called by a guard": Rate(sum(part.guard is not None for part in good), len(good)),
            "of these: failed, a false call": Rate(sum(part.verdict == "fail" for part in good), len(good)),
            "of these: to a person's review": Rate(sum(part.verdict == "review" for part in good), len(good)),
            "boards with defects stopped": Rate(len(with_defects & stopped), len(with_defects)),
            "good boards that pass": Rate(len(without - stopped), len(without)),
        }

    def mistakes(self) -> dict[str, int]:
        """Count mistakes by component, truth and verdict, most frequent first."""
        wrong = Counter(f"{p.component} {p.truth} {p.verdict}" for p in self.parts if p.is_good == p.is_called)
        return dict(wrong.most_common())

    def as_json(self) -> dict[str, Any]:
        rates = {
            name: {"count": rate.count, "of": rate.of, "share": round(rate.share, 5), "interval": rate.interval}
            for name, rate in self.rates().items()
        }
        return {"rate": self.rate, **rates, "mistakes": self.mistakes()}


def measure(config: Path, boards: int = BOARDS, on_answer: OnAnswer = lambda *_: None) -> list[Figures]:
    """Judge boards of each rate as the daemon of `config` would; `on_answer` gets the answers of the first rate."""
    line = load_line(config)
    pool, kinds, figures = loaded_pool(line.catalog), list(board_types()), list[Figures]()
    for place, rate in enumerate(RATES):
        judged, first = list[JudgedPart](), FIRST_SEED + place * 10_000
        title = f"judging {boards} boards with {rate:.0%} of defects"
        for start in track(range(0, boards, _AT_ONCE), title, console=console):
            rendered = [
                (number, kinds[number % len(kinds)], part)
                for number in range(start, min(start + _AT_ONCE, boards))
                for part in render_board(kinds[number % len(kinds)], first + number, rate).placements
            ]
            parts = [PartToJudge(kind, part.component, part.pixels) for _, kind, part in rendered]
            verdicts = judge_parts(line.routes, line.catalog, pool, parts, on_answer if place == 0 else lambda *_: None)
            judged += [
                JudgedPart(number, part.component, part.truth, *verdict)
                for (number, _, part), verdict in zip(rendered, verdicts, strict=True)
            ]
        figures.append(Figures(rate, tuple(judged)))
    return figures


def measured_table(figures: Sequence[Figures]) -> None:
    rows: list[tuple[str, ...]] = []
    for each in figures:
        for name, rate in each.rates().items():
            low, high = rate.interval
            counts = f"{rate.count} of {rate.of}"
            rows.append((f"{each.rate:.0%}", name, counts, f"{rate.share:.4f}", f"{low:.4f} to {high:.4f}"))
    print_table("Boards that no training saw", ("defects", "", "", "share", "95 %"), rows)
    for each in figures:
        mistakes = ", ".join(f"{count} {what}" for what, count in each.mistakes().items()) or "none"
        console.print(f"mistakes at {each.rate:.0%}: {mistakes}")


#: Raise it when renderer, training or export changes make other experts.
NAME, VERSION = "rendered-parts", 2
#: Defect rates of the boards that thresholds are chosen on, and their first seed.
_CALIBRATION_RATES, _FIRST_CALIBRATION_SEED = (0.02, 0.5), 400_000


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
    _run_jobs(folder, recipe)
    with console.status("heads on the stored backbone, and thresholds, on boards not trained on"):
        held_out = read_files(folder / "pictures", range(recipe.files, recipe.files + recipe.held_out_files))
        learn = read_files(folder / "pictures", range(max(0, recipe.files - recipe.head_files), recipe.files))
        calibration = list(_calibration_samples(recipe.calibration_boards))
        catalog = export_experts(folder, out, learn, held_out, calibration)
        del learn
        thresholds = choose_thresholds(observe(catalog, [*held_out, *calibration]))
        write_thresholds(out, thresholds)
        write_rules(folder, thresholds)
    answers: dict[str, list[Answer]] = defaultdict(list)
    config = write_configuration(folder)
    figures = measure(config, recipe.measured_boards, lambda expert, answer: answers[expert].append(answer))
    entries = read_catalog(out / "catalog.yaml")
    for expert, own in answers.items():
        counts = histograms((answer.label, answer.confidence) for answer in own)
        entries[expert] = entries[expert].model_copy(update={"confidences": counts})
    write_catalog(out / "catalog.yaml", entries)
    write_provenance(folder, out, recipe, figures)
    measured_table(figures)
    console.print(f"The experts are in {out}.")
    return out


def measure_line(folder: Path) -> None:
    measured_table(measure(folder / "coserve.yaml"))


def _run_jobs(folder: Path, recipe: Recipe) -> None:
    """Run two at a time, each on its own core: first the pictures, for which the first training waits."""
    with two_processes() as pool:
        jobs = [pool.submit(_render, folder, recipe.files + recipe.held_out_files)]
        networks = (BACKBONE, *(detector.expert for detector in reversed(DETECTORS)))
        jobs += [pool.submit(train_network, name, folder, recipe.files, recipe.steps_share) for name in networks]
        for job in as_completed(jobs):
            job.result()


def _render(folder: Path, files: int) -> None:
    for number in render_missing(folder / "pictures", files):
        if number % 8 == 7:
            print(f"{number + 1} of {files} files of pictures rendered", flush=True)


@contextmanager
def two_processes() -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of fresh interpreters: torch's threads do not survive a fork."""
    others = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, initializer=cv2.setNumThreads, initargs=(1,)) as pool:
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
    lessons = (CLASSIFIERS, *DETECTORS)
    lengths = [{key: value for key, value in asdict(lesson).items() if key != "labels"} for lesson in lessons]
    files = sorted(path for path in out.iterdir() if path.name != "provenance.json")
    document = {
        "recipe": NAME,
        "version": VERSION,
        "command": "coserve demo --train",
        "seed": 0,
        "parameters": asdict(recipe) | {"lessons": lengths},
        "hours": {lesson.expert: round(spent_s(lesson.expert, folder) / 3600, 2) for lesson in lessons},
        "processor": this_machine().cpu,
        "figures": [each.as_json() for each in figures],
        "files": {path.name: {"sha256": file_sha256(path), "bytes": path.stat().st_size} for path in files},
    }
    (out / "provenance.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
