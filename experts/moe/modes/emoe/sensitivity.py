"""Sensitivity of tasks to wrong routing, layer by layer (eMoE §2.2.3, §3.4): measured, saved, turned into weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from experts.moe.errors import ModelError
from experts.moe.gating import Routing, StepRow
from experts.moe.model.mode import Mode
from experts.moe.model.runtime import MoeRuntime
from experts.moe.weights.prepared import PreparedFiles

PART = "emoe/sensitivity"
#: Weight of a layer that costs no accuracy.
_MIN_WEIGHT = 0.01

#: For each task and layer: the share of its accuracy that is left if this layer and all more tolerant ones are wrong.
Shares = Mapping[str, tuple[float, ...]]


def load_shares(prepared: PreparedFiles) -> Shares:
    """Load the result of `measure`. Raises ModelError if it is missing or incomplete."""
    stored = prepared.load_json(PART)
    layers = stored["layers"]
    try:
        return {task: shares_of(accuracy, layers) for task, accuracy in stored["accuracy"].items()}
    except KeyError as error:
        raise ModelError(prepared.path(PART, ".json"), "is not complete; go on with `coserve moe fit`") from error


def sensitivity_weights(shares: Shares) -> dict[str | None, tuple[float, ...]]:
    """Return s of Eq. 2, graded (the paper: 0 or 1): the accuracy lost when each layer joins the wrong ones."""
    weights: dict[str | None, tuple[float, ...]] = {}
    for task, row in shares.items():
        losses, before = [0.0] * len(row), 1.0
        for layer in sorted(range(len(row)), key=lambda layer, row=row: -row[layer]):
            losses[layer] = max(_MIN_WEIGHT, before - row[layer])
            before = row[layer]
        weights[task] = tuple(losses)
    return weights


def shares_of(accuracy: Mapping[str, float], layers: int) -> tuple[float, ...]:
    """Return for each layer the share of accuracy left if it and all more tolerant layers are wrong."""
    order = _tolerant_first(accuracy, layers)
    full, lowest, shares = max(accuracy[""], 1e-9), 1.0, [0.0] * layers
    for count, layer in enumerate(order, 1):
        lowest = min(lowest, accuracy[_name(order[:count])] / full)
        shares[layer] = lowest
    return tuple(shares)


class WrongRouting(Mode):
    """Sends every token in the layers of `wrong` to random experts, with the weights of the chosen ones."""

    lossless = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.wrong: frozenset[int] = frozenset()
        self._seed = seed

    def restart(self, wrong: frozenset[int]) -> None:
        """Route these layers wrongly from now on, with the same draws each time."""
        self.wrong = wrong
        self._generator = torch.Generator().manual_seed(self._seed)

    def route(self, routing: Routing) -> Routing:
        if routing.layer not in self.wrong:
            return routing
        tokens, experts = routing.logits.shape
        drawn = torch.rand(tokens, experts, generator=self._generator).topk(routing.index.shape[1]).indices
        drawn = drawn.to(routing.index.device)
        return replace(routing, index=torch.where(routing.index < experts, drawn, routing.index))


def measure(
    runtime: MoeRuntime,
    mode: WrongRouting,
    windows: Mapping[str, torch.Tensor],
    prepared: PreparedFiles,
    report: Callable[[int, int], None] = lambda _, __: None,
) -> Shares:
    """Measure the share of its accuracy that each task keeps under wrong routing.

    Each layer is first routed wrongly alone; then one more after the other, the most tolerant first, until all are
    wrong. (The paper goes from input to output, because it takes the first layers to be the most tolerant.)

    `windows`: (n, length) int64 token ids of each task, of training files. Accuracy is the share of next tokens that
    the model finds. Each pass is saved as it ends, and none is repeated. `report` gets passes done and passes in all.
    """
    layers = runtime.arch.layers
    shapes = {task: list(rows.shape) for task, rows in windows.items()}
    accuracy = _saved_accuracy(prepared, shapes)
    passes = 0
    for task, rows in windows.items():
        of_task = accuracy.setdefault(task, {})
        for number in range(2 * layers):
            wrong = _wrong_layers(of_task, layers, number)
            if _name(wrong) not in of_task:
                mode.restart(frozenset(wrong))
                of_task[_name(wrong)] = _accuracy(runtime, task, rows)
                prepared.save_json(PART, {"windows": shapes, "layers": layers, "accuracy": accuracy})
            passes += 1
            report(passes, 2 * layers * len(windows))
    return {task: shares_of(of_task, layers) for task, of_task in accuracy.items()}


def _name(wrong: Sequence[int]) -> str:
    return " ".join(map(str, sorted(wrong)))


def _tolerant_first(accuracy: Mapping[str, float], layers: int) -> list[int]:
    return sorted(range(layers), key=lambda layer: (-accuracy[_name([layer])], layer))


def _wrong_layers(accuracy: Mapping[str, float], layers: int, number: int) -> list[int]:
    """Return the layers that pass `number` routes wrongly: none, then each alone, then two and more of them."""
    if number <= layers:
        return [number - 1] if number else []
    return _tolerant_first(accuracy, layers)[: number - layers + 1]


def _saved_accuracy(prepared: PreparedFiles, shapes: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    try:
        stored = prepared.load_json(PART)
    except ModelError:
        return {}
    return stored["accuracy"] if stored["windows"] == shapes else {}


@torch.no_grad()
def _accuracy(runtime: MoeRuntime, task: str, windows: torch.Tensor) -> float:
    right = 0
    for batch in windows.split(8):
        rows = [StepRow(f"sensitivity-{row}", task, batch.shape[1]) for row in range(len(batch))]
        ids = batch.to(runtime.model.device)
        with runtime.step(rows):
            best = runtime.model(ids, use_cache=False).logits[:, :-1].argmax(-1)
        right += int((best == ids[:, 1:]).sum())
    return right / (len(windows) * (windows.shape[1] - 1))
