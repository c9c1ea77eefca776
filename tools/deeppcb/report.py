"""How good a line for bare boards is, on pairs that nothing of it was trained or tuned on, served as the daemon serves.

Three questions: what the detector finds on tested tiles by itself (the data set's own measure, beside its authors'
figures), what the chain of classifier and detector finds, and how often each classifier is right about a tile.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.config.settings import load_config
from daemon.line.line import load_rules_and_catalog
from experts.catalog import Catalog
from experts.slot import SlotPool
from experts.spec import Answer, ExpertId
from experts.vision.infer import infer
from experts.vision.preprocess import prepare
from routing_rules.routes import Judgement, Routes, judge
from tools.cli.console import console, print_table
from tools.deeppcb.line import ANY_PATTERN, BOARD, CLEAN, DETECTOR, SUSPECT
from tools.deeppcb.measure import Counts, Found, average_precisions, count, mean_average_precision, nothing_found
from tools.deeppcb.tiles import LABELS, Boxes, Pair, patterns_of
from tools.training.detector import find_boxes

#: What the data set's authors report on their test split (README of DeepPCB).
AUTHORS_MAP, AUTHORS_F_SCORE = 0.986, 0.982

OnAnswer = Callable[[str, Answer], None]


@dataclass(frozen=True, slots=True)
class BoxScore:
    """Boxes of all tiles, in the data set's measure."""

    precision: float
    recall: float
    f_score: float
    hits: int
    false: int
    missed: int
    mean_average_precision: float
    average_precisions: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class TileAccuracy:
    """A classifier's own tiles: how many tested ones it suspected, how many templates it passed."""

    suspected: int
    tested: int
    passed: int
    templates: int

    @property
    def accuracy(self) -> float:
        return (self.suspected + self.passed) / max(self.tested + self.templates, 1)


@dataclass(frozen=True, slots=True)
class LineReport:
    """`threshold` is the confidence that boxes were counted from, `verdicts` what the rules made of the tiles."""

    tiles: int
    defects: int
    threshold: float
    detector: BoxScore
    chain: BoxScore
    false_boxes_on_templates: int
    chain_false_boxes_on_templates: int
    classifiers: Mapping[str, TileAccuracy]
    verdicts_of_tested: Mapping[str, int]
    verdicts_of_templates: Mapping[str, int]


