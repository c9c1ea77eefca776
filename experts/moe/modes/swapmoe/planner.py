"""SwapMoE's planner (§3.4, §3.5): memory for layers and the frequency of updates, from measurements of this model.

Random configurations are measured as they would serve; a two-layer network learns what they lose; a genetic search
finds the configuration that should lose least within memory and bandwidth.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from experts.moe.policy.genetic import Configuration, SearchSettings, SearchSpace, search

#: Holds the loss model's weights down: it has more of them than there are measurements.
_DECAY = 1e-3


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """One configuration as it served the profiling text."""

    counts: Configuration
    period: int
    #: Nats per token: the logarithm of perplexity.
    loss: float
    #: Experts loaded for each step.
    loads: float


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a configuration may take: slots in all, and milliseconds of transfers in each step's milliseconds."""

    slots: int
    load_ms: float
    step_ms: float

    @property
    def loads(self) -> float:
        """Experts that can be loaded in the time of a step, so that updates keep up with their plan."""
        return self.step_ms / self.load_ms if self.load_ms > 0 else float("inf")


class LossModel:
    """From the virtual experts of each layer to the loss: two linear layers (§3.4.2), fitted to least squares.

    Each layer's number enters as the logarithm of its share of the layer's experts: the first experts of a layer are
    worth most, and in logarithms the error on configurations left out was a third lower.
    """

    def __init__(self, measured: Sequence[MeasuredPlan], experts: int, *, width: int = 8, steps: int = 100) -> None:
        """Raises ValueError with fewer than two measurements."""
        if len(measured) < 2:
            raise ValueError("a loss model needs two measured configurations at least")
        self._experts = experts
        losses = torch.tensor([one.loss for one in measured], dtype=torch.float32)
        self._mean, self._scale = losses.mean(), losses.std().clamp_min(1e-6)
        inputs = self._inputs([one.counts for one in measured])
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
        """Nats per token of each configuration."""
        predicted = self._network(self._inputs(counts)).squeeze(-1)
        return (predicted * self._scale + self._mean).tolist()

    def _inputs(self, counts: Sequence[Configuration]) -> torch.Tensor:
        return (torch.tensor(counts, dtype=torch.float32) / self._experts).log()


def random_counts(
    layers: int, experts: int, floor: int, slots: int, number: int, seed: int = 0
) -> tuple[Configuration, ...]:
    """Configurations to measure for a budget of `slots`: an even one first, then random ones around it.

    Every other one uses the whole budget, as plans do; the others from seven tenths of it, for a model fitted to one
    sum alone could not say what one more expert is worth. None takes more memory than the budget.
    """
    rng = random.Random(seed)
    space = SearchSpace((floor,) * layers, (experts,) * layers, max(slots, layers * floor))
    drawn = [even_counts(layers, experts, slots)]
    for turn in range(50 * number):
        total = slots if turn % 2 else round(slots * (0.7 + 0.3 * rng.random()))
        one = space.draw(max(layers * floor, total), rng)
        if one not in drawn:
            drawn.append(one)
        if len(drawn) >= number:
            break
    return tuple(drawn[:number])


def even_counts(layers: int, experts: int, slots: int) -> Configuration:
    """The simple planning that the paper compares with (§5.5): the same for each layer, what is left to the first."""
    each, left = divmod(min(slots, layers * experts), layers)
    return tuple(each + (layer < left) for layer in range(layers))


def fastest_period(measured: Sequence[MeasuredPlan], limits: PlanLimits) -> int:
    """The highest update frequency whose loads fit into the steps (§3.5.1), the lowest measured where none does.

    `measured` is one configuration at several periods.
    """
    by_period = sorted(measured, key=lambda one: one.period)
    return next((one.period for one in by_period if one.loads <= limits.loads), by_period[-1].period)


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
    """The configuration, not measured yet, that should lose least within memory and bandwidth.

    Raises ValueError where there is none.
    """
    layers = len(measured[0].counts)
    turnover = _turnover(measured, experts)
    known = dict.fromkeys(one.counts for one in measured)

    def allowed(counts: Configuration) -> bool:
        return counts not in known and turnover * _exchangeable(counts, experts) <= limits.loads

    space = SearchSpace((floor,) * layers, (experts,) * layers, limits.slots, allowed)

    def fitness(configurations: Sequence[Configuration]) -> list[float]:
        return [-loss for loss in model.predict(configurations)]

    return search(fitness, space, random.Random(0), settings=settings, progress=progress)


def _turnover(measured: Sequence[MeasuredPlan], experts: int) -> float:
    """Experts loaded per step for each that could be exchanged, on average."""
    could = sum(_exchangeable(one.counts, experts) for one in measured)
    return sum(one.loads for one in measured) / could if could else 0.0


def _exchangeable(counts: Configuration, experts: int) -> int:
    """At most so many experts change when each layer has its turn."""
    return sum(min(count, experts - count) for count in counts)
