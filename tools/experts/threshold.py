"""The threshold of an expert at which escapes and false calls cost least, from people's decisions or from pictures.

People seldom decide about images that passed, and those that they look at are no random sample. So passed images count
only on boards where all of them are decided; without enough of these, thresholds that show people more images than the
one in force are left out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, and_, func, select

from daemon.storage.database.reviews import DAEMON, newest_of_each
from daemon.storage.database.schema import detections, inspections, reviews, stages
from experts.spec import ExpertId, ExpertSpec
from routing_rules.routes import ClassifierStep, Routes, chain
from tools.experts.line import ExpertsLine
from tools.experts.measure import answers_of, images_in, label_folders
from tools.terminal.console import CommandError

_Floats = NDArray[np.float64]
#: Answers that are read, the newest; images of either kind, and passed images, that an estimate needs.
_MAX_ANSWERS, _MIN_EACH, _MIN_PASSED = 200_000, 10, 100
_ROUNDS, _SEED = 500, 7


@dataclass(frozen=True, slots=True)
class _Threshold:
    """A threshold in the rules: of a classifier that `passes` labels, or of a detector's `label` for `defects`."""

    entry: str
    in_force: float
    passes: tuple[str, ...] = ()
    label: str | None = None
    defects: tuple[str | None, ...] = ()

    def shows(self, confidence: _Floats, at: _Floats | float) -> NDArray[np.bool_]:
        """Return True where an image is shown to a person; confidence -1: another label, or no box."""
        return confidence < at if self.label is None else confidence >= at


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Images known to be good or bad: `weight` is how many images of the line each stands for, `board` a number."""

    confidence: _Floats
    bad: NDArray[np.bool_]
    weight: _Floats
    board: NDArray[np.int64]


def cheapest(
    line: ExpertsLine, name: str, label: str | None, escape_cost: float, false_call_cost: float, pictures: Path | None
) -> dict[str, Any]:
    """Return the cost of 1,000 images by threshold, and the best threshold with its interval. Raises CommandError."""
    catalog, routes = line.in_force()
    spec = catalog.get(ExpertId(name))
    if spec is None or routes is None:
        raise CommandError(f"{name} is not in force, or the rules have mistakes: coserve check")
    use = _in_rules(routes, name, label)
    rows = line.in_database(lambda connection: _answers(connection, spec, use.label or "")) or []
    evidence, facts = _decided(np.array(rows, dtype=object).reshape(-1, 7), use)
    images = facts["shown"] + facts["passed"]
    if pictures is not None and use.label is None:
        facts["defective"] = float(evidence.weight @ evidence.bad)
        evidence = _pictured(spec, use, pictures, facts["defective"], images)
        facts |= {"pictures": len(evidence.bad), "compares_all": True}
    facts |= {"fail": int(evidence.bad.sum()), "pass": int((~evidence.bad).sum())}
    missing = [f"{_MIN_EACH - facts[what]} more that {what}" for what in ("fail", "pass") if facts[what] < _MIN_EACH]
    if missing:
        known = f"of {name} {spec.version} {facts['fail']} images that fail and {facts['pass']} that pass are known"
        raise CommandError(f"too few decisions: {known}; {' and '.join(missing)} are needed")
    grid = np.unique(np.append(np.linspace(0, 1, 101).round(2), use.in_force))
    if use.label is not None:
        grid = grid[grid >= (spec.confidence_floor if facts["compares_all"] else use.in_force)]
    elif not facts["compares_all"]:
        grid = grid[grid <= use.in_force]
    shown = use.shows(evidence.confidence[:, None], grid)
    cost = np.where(evidence.bad[:, None], escape_cost * ~shown, false_call_cost * shown) * evidence.weight[:, None]
    by_board = np.zeros((evidence.board.max() + 1, len(grid)))
    np.add.at(by_board, evidence.board, cost * 1000 / images)
    key = "review_below" if use.label is None else f"fail_on: {use.label}"
    known = {"expert": name, "version": spec.version, "entry": use.entry, "key": key, "in_force": use.in_force}
    return known | _best(by_board, grid, use.in_force) | facts


def _best(by_board: _Floats, grid: _Floats, in_force: float) -> dict[str, Any]:
    """Return the curve and its least cost, with 95 % intervals by bootstrap over boards."""
    distance = 1e-7 * abs(grid - in_force)  # of equal costs, the threshold nearest to the one in force is best
    curve, now, draw = by_board.sum(0), int(np.searchsorted(grid, in_force)), np.random.default_rng(_SEED)
    best, boards = int((curve + distance).argmin()), len(by_board)
    drawn = (np.bincount(draw.integers(0, boards, boards), minlength=boards) for _ in range(_ROUNDS))
    rounds = np.array([counts @ by_board for counts in drawn])
    intervals = np.percentile(rounds, (2.5, 97.5), axis=0).T
    return {
        "best": float(grid[best]),
        "best_interval": np.percentile(grid[(rounds + distance).argmin(1)], (2.5, 97.5)).tolist(),
        "cost": float(curve[best]),
        "cost_in_force": float(curve[now]),
        "saved_interval": np.percentile(rounds[:, now] - rounds[:, best], (2.5, 97.5)).tolist(),
        "curve": [[*row] for row in np.column_stack((grid, curve, intervals)).tolist()],
    }


def _in_rules(routes: Routes, name: str, label: str | None) -> _Threshold:
    """Return the threshold of the one entry of the rules that uses the expert. Raises CommandError."""
    firsts = (first for steps in routes.first_steps.values() for first in steps.values())
    every = [step for first in firsts for step in chain(first)]
    steps = {step.name: step for step in every if step.expert == name}
    if len(steps) != 1:
        raise CommandError(f"expected one entry of the rules that uses {name}, found {', '.join(steps) or 'none'}")
    (step,) = steps.values()
    is_shared = any(other.name == step.name and other.expert != name for other in every)
    entry = f"{step.name} (other experts too: give {name} an entry of its own before it)" if is_shared else step.name
    if isinstance(step, ClassifierStep):
        return _Threshold(entry, step.review_below, step.pass_labels)
    fail_on = dict(step.fail_on)
    label = label or (next(iter(fail_on)) if len(fail_on) == 1 else None)
    if label is None or label not in fail_on:
        raise CommandError(f"--label: expected one that `fail_on` of {step.name} names: {', '.join(fail_on) or 'none'}")
    return _Threshold(entry, fail_on[label], (), label, (None, label, step.codes.get(label)))


def _answers(connection: Connection, spec: ExpertSpec, label: str) -> list[Any]:
    """Return the newest answers: board, verdict, label, confidence, the surest box's confidence, decision, defect."""
    newest, image, answer = newest_of_each(), inspections.c, stages.c
    is_box = (detections.c.inspection_id == answer.inspection_id, detections.c.step == answer.step)
    box = select(func.max(detections.c.confidence)).where(*is_box, detections.c.label == label).scalar_subquery()
    is_person = and_(reviews.c.reviewer != DAEMON, reviews.c.verdict.in_(("pass", "fail")))
    query = (
        select(image.board_id, image.verdict, answer.label, answer.confidence, box, reviews.c.verdict, reviews.c.defect)
        .select_from(stages)
        .join(inspections, image.inspection_id == answer.inspection_id)
        .outerjoin(newest, newest.c.inspection_id == answer.inspection_id)
        .outerjoin(reviews, and_(reviews.c.review_id == newest.c.review_id, is_person))
        .where(answer.expert == spec.name, answer.expert_version == spec.version)
        .where(answer.expert_settings == spec.settings_digest, image.verdict.is_not(None))
    )
    return [tuple(row) for row in connection.execute(query.order_by(answer.inspection_id.desc()).limit(_MAX_ANSWERS))]


