"""Compiled rules: immutable recipes, the steps of a chain of experts, and the judgement of each answer.

Values and pure functions, shared by the live daemon, the simulator and `coserve explain`. docs/rules.md says in words
how an answer is judged.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import Literal, Protocol, get_args

Task = Literal["classify", "detect"]

#: Boards or images that one alarm remembers, over all places.
MAX_REMEMBERED = 100_000
#: In an expert's name it stands for the component type of the image.
COMPONENT = "{component}"
#: In place of a label: every label that is not named.
ANY_LABEL = "*"


@dataclass(frozen=True, slots=True)
class Requirement:
    """The required number of boxes of `label`, their area, and the confidence from which a box counts.

    `region` is (x1, y1, x2, y2) and `at` is (x, y), in fractions of the image's width and height; a box is where its
    centre is. `tolerance` is a distance from `at` in fractions of the image's longer side. `maximum` None: no upper
    bound.
    """

    label: str
    minimum: int
    maximum: int | None = None
    confidence: float = 0.0
    region: tuple[float, float, float, float] | None = None
    at: tuple[float, float] | None = None
    tolerance: float = 0.0

    @property
    def is_placed(self) -> bool:
        return self.region is not None or self.at is not None

    def holds(self, box: tuple[float, float, float, float], image_size: tuple[int, int]) -> bool:
        """Return True if a box in pixels lies in the required area of an image of (width, height) pixels."""
        width, height = image_size
        x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
        if self.region is not None:
            x1, y1, x2, y2 = self.region
            if not (x1 * width <= x <= x2 * width and y1 * height <= y <= y2 * height):
                return False
        if self.at is not None:
            distance = math.hypot(x - self.at[0] * width, y - self.at[1] * height)
            return distance <= self.tolerance * max(width, height)
        return True


@dataclass(frozen=True, slots=True)
class ClassifierStep:
    """One classifier in a chain. `branches` lead a label to its next step (None: nowhere), `otherwise` the rest.

    `codes` are the defect codes of labels; `pass_rate` is the share of its images that get a pass label.
    """

    name: str
    expert: str
    pass_labels: tuple[str, ...]
    review_below: float = 0.0
    branches: tuple[tuple[str, "Step | None"], ...] = ()
    otherwise: "Step | None" = None
    on_clear: Literal["pass", "review"] = "review"
    pass_rate: float = 0.95
    codes: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    def goes_to(self, label: str) -> "Step | None":
        """Return the next step of an image of `label`, None if its chain ends here."""
        for named, step in self.branches:
            if named == label:
                return step
        return self.otherwise

    def exits(self) -> "tuple[tuple[Step, float], ...]":
        """Return the next steps with their shares: pass labels share `pass_rate`, the others and `*` the rest."""
        named = dict(self.branches)
        passing = self.pass_rate if self.pass_labels else 0.0
        others: list[Step | None] = [step for label, step in self.branches if label not in self.pass_labels]
        if self.otherwise is not None:
            others.append(self.otherwise)
        onward = [(named.get(label, self.otherwise), passing / len(self.pass_labels)) for label in self.pass_labels] + [
            (step, (1.0 - passing) / len(others)) for step in others
        ]
        return tuple((step, share) for step, share in onward if step is not None)


@dataclass(frozen=True, slots=True)
class DetectorStep:
    """One detector in a chain. `fail_on` and `review_on` are thresholds by label (`*`: every label not named).

    `branches` lead an image whose most confident box with a named label has that label, `otherwise` the rest. Nothing
    goes on from a failure.
    """

    name: str
    expert: str
    fail_on: tuple[tuple[str, float], ...] = ()
    review_on: tuple[tuple[str, float], ...] = ()
    require: tuple[Requirement, ...] = ()
    review_below: float = 0.0
    branches: tuple[tuple[str, "Step | None"], ...] = ()
    otherwise: "Step | None" = None
    pass_rate: float = 0.95
    codes: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    def exits(self) -> "tuple[tuple[Step, float], ...]":
        """Return the next steps with their shares: `pass_rate` finds nothing, named labels share the rest equally."""
        named = [(step, (1.0 - self.pass_rate) / len(self.branches)) for _, step in self.branches]
        onward = [*named, (self.otherwise, self.pass_rate)]
        return tuple((step, share) for step, share in onward if step is not None)


Step = ClassifierStep | DetectorStep


def next_steps(step: Step) -> tuple[Step, ...]:
    steps = (*(step for _, step in step.branches), step.otherwise)
    return tuple(step for step in steps if step is not None)


def _task(step: Step) -> Task:
    return "classify" if isinstance(step, ClassifierStep) else "detect"


def chain(first: Step) -> tuple[Step, ...]:
    """Return every step that `first` can lead to, itself first, each after all that lead to it."""
    finished: list[Step] = []
    visited: set[int] = set()

    def visit(step: Step) -> None:
        if id(step) not in visited:
            visited.add(id(step))
            for following in reversed(next_steps(step)):
                visit(following)
            finished.append(step)

    visit(first)
    return tuple(reversed(finished))


def for_component(first: Step, component: str) -> Step:
    """Return the chain with `{component}` filled in; unchanged steps are shared."""
    filled: dict[int, Step] = {}
    for step in reversed(chain(first)):
        branches = tuple((label, None if to is None else filled[id(to)]) for label, to in step.branches)
        otherwise = None if step.otherwise is None else filled[id(step.otherwise)]
        expert = step.expert.replace(COMPONENT, component)
        same = expert == step.expert and otherwise is step.otherwise
        if same and all(new is old for (_, new), (_, old) in zip(branches, step.branches, strict=True)):
            filled[id(step)] = step
        else:
            filled[id(step)] = replace(step, expert=expert, branches=branches, otherwise=otherwise)
    return filled[id(first)]


VerdictName = Literal["pass", "fail", "review", "unknown"]

#: Worst first: a board, or a chain of stages, takes the worst verdict among its parts (PROTOCOL.md, Boards).
SEVERITY: tuple[VerdictName, ...] = ("fail", "unknown", "review", "pass")


def worst(verdicts: Sequence[VerdictName]) -> VerdictName:
    """Return the verdict that wins among `verdicts` (not empty): fail, then unknown, then review, then pass."""
    return min(verdicts, key=SEVERITY.index)


Guard = Literal["repeated_picture", "picture_quality", "unlike_training"]
GUARDS: tuple[Guard, ...] = get_args(Guard)


def guarded(verdict: VerdictName, found: Collection[str]) -> tuple[VerdictName, Guard | None]:
    """Return verdict and reason after the guards `found`: they turn only a pass into review; the first gives why."""
    reason = next(filter(found.__contains__, GUARDS), None) if verdict == "pass" else None
    return ("review", reason) if reason else (verdict, None)


class Seen(Protocol):
    """One detection, as the rules see it; box is (x1, y1, x2, y2) in pixels of the stored image."""

    @property
    def label(self) -> str: ...
    @property
    def confidence(self) -> float: ...
    @property
    def box(self) -> tuple[float, float, float, float]: ...


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of a chain so far, the defect it names, and the next step (None: the chain ends)."""

    verdict: VerdictName
    defect: str | None
    next: Step | None


