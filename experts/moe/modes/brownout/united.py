"""United experts: one expert of the usual size that stands in for a group of them (BrownoutServe §IV.B).

Each is distilled on its own from what its group's experts answer to the tokens that chose them (activations of the
training files), layer by layer. The peer, which nothing is fitted for, is the mean of the group's weights.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from experts.moe.gating import ExpertKey, ExpertWeights, ForwardStep, Routing
from experts.moe.policy.brownout import in_order
from experts.moe.weights.expert_store import ExpertStore
from experts.moe.weights.prepared import PreparedFiles

WAYS = (2, 4, 8)

Activation = Callable[[torch.Tensor], torch.Tensor]
#: (N, H) float32, (N, k) int64 and (N, k) float32: hidden states, experts, weights of a layer's tokens.
LayerActivations = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class UnitedExperts:
    """The united experts of a model, one for each group of each layer; on the device that computes."""

    way: int
    #: Of each layer: (G, rows, H) and (G, H, I), rows and H and I as the experts of `MoeArch` have them.
    gate_up: tuple[torch.Tensor, ...]
    down: tuple[torch.Tensor, ...]
    #: The group of each of the layer's experts.
    groups: tuple[tuple[int, ...], ...]

    @property
    def weights_bytes(self) -> int:
        return sum(each.nbytes for each in (*self.gate_up, *self.down))

    @property
    def device(self) -> torch.device:
        return self.down[0].device

    def weights(self, layer: int, group: int) -> ExpertWeights:
        return ExpertWeights(self.gate_up[layer][group], self.down[layer][group])

    def to(self, device: torch.device | str) -> "UnitedExperts":
        """The same where the experts are computed."""
        gate_up = tuple(each.to(device) for each in self.gate_up)
        return UnitedExperts(self.way, gate_up, tuple(each.to(device) for each in self.down), self.groups)


def load_united(prepared: PreparedFiles, way: int) -> UnitedExperts:
    """What `coserve moe unite` made. Raises ModelError where it is missing, broken or of other weights."""
    tensors, _ = prepared.load(_part(way))
    layers = range(len(tensors["groups"]))
    return UnitedExperts(
        way,
        tuple(tensors[f"{layer}.gate_up"] for layer in layers),
        tuple(tensors[f"{layer}.down"] for layer in layers),
        tuple(tuple(groups) for groups in tensors["groups"].tolist()),
    )


@dataclass(frozen=True, slots=True)
class DistillRecipe:
    """How united experts are fitted; kept beside them, and compared."""

    #: Tokens of the training files whose activations are learned from.
    tokens: int = 40_960
    steps: int = 400
    batch: int = 256
    learning_rate: float = 2e-3
    seed: int = 7


class Distillation:
    """Distils the united experts of one way, a layer at a time; each is kept as soon as it is done."""

    def __init__(self, prepared: PreparedFiles, store: ExpertStore, way: int, recipe: DistillRecipe) -> None:
        self.way = way
        self.groups = in_order(store.arch.experts, way)
        self._prepared = prepared
        self._store = store
        self._recipe = recipe

    def is_done(self) -> bool:
        """Whether all of it is there, made in this way."""
        return self._is_made(_part(self.way))

    def missing(self) -> tuple[int, ...]:
        """Layers that are still to be made."""
        return tuple(each for each in range(self._store.arch.layers) if not self._is_made(_part(self.way, each)))

    def make(self, layer: int, asked: LayerActivations, activation: Activation) -> None:
        """Distil the united experts of a layer and keep them, with what they miss and what averaged ones miss."""
        made: list[ExpertWeights] = []
        missed: list[tuple[float, float]] = []
        for group in range(self.groups[-1] + 1):
            members = [(each, read_expert(self._store, layer, each)) for each in self._members(group)]
            taught = distill_targets(members, asked, activation)
            mean = averaged(weights for _, weights in members)
            fitted = mean
            if len(taught.hidden):
                fitted = fit_down(chosen_units(members, asked, activation), taught, activation)
                fitted = fit(fitted, taught, activation, self._recipe)
                missed.append((missed_share(fitted, taught, activation), missed_share(mean, taught, activation)))
            made.append(fitted)
        shares = torch.tensor(missed).mean(0).tolist() if missed else [0.0, 0.0]
        self._prepared.save(_part(self.way, layer), self._tensors(layer, made), {"made": self._made, "missed": shares})

    def finish(self) -> tuple[float, float]:
        """Put the layers together; the share that united experts miss of the answers, and that averaged ones would."""
        layers = range(self._store.arch.layers)
        parts = [self._prepared.load(_part(self.way, layer)) for layer in layers]
        tensors = {name: tensor for part, _ in parts for name, tensor in part.items()}
        tensors["groups"] = torch.tensor([self.groups] * len(parts), dtype=torch.int16)
        missed = torch.tensor([notes["missed"] for _, notes in parts]).mean(0).tolist()
        self._prepared.save(_part(self.way), tensors, {"made": self._made, "missed": missed})
        for layer in layers:
            self._prepared.path(_part(self.way, layer)).unlink()
        self._prepared.path(_part(self.way, 0)).parent.rmdir()
        return missed[0], missed[1]

    @property
    def _made(self) -> dict[str, Any]:
        return asdict(self._recipe)

    def _is_made(self, name: str) -> bool:
        return self._prepared.has(name) and self._prepared.load(name)[1].get("made") == self._made

    def _members(self, group: int) -> list[int]:
        return [expert for expert, its in enumerate(self.groups) if its == group]

    def _tensors(self, layer: int, made: Sequence[ExpertWeights]) -> dict[str, torch.Tensor]:
        gate_up, down = (torch.stack(each).to(self._store.arch.dtype) for each in zip(*made, strict=True))
        return {f"{layer}.gate_up": gate_up, f"{layer}.down": down}


def read_expert(store: ExpertStore, layer: int, expert: int) -> ExpertWeights:
    """Weights in float32, in memory of their own. Raises ModelError."""
    memory = bytearray(store.expert_bytes)
    store.read(ExpertKey(layer, expert), memoryview(memory))
    return ExpertWeights(*(each.float() for each in store.weights(torch.frombuffer(memory, dtype=torch.uint8))))


def _part(way: int, layer: int | None = None) -> str:
    return f"united-{way}" if layer is None else f"united-{way}/layer-{layer}"


class Activations:
    """What each layer's experts were asked, kept while tokens of the training files run through the model."""

    def __init__(self, layers: int, tokens: int) -> None:
        """Of each layer the first `tokens` that come."""
        self.tokens = tokens
        self._held = [0] * layers
        self._hidden: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._index: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._weight: list[list[torch.Tensor]] = [[] for _ in range(layers)]

    def observe(self, _step: ForwardStep, gate: Routing, _carried: Routing) -> None:
        """An observer of `MoeRuntime`."""
        layer = gate.layer
        room = self.tokens - self._held[layer]
        if room <= 0:
            return
        hidden = gate.hidden[:room].float().cpu()
        self._held[layer] += len(hidden)
        self._hidden[layer].append(hidden)
        self._index[layer].append(gate.index[:room].cpu())
        self._weight[layer].append(gate.weight[:room].float().cpu())

    def of(self, layer: int) -> LayerActivations:
        return torch.cat(self._hidden[layer]), torch.cat(self._index[layer]), torch.cat(self._weight[layer])