class _Server:
    """The experts of a line, all resident, answering as an executor does; each image is asked of an expert once."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._pool = SlotPool("cpu", sum(spec.weights_bytes for spec in catalog.values()))
        self._known: dict[tuple[str, bytes], Answer] = {}

    def answer(self, expert: str, payload: bytes) -> Answer:
        spec = self._catalog[ExpertId(expert)]
        if spec.expert not in self._pool.resident():
            self._pool.load(spec)
        key = (expert, payload)
        if key not in self._known:
            self._known[key] = infer(self._pool.slot(spec.expert), [prepare(payload, "image", None, spec)])[0]
        return self._known[key]


def measure_line(
    config_path: Path, pairs: Sequence[Pair], threshold: float, on_answer: OnAnswer = lambda _expert, _answer: None
) -> LineReport:
    """Everything about the line of `config_path` on these pairs, from the files as the daemon gets them.

    `on_answer` hears what each expert of the chains answers, and which.
    """
    routes, catalog = load_rules_and_catalog(load_config(config_path))
    server = _Server(catalog)
    tested = [pair.test_file.read_bytes() for pair in pairs]
    templates = [pair.template_file.read_bytes() for pair in pairs]
    detector = catalog[ExpertId(DETECTOR)]
    on_tested, on_templates = find_boxes(detector, tested), find_boxes(detector, templates)
    verdicts: dict[str, Counter[str]] = {"tested": Counter(), "templates": Counter()}
    reached: dict[str, list[bool]] = {"tested": [], "templates": []}
    for kind, payloads in (("tested", tested), ("templates", templates)):
        for pair, payload in zip(pairs, payloads, strict=True):
            judgement, experts = run_chain(routes, server, pair.pattern, payload, on_answer)
            verdicts[kind][judgement.verdict] += 1
            reached[kind].append(DETECTOR in experts)
    truths = [pair.boxes for pair in pairs]
    chained = [one if went else nothing_found() for one, went in zip(on_tested, reached["tested"], strict=True)]
    false = [int((one.confidences >= threshold).sum()) for one in on_templates]
    return LineReport(
        tiles=len(pairs),
        defects=sum(len(boxes) for boxes in truths),
        threshold=threshold,
        detector=_boxes(on_tested, truths, threshold),
        chain=_boxes(chained, truths, threshold),
        false_boxes_on_templates=sum(false),
        chain_false_boxes_on_templates=sum(
            boxes for boxes, went in zip(false, reached["templates"], strict=True) if went
        ),
        classifiers=_classifiers(catalog, server, pairs, tested, templates),
        verdicts_of_tested=dict(verdicts["tested"]),
        verdicts_of_templates=dict(verdicts["templates"]),
    )


def run_chain(
    routes: Routes, server: _Server, pattern: str, payload: bytes, on_answer: OnAnswer = lambda _expert, _answer: None
) -> tuple[Judgement, list[str]]:
    """One tile from its first expert to its verdict, and the experts that it went through."""
    board = pattern if pattern in routes.recipes else BOARD
    step = routes.first_step(board, pattern)
    judgement: Judgement | None = None
    experts: list[str] = []
    while step is not None:
        answer = server.answer(step.expert, payload)
        experts.append(step.expert)
        on_answer(step.expert, answer)
        judgement = judge(step, answer.label, answer.confidence, answer.detections, judgement)
        step = judgement.next
    if judgement is None:
        raise ValueError(f"the rules have no step for tiles of {pattern} on {board}")
    return judgement, experts


def _boxes(found: Sequence[Found], truths: Sequence[Boxes], threshold: float) -> BoxScore:
    counts: Counts = count(found, truths, threshold)
    precisions = average_precisions(found, truths, len(LABELS))
    return BoxScore(
        precision=counts.precision,
        recall=counts.recall,
        f_score=counts.f_score,
        hits=counts.hits,
        false=counts.false,
        missed=counts.missed,
        mean_average_precision=mean_average_precision(precisions),
        average_precisions=dict(zip(LABELS, precisions, strict=True)),
    )


def _classifiers(
    catalog: Catalog, server: _Server, pairs: Sequence[Pair], tested: Sequence[bytes], templates: Sequence[bytes]
) -> dict[str, TileAccuracy]:
    """Each pattern's classifier on the tiles of its pattern, the catch-all on all of them."""
    names = [pattern for pattern in patterns_of(list(pairs)) if ExpertId(pattern) in catalog]
    result: dict[str, TileAccuracy] = {}
    for name in [*names, ANY_PATTERN]:
        mine = [index for index, pair in enumerate(pairs) if name in {pair.pattern, ANY_PATTERN}]
        suspected = sum(server.answer(name, tested[index]).label == SUSPECT for index in mine)
        passed = sum(server.answer(name, templates[index]).label == CLEAN for index in mine)
        result[name] = TileAccuracy(suspected, len(mine), passed, len(mine))
    return result


def print_report(report: LineReport) -> None:
    """For a person: the figures beside the authors' own, and the classifiers."""
    rows = [
        (name, *(f"{value:.3f}" for value in (one.mean_average_precision, one.f_score, one.precision, one.recall)))
        for name, one in (("detector alone", report.detector), ("classifier, then detector", report.chain))
    ]
    rows.append(("the authors of DeepPCB, on their test split", f"{AUTHORS_MAP:.3f}", f"{AUTHORS_F_SCORE:.3f}", "", ""))
    title = (
        f"{report.tiles} tested tiles, {report.defects} defects; boxes from {report.threshold:.2f} on, IoU above .33"
    )
    print_table(title, ("", "mAP", "F", "precision", "recall"), rows)
    accuracies = [
        (name, f"{one.suspected} of {one.tested}", f"{one.passed} of {one.templates}", f"{one.accuracy:.3f}")
        for name, one in report.classifiers.items()
    ]
    print_table("Classifiers", ("pattern", "tested tiles suspected", "templates passed", "accuracy"), accuracies)
    console.print(
        f"false boxes on {report.tiles} templates: {report.false_boxes_on_templates} by the detector alone,"
        f" {report.chain_false_boxes_on_templates} behind the classifiers"
    )
    for kind, verdicts in (("tested tiles", report.verdicts_of_tested), ("templates", report.verdicts_of_templates)):
        console.print(f"verdicts of {kind}: " + ", ".join(f"{name} {number}" for name, number in verdicts.items()))