def judge(
    step: Step,
    label: str | None,
    confidence: float | None,
    detections: Sequence[Seen],
    so_far: Judgement | None,
    image_size: tuple[int, int] | None = None,
) -> Judgement:
    """Judge one expert's answer, after what the chain before it gave; docs/rules.md says it in words.

    The worst verdict of the chain wins; among equals, the later defect. A failure ends the chain. `image_size` is
    (width, height) of the stored image; without it a box that must lie somewhere counts as unsure.
    """
    if isinstance(step, ClassifierStep):
        judgement = _classified(step, label, confidence)
    else:
        judgement = _detected(step, detections, image_size)
    if so_far is not None:
        verdict = worst((so_far.verdict, judgement.verdict))
        defects = [part.defect for part in (judgement, so_far) if part.verdict == verdict and part.defect is not None]
        judgement = Judgement(verdict, defects[0] if defects else None, judgement.next)
    return replace(judgement, next=None) if judgement.verdict == "fail" else judgement


def _classified(step: ClassifierStep, label: str | None, confidence: float | None) -> Judgement:
    if label is None:
        return Judgement("review", None, None)
    # Written so that a confidence that is not a number is unsure, never sure.
    sure = confidence is not None and confidence >= step.review_below
    onward = step.goes_to(label)
    if label in step.pass_labels:
        return Judgement("pass" if sure else "review", None, onward)
    code = step.codes.get(label, label)
    if onward is None:
        return Judgement("fail" if sure else "review", code, None)
    if sure and step.on_clear == "pass":
        return Judgement("pass", None, onward)
    return Judgement("review", code, onward)


def taught_label(
    step: ClassifierStep, labels: Sequence[str], answered: str | None, verdict: str, defect: str | None
) -> str | None:
    """Return the label that a person's decision about an image teaches at `step`, None if it does not say.

    `labels` are those of the step's expert, `answered` its answer. A defect without a label is a new label, unless a
    later step may have found it.
    """
    if verdict == "pass":
        return answered if answered in step.pass_labels else next(iter(step.pass_labels), None)
    if verdict != "fail":
        return None
    failing = [label for label in labels if label not in step.pass_labels]
    named = [label for label in failing if defect in (label, step.codes.get(label, label))]
    if named or any(step.goes_to(label) is not None for label in step.pass_labels):
        return answered if answered in named else named[0] if len(named) == 1 else None
    return defect or (failing[0] if len(failing) == 1 else None)