@dataclass(frozen=True, slots=True)
class DistillTargets:
    """What one united expert is to learn: N answers of its group's experts."""

    hidden: torch.Tensor  # (N, H) float32
    answer: torch.Tensor  # (N, H) float32
    weight: torch.Tensor  # (N,) float32, the gate's


def answer(weights: ExpertWeights, hidden: torch.Tensor, activation: Activation) -> torch.Tensor:
    """(N, H): what an expert makes of `hidden`, (N, H); with a gate where gate_up has two rows for each of down's."""
    return torch.nn.functional.linear(_inner(weights, hidden, activation), weights.down)


def distill_targets(
    members: Sequence[tuple[int, ExpertWeights]],
    asked: LayerActivations,
    activation: Activation,
) -> DistillTargets:
    """What the experts of a group answered to the tokens that chose them."""
    hidden, index, weight = asked
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for expert, weights in members:
        token, place = torch.where(index == expert)
        seen = hidden[token]
        parts.append((seen, answer(weights, seen, activation), weight[token, place]))
    return DistillTargets(*(torch.cat(each) for each in zip(*parts, strict=True)))


def averaged(members: Iterable[ExpertWeights]) -> ExpertWeights:
    """The peer: the mean of the group's weights."""
    listed = list(members)
    gate_up = torch.stack([each.gate_up for each in listed]).mean(0)
    return ExpertWeights(gate_up, torch.stack([each.down for each in listed]).mean(0))