def _decided(rows: NDArray[Any], use: _Threshold) -> tuple[_Evidence, dict[str, Any]]:
    """Return the decided images, weighted to stand for all, and the number of each kind."""
    board, verdict, answered, sure, box, decision, defect = rows.T
    sure = np.where(np.isin(answered, use.passes), sure, -1.0) if use.label is None else box
    confidence = np.array([-1.0 if value is None else value for value in sure], dtype=float)
    bad = decision == "fail"
    if use.label is not None:  # another defect is no escape of this label
        bad &= np.array([each in use.defects for each in defect], dtype=bool)
    passed, known = verdict == "pass", decision != None  # noqa: E711 - elementwise
    shown = ~passed & use.shows(confidence, use.in_force)  # the others are shown whatever this threshold is
    complete = passed & known & ~np.isin(board, board[passed & ~known])
    weight = np.where(shown & known, shown.sum() / max((shown & known).sum(), 1), 0.0)
    compares_all = bool(complete.sum() >= _MIN_PASSED)
    weight += compares_all * np.where(complete, passed.sum() / max(complete.sum(), 1), 0.0)
    kept = weight > 0
    facts = {"images": len(rows), "shown": int(shown.sum()), "shown_decided": int((shown & known).sum())}
    facts |= {"passed": int(passed.sum()), "passed_decided": int(complete.sum()), "compares_all": compares_all}
    boards = np.unique(board[kept].astype(np.int64), return_inverse=True)[1]
    return _Evidence(confidence[kept], bad[kept].astype(bool), weight[kept], boards), facts