def _detected(step: DetectorStep, detections: Sequence[Seen], image_size: tuple[int, int] | None) -> Judgement:
    by_confidence = sorted(detections, key=lambda box: -box.confidence)
    onward = _onward(step, by_confidence)
    failures, reviews = list[str](), list[str]()
    for box in by_confidence:
        fail_from, review_from = threshold(step.fail_on, box.label), threshold(step.review_on, box.label)
        # "Not less" and then "at least": a confidence that is not a number ends as unsure, not as unseen.
        if fail_from is not None and not box.confidence < fail_from:
            (failures if box.confidence >= step.review_below else reviews).append(box.label)
        elif review_from is not None and not box.confidence < review_from:
            reviews.append(box.label)
    for requirement in step.require:
        verdict, defect = _required(requirement, detections, image_size)
        if verdict != "pass":
            (failures if verdict == "fail" else reviews).append(defect)
    if failures:
        return Judgement("fail", step.codes.get(failures[0], failures[0]), None)
    if reviews:
        return Judgement("review", step.codes.get(reviews[0], reviews[0]), onward)
    return Judgement("pass", None, onward)


def _onward(step: DetectorStep, by_confidence: Sequence[Seen]) -> Step | None:
    named = dict(step.branches)
    for box in by_confidence:
        if box.label in named:
            return named[box.label]
    return step.otherwise


def threshold(thresholds: tuple[tuple[str, float], ...], label: str) -> float | None:
    named = dict(thresholds)
    return named.get(label, named.get(ANY_LABEL))


def _required(
    requirement: Requirement, detections: Sequence[Seen], image_size: tuple[int, int] | None
) -> tuple[VerdictName, str]:
    """Compare the count with the requirement; return a verdict and the name of the defect.

    Boxes below the confidence may or may not be there, so the true count lies between the certain ones and all of them:
    right for every such count is a pass, for none a failure, for some a review.
    """
    everywhere = [box for box in detections if box.label == requirement.label]
    in_place = everywhere
    if requirement.is_placed and image_size is not None:
        in_place = [box for box in everywhere if requirement.holds(box.box, image_size)]
    certain = [box for box in in_place if box.confidence >= requirement.confidence]
    at_most = len(in_place)
    at_least = 0 if requirement.is_placed and image_size is None else len(certain)
    minimum, maximum = requirement.minimum, math.inf if requirement.maximum is None else requirement.maximum
    if at_least >= minimum and at_most <= maximum:
        return "pass", ""
    if at_least < minimum:
        elsewhere = sum(box.confidence >= requirement.confidence for box in everywhere)
        wrong = "misplaced" if requirement.is_placed and image_size is not None and elsewhere >= minimum else "missing"
    else:
        wrong = "extra"
    return ("fail" if at_most < minimum or at_least > maximum else "review"), f"{wrong}_{requirement.label}"


@dataclass(frozen=True, slots=True)
class Position:
    """One component type of a recipe: how many, and their designators if the recipe lists them."""

    quantity: int
    designators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """Images expected of one board type. `time_limit_s` is None if only completeness closes a board."""

    board_type: str
    positions: Mapping[str, Position] = field(hash=False)
    time_limit_s: float | None = None
    extras_allowed: bool = False
    share: float = 1.0
    #: The component of each designator that the recipe lists.
    component_at: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    def refuses(self, component: str, designator: str) -> bool:
        """Return True if `component` has listed places, `designator` is none of them, and extras are refused."""
        if self.extras_allowed or self.component_at.get(designator) == component:
            return False
        position = self.positions.get(component)
        return position is not None and bool(position.designators)

    @property
    def expected(self) -> int:
        return sum(position.quantity for position in self.positions.values())


@dataclass(frozen=True, slots=True)
class Pattern:
    """A classifier of the rules for components not yet known: experts may say `{component}`."""

    glob: str
    matches: re.Pattern[str]
    step: Step


@dataclass(frozen=True, slots=True)
class AlarmRule:
    """A condition on finished images. `within` is a number, its unit (boards, images or seconds), and its text."""

    name: str
    verdict: VerdictName
    count: int
    same: tuple[str, ...]
    component: str | None
    within: tuple[float, str, str]


