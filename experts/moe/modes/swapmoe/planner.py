"""SwapMoE's planner (§3.4, §3.5): memory for layers and the frequency of updates, from measurements of this model.

Random configurations are measured in serving; a two-layer network learns their losses; a descent from the best of them
finds the lowest expected loss within memory (the paper searches genetically). Plans are stored with the norms and
importance of the experts.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch import nn

from experts.moe.policy.eviction import split_evenly
from experts.moe.weights.prepared import PreparedFiles

PLAN = "plan"
#: Virtual experts of each layer.
Configuration = tuple[int, ...]
#: Measured configurations, the best ones, from which a search descends.
_STARTS = 5
#: Width and weight decay of the loss model, which has more weights than there are measurements.
_WIDTH, _DECAY = 8, 1e-3


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Virtual experts of each layer and steps of an update cycle, for one budget (SwapMoE Eq. 3)."""

    budget_bytes: int
    counts: tuple[int, ...]
    period: int


@dataclass(frozen=True, slots=True)
class Preparation:
    """Facts before the first token: `norms` ‖Eᵢ‖ and `importance` (Eq. 2 over training text), (L, E) float32."""

    norms: torch.Tensor
    importance: torch.Tensor
    plans: tuple[MemoryPlan, ...] = ()


def load_preparation(checkpoint: Path) -> Preparation | None:
    """Load the result of `coserve moe plan`, None if it has not run. Raises ModelError if it is of other weights."""
    prepared = PreparedFiles(checkpoint)
    if not prepared.path(PLAN).exists():
        return None
    with prepared.reading(PLAN) as (tensors, notes):
        plans = [MemoryPlan(plan["budget_bytes"], tuple(plan["counts"]), plan["period"]) for plan in notes["plans"]]
        return Preparation(tensors["norms"], tensors["importance"], tuple(plans))


def save_preparation(prepared: PreparedFiles, preparation: Preparation) -> Path:
    """Write norms, importance and plans beside the checkpoint; return the file."""
    tensors = {"norms": preparation.norms, "importance": preparation.importance}
    return prepared.save(PLAN, tensors, {"plans": [asdict(plan) for plan in preparation.plans]})


def plan_for(plans: Iterable[MemoryPlan], budget_bytes: int) -> MemoryPlan | None:
    """Return the plan of the nearest budget, the smaller of two, for its proportions; None without plans."""
    return min(plans, key=lambda plan: (abs(plan.budget_bytes - budget_bytes), plan.budget_bytes), default=None)


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    counts: Configuration
    period: int
    #: Nats per token: the logarithm of perplexity.
    loss: float
    #: Experts loaded for each step.
    loads: float


class LossModel:
    """Two linear layers from the virtual experts of each layer to the loss (§3.4.2), fitted by least squares.

    Each layer's number enters as the logarithm of its share of the layer's experts: the first experts of a layer are
    worth most, and logarithms cut the error on unseen configurations by a third. Raises ValueError with fewer than two
    measurements.
    """

    def __init__(self, measured: Sequence[MeasuredPlan], experts: int) -> None:
        if len(measured) < 2:
            raise ValueError("a loss model needs at least two measured configurations")
        self._experts = experts
        losses = torch.tensor([plan.loss for plan in measured], dtype=torch.float32)
        self._mean, self._scale = losses.mean(), losses.std().clamp_min(1e-6)
        inputs = self._inputs([plan.counts for plan in measured])
        targets = (losses - self._mean) / self._scale
        # The caller's random numbers stay as they were.
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            self._network = nn.Sequential(nn.Linear(inputs.shape[1], _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1))
        optimiser = torch.optim.LBFGS(
            self._network.parameters(), max_iter=100, tolerance_change=1e-9, line_search_fn="strong_wolfe"
        )

        def residual() -> torch.Tensor:
            optimiser.zero_grad()
            weights = sum(parameter.square().sum() for parameter in self._network.parameters())
            squares = (self._network(inputs).squeeze(-1) - targets).square().mean() + _DECAY * weights
            squares.backward()
            return squares

        optimiser.step(residual)
        self._network.requires_grad_(requires_grad=False)

    def predict(self, counts: Sequence[Configuration]) -> list[float]:
        """Predict the nats per token of each configuration."""
        predicted = self._network(self._inputs(counts)).squeeze(-1)
        return (predicted * self._scale + self._mean).tolist()

    def _inputs(self, counts: Sequence[Configuration]) -> torch.Tensor:
        return (torch.tensor(counts, dtype=torch.float32) / self._experts).log()


def random_counts(layers: int, experts: int, floor: int, slots: int, number: int) -> tuple[Configuration, ...]:
    """Draw configurations to measure for a budget of `slots`: the paper's even split (§5.5), then random ones in it.

    Every other one uses the whole budget, as plans do; the others use seven tenths of it or more, because a model
    fitted to one sum alone cannot tell the worth of one more expert.
    """
    rng = random.Random(0)
    drawn = [split_evenly(slots, layers)]
    for turn in range(50 * number):
        total = slots if turn % 2 else round(slots * (0.7 + 0.3 * rng.random()))
        counts = [floor] * layers
        # Random weights, so that lopsided configurations are as likely as even ones.
        weights = [rng.random() for _ in counts]
        for _ in range(total - sum(counts)):
            below = [layer for layer, count in enumerate(counts) if count < experts]
            counts[rng.choices(below, [weights[layer] for layer in below])[0]] += 1
        if tuple(counts) not in drawn:
            drawn.append(tuple(counts))
        if len(drawn) >= number:
            break
    return tuple(drawn[:number])


def plan_counts(
    model: LossModel, measured: Sequence[MeasuredPlan], slots: int, *, experts: int, floor: int
) -> Configuration:
    """Return the unmeasured configuration of lowest predicted loss within memory; ValueError for none."""

    def fits(counts: Configuration) -> bool:
        return sum(counts) <= slots

    losses: dict[Configuration, float] = {}
    for start in sorted(measured, key=lambda plan: (not fits(plan.counts), plan.loss))[:_STARTS]:
        at, lowest = start.counts, float("inf")
        while near := list(filter(fits, _neighbours(at, floor, experts))):
            losses |= zip(near, model.predict(near), strict=True)
            at = min(near, key=lambda counts: (losses[counts], counts))
            if losses[at] >= lowest:
                break
            lowest = losses[at]
    if not (unmeasured := losses.keys() - {plan.counts for plan in measured}):
        raise ValueError("every configuration within memory is measured")
    return min(unmeasured, key=lambda counts: (losses[counts], counts))


def _neighbours(counts: Configuration, floor: int, experts: int) -> Iterator[Configuration]:
    """Yield configurations in which one layer has an expert more, or one less, or has given one to another layer."""
    more = [layer for layer, count in enumerate(counts) if count < experts]
    less = [layer for layer, count in enumerate(counts) if count > floor]
    for gains, loses in (*((layer, None) for layer in more), *product((None, *more), less)):
        if gains != loses:
            yield tuple(count + (layer == gains) - (layer == loses) for layer, count in enumerate(counts))
