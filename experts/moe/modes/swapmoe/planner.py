"""SwapMoE's planner (§3.4, §3.5): memory for layers and the frequency of updates, from measurements of this model.

Random configurations are measured in serving; a two-layer network learns their losses; a genetic search finds the
lowest expected loss within memory and bandwidth. Plans are stored with the norms and importance of the experts.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from experts.moe.errors import ModelError
from experts.moe.policy.eviction import split_evenly
from experts.moe.policy.genetic import Configuration, SearchSettings, SearchSpace, search
from experts.moe.weights.prepared import PreparedFiles

PLAN = "plan"
#: Weight decay of the loss model, which has more weights than there are measurements.
_DECAY = 1e-3


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
    tensors, notes = prepared.load(PLAN)
    try:
        plans = [MemoryPlan(plan["budget_bytes"], tuple(plan["counts"]), plan["period"]) for plan in notes["plans"]]
        return Preparation(tensors["norms"], tensors["importance"], tuple(plans))
    except KeyError as missing:
        message = f"is not a plan: it lacks {missing}; delete it and run `coserve moe plan`"
        raise ModelError(prepared.path(PLAN), message) from missing


def save_preparation(prepared: PreparedFiles, preparation: Preparation) -> Path:
    """Write norms, importance and plans beside the checkpoint; return the file."""
    tensors = {"norms": preparation.norms, "importance": preparation.importance}
    return prepared.save(PLAN, tensors, {"plans": [asdict(plan) for plan in preparation.plans]})


def with_plan(plans: Iterable[MemoryPlan], new: MemoryPlan) -> tuple[MemoryPlan, ...]:
    """Return the plans, ordered by budget, with the new one in place of that of the same budget."""
    others = [plan for plan in plans if plan.budget_bytes != new.budget_bytes]
    return tuple(sorted([*others, new], key=lambda plan: plan.budget_bytes))


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


@dataclass(frozen=True, slots=True)
class PlanLimits:
    slots: int
    load_ms: float
    step_ms: float

    @property
    def loads(self) -> float:
        """Experts that can be loaded in the time of a step."""
        return self.step_ms / self.load_ms if self.load_ms > 0 else float("inf")


class LossModel:
    """Two linear layers from the virtual experts of each layer to the loss (§3.4.2), fitted by least squares.

    Each layer's number enters as the logarithm of its share of the layer's experts: the first experts of a layer are
    worth most, and logarithms cut the error on unseen configurations by a third. Raises ValueError with fewer than two
    measurements.
    """

    def __init__(self, measured: Sequence[MeasuredPlan], experts: int, *, width: int = 8, steps: int = 100) -> None:
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
            self._network = nn.Sequential(nn.Linear(inputs.shape[1], width), nn.Tanh(), nn.Linear(width, 1))
        optimiser = torch.optim.LBFGS(
            self._network.parameters(), max_iter=steps, tolerance_change=1e-9, line_search_fn="strong_wolfe"
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


def random_counts(
    layers: int, experts: int, floor: int, slots: int, number: int, seed: int = 0
) -> tuple[Configuration, ...]:
    """Draw configurations to measure for a budget of `slots`: the even one first, then random ones within it.

    Every other one uses the whole budget, as plans do; the others use seven tenths of it or more, because a model
    fitted to one sum alone cannot tell the worth of one more expert.
    """
    rng = random.Random(seed)
    space = SearchSpace((floor,) * layers, (experts,) * layers, max(slots, layers * floor))
    drawn = [even_counts(layers, experts, slots)]
    for turn in range(50 * number):
        total = slots if turn % 2 else round(slots * (0.7 + 0.3 * rng.random()))
        counts = space.draw(max(layers * floor, total), rng)
        if counts not in drawn:
            drawn.append(counts)
        if len(drawn) >= number:
            break
    return tuple(drawn[:number])


def even_counts(layers: int, experts: int, slots: int) -> Configuration:
    """Return the even split that the paper compares with (§5.5)."""
    return split_evenly(min(slots, layers * experts), layers)


def fastest_period(measured: Sequence[MeasuredPlan], limits: PlanLimits) -> int:
    """Return the shortest cycle whose loads fit (§3.5.1), else the longest, of one configuration at several periods."""
    by_period = sorted(measured, key=lambda plan: plan.period)
    return next((plan.period for plan in by_period if plan.loads <= limits.loads), by_period[-1].period)


def plan_counts(
    model: LossModel,
    measured: Sequence[MeasuredPlan],
    limits: PlanLimits,
    *,
    experts: int,
    floor: int,
    settings: SearchSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> Configuration:
    """Return the unmeasured configuration of lowest predicted loss within memory and bandwidth; ValueError for none."""
    layers = len(measured[0].counts)
    turnover = _turnover(measured, experts)
    measured_counts = {plan.counts for plan in measured}

    def allowed(counts: Configuration) -> bool:
        return counts not in measured_counts and turnover * _exchangeable(counts, experts) <= limits.loads

    space = SearchSpace((floor,) * layers, (experts,) * layers, limits.slots, allowed)

    def fitness(configurations: Sequence[Configuration]) -> list[float]:
        return [-loss for loss in model.predict(configurations)]

    return search(fitness, space, random.Random(0), settings=settings, progress=progress)


def _turnover(measured: Sequence[MeasuredPlan], experts: int) -> float:
    exchangeable = sum(_exchangeable(plan.counts, experts) for plan in measured)
    return sum(plan.loads for plan in measured) / exchangeable if exchangeable else 0.0


def _exchangeable(counts: Configuration, experts: int) -> int:
    """Return how many experts can change at most when each layer has one turn."""
    return sum(min(count, experts - count) for count in counts)
