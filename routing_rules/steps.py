"""The steps of a chain of experts, as immutable values: what each looks at, and where an image goes on from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Task = Literal["classify", "detect"]

#: In an expert's name it stands for the component type of the image.
COMPONENT = "{component}"
#: In place of a label: every label that is not named.
ANY_LABEL = "*"


@dataclass(frozen=True, slots=True)
class Requirement:
    """How many boxes of `label` there must be, where, and from which confidence on a box counts for certain.

    `region` is (x1, y1, x2, y2) and `at` is (x, y), in fractions of the image's width and height; a box is where
    its centre is. `tolerance` is a distance from `at` in fractions of the image's longer side. `maximum` is None
    where there is no upper bound.
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
        """Whether a box in pixels is where this requirement looks, in an image of (width, height) pixels."""
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
    """One classifier in a chain. `branches` name where a label goes on to (None: nowhere), `otherwise` the rest.

    `codes` are the defect codes of labels; `pass_rate` is the share of its images that are given a pass label.
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

    @property
    def task(self) -> Task:
        return "classify"

    def goes_to(self, label: str) -> "Step | None":
        """The step that an image of `label` goes on to, or None where its chain ends here."""
        for named, step in self.branches:
            if named == label:
                return step
        return self.otherwise

    def exits(self) -> "tuple[tuple[Step, float], ...]":
        """The next steps, each with the share of this step's images that are expected to go on to it.

        Pass labels share `pass_rate` equally; the other labels that are named, and `*`, share the rest equally.
        """
        named = dict(self.branches)
        passing = self.pass_rate if self.pass_labels else 0.0
        others: list[Step | None] = [step for label, step in self.branches if label not in self.pass_labels]
        if self.otherwise is not None:
            others.append(self.otherwise)
        onward = [(named.get(label, self.otherwise), passing / len(self.pass_labels)) for label in self.pass_labels] + [
            (step, (1.0 - passing) / len(others)) for step in others
        ]
        return tuple((step, share) for step, share in onward if step is not None)

    def next_steps(self) -> "tuple[Step, ...]":
        steps = (*(step for _, step in self.branches), self.otherwise)
        return tuple(step for step in steps if step is not None)


@dataclass(frozen=True, slots=True)
class DetectorStep:
    """One detector in a chain. `fail_on` and `review_on` are thresholds by label (`*`: every label not named).

    `branches` name where an image goes on to whose most confident box with a named label has that label;
    `otherwise` is where the rest goes. Nothing goes on from a failure.
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

    @property
    def task(self) -> Task:
        return "detect"

    def exits(self) -> "tuple[tuple[Step, float], ...]":
        """The next steps, each with its share: `pass_rate` finds nothing, the named labels share the rest equally."""
        named = [(step, (1.0 - self.pass_rate) / len(self.branches)) for _, step in self.branches]
        onward = [*named, (self.otherwise, self.pass_rate)]
        return tuple((step, share) for step, share in onward if step is not None)

    def next_steps(self) -> "tuple[Step, ...]":
        steps = (*(step for _, step in self.branches), self.otherwise)
        return tuple(step for step in steps if step is not None)


Step = ClassifierStep | DetectorStep


def chain(first: Step) -> tuple[Step, ...]:
    """Every step that `first` can lead to, itself first, each after all that lead to it."""
    finished: list[Step] = []
    known: set[int] = set()

    def visit(step: Step) -> None:
        if id(step) not in known:
            known.add(id(step))
            for following in reversed(step.next_steps()):
                visit(following)
            finished.append(step)

    visit(first)
    return tuple(reversed(finished))


def for_component(first: Step, component: str) -> Step:
    """The chain with `{component}` filled in; steps that do not change are shared."""
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
