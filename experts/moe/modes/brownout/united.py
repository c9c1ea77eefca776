"""United experts: one expert of the usual size that replaces a group of them (BrownoutServe §IV.B).

Layer by layer, each is distilled from its group's answers to the tokens that chose them (activations of the training
files).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

import torch

from experts.moe.gating import ExpertKey, ExpertWeights, ForwardStep, Routing
from experts.moe.policy.brownout import groups_in_order
from experts.moe.weights.checkpoint import ExpertStore
from experts.moe.weights.prepared import PreparedFiles

WAYS = (2, 4, 8)

Activation = Callable[[torch.Tensor], torch.Tensor]
#: Hidden states (N, H) float32, experts (N, k) int64 and weights (N, k) float32 of a layer's tokens.
LayerActivations = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class UnitedExperts:
    #: For each layer (G, rows, H) and (G, H, I), with rows, H and I of `MoeArch`.
    gate_up: tuple[torch.Tensor, ...]
    down: tuple[torch.Tensor, ...]
    #: The group of each of the layer's experts.
    groups: tuple[tuple[int, ...], ...]
    #: Error as a share of the energy of the groups' answers: 0 exact, 1 as if dropped.
    missed: float

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.gate_up, *self.down))

    @property
    def device(self) -> torch.device:
        return self.down[0].device

    def weights(self, layer: int, group: int) -> ExpertWeights:
        return ExpertWeights(self.gate_up[layer][group], self.down[layer][group])

    def to(self, device: torch.device | str) -> "UnitedExperts":
        gate_up, down = (tuple(tensor.to(device) for tensor in part) for part in (self.gate_up, self.down))
        return replace(self, gate_up=gate_up, down=down)


def load_united(prepared: PreparedFiles, way: int) -> UnitedExperts:
    """Load the result of `coserve moe unite`. Raises ModelError if it is missing, broken or of other weights."""
    layers = range(prepared.load(_part(way, 0))[1]["layers"])
    parts, notes = zip(*(prepared.load(_part(way, layer)) for layer in layers), strict=True)
    gate_up, down = (tuple(part[name] for part in parts) for name in ("gate_up", "down"))
    groups = tuple(tuple(part["groups"].tolist()) for part in parts)
    return UnitedExperts(gate_up, down, groups, mean(each["missed"] for each in notes))


@dataclass(frozen=True, slots=True)
class DistillRecipe:
    """Settings of the distillation; stored with the result, and compared to tell whether to make it again."""

    #: Tokens of the training files whose activations are used.
    tokens: int = 40_960
    steps: int = 400
    batch: int = 256
    learning_rate: float = 2e-3
    seed: int = 7


class Distillation:
    """Distils the united experts of one way, and saves each layer as soon as it is done."""

    def __init__(self, prepared: PreparedFiles, store: ExpertStore, way: int, recipe: DistillRecipe) -> None:
        self.way = way
        self.groups = groups_in_order(store.arch.experts, way)
        self._prepared = prepared
        self._store = store
        self._recipe = recipe

    def missing(self) -> tuple[int, ...]:
        layers = range(self._store.arch.layers)
        return tuple(layer for layer in layers if not self._prepared.is_made(_part(self.way, layer), self._made))

    def make(self, layer: int, activations: LayerActivations, activation: Activation) -> None:
        """Distil and save a layer's united experts, with their error."""
        united: list[ExpertWeights] = []
        missed: list[float] = []
        for group in range(self.groups[-1] + 1):
            numbers = [expert for expert, its_group in enumerate(self.groups) if its_group == group]
            members = [(number, read_expert(self._store, layer, number)) for number in numbers]
            fitted = strongest_units(members, activations, activation)
            targets = distill_targets(members, activations, activation)
            if len(targets.hidden):
                fitted = fit(fitted, targets, activation, self._recipe)
                missed.append(float(_squared_error(fitted, targets, activation).sum() / _energy(targets).sum()))
            united.append(fitted)
        gate_up, down = (torch.stack(part).to(self._store.arch.dtype) for part in zip(*united, strict=True))
        tensors = {"gate_up": gate_up, "down": down, "groups": torch.tensor(self.groups, dtype=torch.int16)}
        notes = {"made": self._made, "missed": mean(missed or [0.0]), "layers": self._store.arch.layers}
        self._prepared.save(_part(self.way, layer), tensors, notes)

    @property
    def _made(self) -> dict[str, Any]:
        return asdict(self._recipe) | {"start": "strongest units"}


