"""What SwapMoE has of a checkpoint before the first token: norms and importance of its experts, and memory plans."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from experts.moe.errors import ModelError
from experts.moe.weights.prepared import PreparedFiles

PLAN = "plan"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """For a budget: virtual experts of each layer, and steps of an update cycle (SwapMoE Eq. 3)."""

    budget_bytes: int
    counts: tuple[int, ...]
    period: int


@dataclass(frozen=True, slots=True)
class Preparation:
    """`norms`: (L, E) float32, ‖Eᵢ‖. `importance`: (L, E) float32, Eq. 2 summed over training text, in any unit."""

    norms: torch.Tensor
    importance: torch.Tensor
    plans: tuple[MemoryPlan, ...] = ()

    @classmethod
    def of(cls, norms: torch.Tensor) -> "Preparation":
        """Where no text has been seen: the heaviest experts first, as the paper's static pruning ranks them."""
        return cls(norms, norms)


def load_preparation(checkpoint: Path) -> Preparation | None:
    """What `coserve moe plan` wrote; None where it has not run. Raises ModelError where it is of other weights."""
    prepared = PreparedFiles(checkpoint)
    if not prepared.path(PLAN).exists():
        return None
    tensors, notes = prepared.load(PLAN)
    try:
        plans = [MemoryPlan(one["budget_bytes"], tuple(one["counts"]), one["period"]) for one in notes["plans"]]
        return Preparation(tensors["norms"], tensors["importance"], tuple(plans))
    except KeyError as missing:
        file = prepared.path(PLAN)
        raise ModelError(file, f"is no plan: {missing} is not in it; delete it and run `coserve moe plan`") from missing


def save_preparation(prepared: PreparedFiles, preparation: Preparation) -> Path:
    """Write it beside its checkpoint; returns the file."""
    tensors = {"norms": preparation.norms, "importance": preparation.importance}
    return prepared.save(PLAN, tensors, {"plans": [asdict(plan) for plan in preparation.plans]})


def with_plan(plans: Iterable[MemoryPlan], new: MemoryPlan) -> tuple[MemoryPlan, ...]:
    """The plans with another one, which replaces that of the same budget; by budget."""
    others = [plan for plan in plans if plan.budget_bytes != new.budget_bytes]
    return tuple(sorted([*others, new], key=lambda plan: plan.budget_bytes))


def plan_for(plans: Iterable[MemoryPlan], budget_bytes: int) -> MemoryPlan | None:
    """The plan made for the budget that is nearest, a smaller one where two are; None where there are none.

    Its counts say in which proportion memory is split, so that a budget between two plans has one as well.
    """
    return min(plans, key=lambda plan: (abs(plan.budget_bytes - budget_bytes), plan.budget_bytes), default=None)
