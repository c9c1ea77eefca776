"""Uses of one expert in the rules: the steps that ask it, and the verdicts made of its answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from routing_rules.routes import ANY_LABEL, ClassifierStep, Routes, Step, chain, next_steps


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
    """By board type and step, in the order of the rules."""
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
    """Every step of a chain once: how deep it is at the least, and the experts before it."""
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