def read_expert(store: ExpertStore, layer: int, expert: int) -> ExpertWeights:
    """Return an expert's weights in float32, in memory of their own. Raises ModelError."""
    memory = bytearray(store.expert_bytes)
    store.read(ExpertKey(layer, expert), memoryview(memory))
    return ExpertWeights(
        *(matrix.float() for matrix in store.arch.weights(torch.frombuffer(memory, dtype=torch.uint8)))
    )


def _part(way: int, layer: int) -> str:
    return f"united-{way}/layer-{layer}"


class Activations:
    """Collects the inputs of each layer's experts for the first `tokens` of the model."""

    def __init__(self, layers: int, tokens: int) -> None:
        self.tokens = tokens
        self._held: list[list[LayerActivations]] = [[] for _ in range(layers)]

    def observe(self, _step: ForwardStep, gate: Routing, _carried: Routing) -> None:
        held = self._held[gate.layer]
        room = self.tokens - sum(len(hidden) for hidden, _, _ in held)
        if room > 0:
            hidden, weight = (part[:room].float().cpu() for part in (gate.hidden, gate.weight))
            held.append((hidden, gate.index[:room].cpu(), weight))

    def of(self, layer: int) -> LayerActivations:
        hidden, index, weight = map(torch.cat, zip(*self._held[layer], strict=True))
        return hidden, index, weight


@dataclass(frozen=True, slots=True)
class DistillTargets:
    """Targets of one united expert: its group's answers to the N tokens that chose them."""

    hidden: torch.Tensor  # (N, H) float32
    answer: torch.Tensor  # (N, H) float32
    weight: torch.Tensor  # (N,) float32, the gate's


def answer(weights: ExpertWeights, hidden: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return an expert's output for `hidden`, both (N, H)."""
    return torch.nn.functional.linear(_inner(weights, hidden, activation), weights.down)


def distill_targets(
    members: Sequence[tuple[int, ExpertWeights]], activations: LayerActivations, activation: Activation
) -> DistillTargets:
    hidden, index, weight = activations
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for expert, weights in members:
        token, place = torch.where(index == expert)
        inputs = hidden[token]
        parts.append((inputs, answer(weights, inputs, activation), weight[token, place]))
    return DistillTargets(*(torch.cat(column) for column in zip(*parts, strict=True)))


def strongest_units(
    members: Sequence[tuple[int, ExpertWeights]], activations: LayerActivations, activation: Activation
) -> ExpertWeights:
    """Return the start of a fit: the units that add most energy to a group's outputs, as many as one expert has."""
    hidden, index, weight = activations
    energies, incoming, outgoing = [], [], []
    for expert, weights in members:
        token, place = torch.where(index == expert)
        inner = _inner(weights, hidden[token], activation) * weight[token, place, None]
        energies.append(inner.square().sum(0) * weights.down.square().sum(0))
        incoming.append(weights.gate_up.view(-1, weights.down.shape[1], hidden.shape[1]))
        outgoing.append(weights.down)
    units = outgoing[0].shape[1]
    best = torch.cat(energies).topk(units).indices.sort().values
    gate_up = torch.cat(incoming, dim=1)[:, best].reshape(-1, hidden.shape[1])
    return ExpertWeights(gate_up, torch.cat(outgoing, dim=1)[:, best].contiguous())


def fit(start: ExpertWeights, targets: DistillTargets, activation: Activation, recipe: DistillRecipe) -> ExpertWeights:
    """Fit by gradient descent on the squared error of the answers, weighted by the square of the gate's weight."""
    generator = torch.Generator().manual_seed(recipe.seed)
    student = ExpertWeights(*(matrix.clone().requires_grad_() for matrix in start))
    optimiser = torch.optim.Adam(list(student), lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, recipe.steps)
    scale = _energy(targets).mean()
    with torch.enable_grad():
        for _ in range(recipe.steps):
            rows = torch.randint(len(targets.hidden), (recipe.batch,), generator=generator)
            batch = DistillTargets(targets.hidden[rows], targets.answer[rows], targets.weight[rows])
            loss = _squared_error(student, batch, activation).mean() / scale
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    return ExpertWeights(*(matrix.detach() for matrix in student))


def _energy(targets: DistillTargets) -> torch.Tensor:
    """Return the energy of each token's weighted answer, (N,)."""
    return (targets.answer * targets.weight[:, None]).square().sum(-1)


def _squared_error(weights: ExpertWeights, targets: DistillTargets, activation: Activation) -> torch.Tensor:
    missed = answer(weights, targets.hidden, activation) - targets.answer
    return (missed * targets.weight[:, None]).square().sum(-1)


def _inner(weights: ExpertWeights, hidden: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the (N, I) activations of an expert's inner units."""
    gate, up = torch.nn.functional.linear(hidden, weights.gate_up).chunk(2, dim=-1)
    return activation(gate) * up