def _pictured(spec: ExpertSpec, use: _Threshold, folder: Path, defective: float, images: int) -> _Evidence:
    """Return the pictures in `folder/LABEL`, weighted to stand for `images` of the line, `defective` of them bad."""
    if not defective:
        raise CommandError(f"no image of {spec.name} is decided to fail: 1 that fails is needed for their share")
    confidence, bad = list[float](), list[bool]()
    for label, place in label_folders(folder).items():
        answers = answers_of(spec, images_in(place, spec))
        confidence += [float(each.confidence or 0) if each.label in use.passes else -1.0 for each in answers]
        bad += [label not in use.passes] * len(answers)
    is_bad = np.array(bad, dtype=bool)
    weight = np.where(is_bad, defective / max(is_bad.sum(), 1), (images - defective) / max((~is_bad).sum(), 1))
    return _Evidence(np.array(confidence), is_bad, weight, np.arange(len(bad)))


def in_words(result: dict[str, Any]) -> list[str]:
    """Return the result as lines of text: its evidence and what that cannot tell, the best threshold, its gain."""
    (low, high), (least, most) = result["best_interval"], result["saved_interval"]
    saved = result["cost_in_force"] - result["cost"]
    known = "{shown_decided} of {shown} images that were shown, {passed_decided} of {passed} that passed"
    if "pictures" in result:
        share = result["defective"] / (result["shown"] + result["passed"])
        limit = (
            f"costs are from {result['pictures']} pictures, the share of defective ones ({share:.2%}) from decisions"
        )
    elif result["compares_all"]:
        limit = "escapes are overestimated if these boards were decided because something was wrong with them"
    else:
        more = f"{_MIN_PASSED - result['passed_decided']} more passed images, all those of boards chosen at random"
        limit = f"no threshold that shows more images is compared: for that, decide {more}"
    return [
        "{expert} {version}, {key} of {entry}: {in_force:g} in force".format_map(result),
        f"decided: {known.format_map(result)} (on boards decided completely); {limit}",
        f"least cost at {result['best']:g} (95 %: {low:g} to {high:g}): {result['cost']:.1f} for 1,000 images",
        f"saves {saved:.1f} (95 %: {least:.1f} to {most:.1f}) of the {result['cost_in_force']:.1f} at the one in force",
        "rules.yaml, {entry}: {key}: {best:g}".format_map(result),
    ]


def draw(result: dict[str, Any], folder: Path) -> Path:
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    grid, cost, low, high = np.array(result["curve"]).T
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(grid, low, high, alpha=0.25)
    axes.plot(grid, cost)
    for name, style in (("best", "-"), ("in_force", ":")):
        axes.axvline(result[name], color="black", linestyle=style, label=f"{name.replace('_', ' ')}: {result[name]:g}")
    axes.set(xlabel=result["key"], ylabel="cost of 1,000 images", title=result["expert"])
    axes.legend()
    file = folder / f"{result['expert']}-threshold.png"
    figure.savefig(file, dpi=100)
    return file