def chosen_units(
    members: Sequence[tuple[int, ExpertWeights]], asked: LayerActivations, activation: Activation
) -> ExpertWeights:
    """Where a fit begins: of all inner units of a group, those that answer most, as many as one expert has.

    A unit's part is the energy of what it adds to the outputs, over the tokens that chose its expert.
    """
    hidden, index, weight = asked
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


def fit_down(
    start: ExpertWeights, taught: DistillTargets, activation: Activation, ridge: float = 1e-3
) -> ExpertWeights:
    """The best `down` for a given gate_up: weighted least squares, in closed form."""
    inner = _inner(start, taught.hidden, activation) * taught.weight[:, None]
    target = taught.answer * taught.weight[:, None]
    gram = inner.T @ inner
    gram += ridge * gram.diagonal().mean().clamp(min=1e-12) * torch.eye(len(gram))
    return ExpertWeights(start.gate_up, torch.linalg.solve(gram, inner.T @ target).T.contiguous())


def fit(start: ExpertWeights, taught: DistillTargets, activation: Activation, recipe: DistillRecipe) -> ExpertWeights:
    """Gradient descent on the squared error of the answers, each weighted by the square of its gate's weight."""
    generator = torch.Generator().manual_seed(recipe.seed)
    student = ExpertWeights(*(each.clone().requires_grad_() for each in start))
    optimiser = torch.optim.Adam(list(student), lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, recipe.steps)
    scale = energy(taught) / len(taught.hidden)
    with torch.enable_grad():
        for _ in range(recipe.steps):
            chosen = torch.randint(len(taught.hidden), (recipe.batch,), generator=generator)
            missed = answer(student, taught.hidden[chosen], activation) - taught.answer[chosen]
            loss = (missed * taught.weight[chosen, None]).square().sum(-1).mean() / scale
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()
    return ExpertWeights(*(each.detach() for each in student))


def energy(taught: DistillTargets) -> torch.Tensor:
    """Of the weighted answers, summed over tokens."""
    return (taught.answer * taught.weight[:, None]).square().sum()


def missed_share(weights: ExpertWeights, taught: DistillTargets, activation: Activation) -> float:
    """What a united expert misses of its group's answers, as a share of their energy: 0 exact, 1 as if dropped."""
    missed = (answer(weights, taught.hidden, activation) - taught.answer) * taught.weight[:, None]
    return float(missed.square().sum() / energy(taught))


def _inner(weights: ExpertWeights, hidden: torch.Tensor, activation: Activation) -> torch.Tensor:
    """(N, I): what an expert's inner units say."""
    inner = torch.nn.functional.linear(hidden, weights.gate_up)
    if weights.gate_up.shape[0] == weights.down.shape[1]:
        return activation(inner)
    gate, up = inner.chunk(2, dim=-1)
    return activation(gate) * up