@dataclass(frozen=True, slots=True)
class Routes:
    """Compiled rules. `tasks` are those of the catalog's experts, None if compiled without one.

    `experts` are all that the recipes can use, in the order of the file; `usage` is the probability that an image uses
    each (CoServe §4.5: quantities × pass rates along the chain); `successors` has the subsequent experts of each, with
    the share of its images that go on to each.
    """

    text: str
    sha256: str
    recipes: Mapping[str, Recipe] = field(hash=False)
    first_steps: Mapping[str, Mapping[str, Step]] = field(hash=False)
    patterns: tuple[Pattern, ...]
    tasks: Mapping[str, Task] | None = field(hash=False)
    experts: tuple[str, ...]
    usage: Mapping[str, float] = field(hash=False)
    successors: Mapping[str, tuple[tuple[str, float], ...]] = field(hash=False)
    alarms: tuple[AlarmRule, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The first 12 hex digits of the text's sha256 (RESULTS.md, `rules_version`)."""
        return self.sha256[:12]

    def refusal(
        self, board_type: str, component: str, designator: str
    ) -> tuple[Literal["unknown_board", "unknown_component"], str] | None:
        """Return why the rules cannot route an image, as PROTOCOL.md's code and a sentence; None if they can."""
        recipe = self.recipes.get(board_type)
        if recipe is None:
            return "unknown_board", f"the rules name no board type {board_type!a}"
        if self.first_step(board_type, component) is None:
            return "unknown_component", f"the recipe of board type {board_type!a} has no component {component!a}"
        if recipe.refuses(component, designator):
            return "unknown_component", _wrong_position(recipe, component, designator)
        return None

    def first_step(self, board_type: str, component: str) -> Step | None:
        """Return the first step of an image's chain, None if the rules lack the board or the component on it."""
        steps = self.first_steps.get(board_type)
        if steps is None:
            return None
        step = steps.get(component)
        if step is None and self.recipes[board_type].extras_allowed:
            return self._extra(component)
        return step

    def _extra(self, component: str) -> Step | None:
        """Return the chain of a component that no recipe lists, unless the catalog lacks an expert of it."""
        for pattern in self.patterns:
            if pattern.matches.fullmatch(component):
                step = for_component(pattern.step, component)
                if self.tasks is None or all(self.tasks.get(part.expert) == _task(part) for part in chain(step)):
                    return step
                return None
        return None


@dataclass(frozen=True, slots=True)
class Use:
    """One place of an expert in the rules: `step` counts from 1; `before` names the experts that lead there."""

    board_type: str
    components: Sequence[str]
    step: int
    name: str
    before: Sequence[str]
    judges: str


def uses(routes: Routes, expert: str) -> list[Use]:
    """Return an expert's uses by board type and step, in the order of the rules."""
    by_use: dict[tuple[str, int, str, tuple[str, ...], str], list[str]] = {}
    for board_type, steps in routes.first_steps.items():
        for component, first in steps.items():
            for depth, step, before in _ways(first):
                if step.expert == expert:
                    key = (board_type, depth, step.name, before, _judges(step))
                    by_use.setdefault(key, []).append(component)
    return [
        Use(board_type, components, depth, step, before, judges)
        for (board_type, depth, step, before, judges), components in by_use.items()
    ]


def _ways(first: Step) -> list[tuple[int, Step, tuple[str, ...]]]:
    """Return every step of a chain once, with its least depth and the experts before it."""
    depths: dict[int, tuple[int, tuple[str, ...]]] = {id(first): (1, ())}
    steps: list[tuple[int, Step, tuple[str, ...]]] = []
    for step in chain(first):
        depth, before = depths[id(step)]
        steps.append((depth, step, before))
        for after in next_steps(step):
            depths.setdefault(id(after), (depth + 1, (*before, step.expert)))
    return steps


def _judges(step: Step) -> str:
    if isinstance(step, ClassifierStep):
        text = f"passes {', '.join(step.pass_labels) or 'nothing'}"
    else:
        limits = ", ".join(
            f"{'anything' if label == ANY_LABEL else label} from {limit:g}" for label, limit in step.fail_on
        )
        needs = ", ".join(f"{requirement.label} at least {requirement.minimum}" for requirement in step.require)
        text = "; ".join(part for part in (limits and f"fails {limits}", needs and f"requires {needs}") if part)
        text = text or "judges what it detects"
    return f"{text}; review below {step.review_below:g}" if step.review_below else text


def _wrong_position(recipe: Recipe, component: str, designator: str) -> str:
    # Not by edit distance: it would take milliseconds of the intake thread for each wrong name.
    near = max(recipe.positions[component].designators, key=lambda name: len(commonprefix([name, designator])))  # noqa: RUF071
    there = recipe.component_at.get(designator)
    instead = "is no position" if there is None else f"is the position of {there!a}, not"
    return (
        f"designator {designator!a} {instead} of component {component!a} in the recipe of board type "
        f"{recipe.board_type!a}; the nearest of {component!a} is {near!a}"
    )
