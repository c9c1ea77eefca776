"""Measuring sensitivity: the accuracy of each task with ever more layers routed wrongly (eMoE §2.2.3)."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from experts.moe.errors import ModelError
from experts.moe.gating import Routing, StepRow
from experts.moe.model.mode import BaseMode
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes.emoe.sensitivity import PART, Shares, name_of, shares_of, tolerant_first
from experts.moe.weights.prepared import PreparedFiles


class WrongRouting(BaseMode):
    """In the layers of `wrong` every token goes to experts drawn at random, with the weights of those it wanted."""

    name = "wrong-routing"
    lossless = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.wrong: frozenset[int] = frozenset()
        self._seed = seed

    def again(self, wrong: frozenset[int]) -> None:
        """From now on these layers; the same draws each time."""
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
    say: Callable[[int, int], None] = lambda _, __: None,
) -> Shares:
    """What share of its accuracy each task keeps.

    Each layer is first routed wrongly alone; then one after the other, the most tolerant first, until all are wrong.
    (The paper goes from the input to the output, for it takes the first layers to be the most tolerant.)

    `windows`: (n, length) int64 token ids of each task, of training files. Accuracy is the share of next tokens that
    the model finds. Each pass is kept as it ends, and none is made twice. `say(done, all)` hears of the progress.
    """
    layers = runtime.arch.layers
    what = {task: list(rows.shape) for task, rows in windows.items()}
    kept = _kept(prepared, what)
    passes = 0
    for task, rows in windows.items():
        of_task = kept.setdefault(task, {})
        for number in range(2 * layers):
            wrong = _next_wrong(of_task, layers, number)
            if name_of(wrong) not in of_task:
                mode.again(frozenset(wrong))
                of_task[name_of(wrong)] = _accuracy(runtime, task, rows)
                prepared.save_json(PART, {"windows": what, "layers": layers, "accuracy": kept})
            passes += 1
            say(passes, 2 * layers * len(windows))
    return {task: shares_of(of_task, layers) for task, of_task in kept.items()}


def _next_wrong(accuracy: Mapping[str, float], layers: int, number: int) -> list[int]:
    """Layers that pass `number` routes wrongly: none, each alone, then ever more of them; those of one are known."""
    if number <= layers:
        return [number - 1] if number else []
    return tolerant_first(accuracy, layers)[: number - layers + 1]


def _kept(prepared: PreparedFiles, what: dict[str, list[int]]) -> dict[str, dict[str, float]]:
    """Passes of an earlier run over as much text."""
    try:
        found = prepared.load_json(PART)
    except ModelError:
        return {}
    return found["accuracy"] if found["windows"] == what else {}


@torch.no_grad()
def _accuracy(runtime: MoeRuntime, task: str, windows: torch.Tensor) -> float:
    right = 0
    for batch in windows.split(8):
        rows = [StepRow(f"sensitivity-{row}", task, batch.shape[1]) for row in range(len(batch))]
        ids = batch.to(runtime.model.device)
        with runtime.step(rows):
            found = runtime.model(ids, use_cache=False).logits[:, :-1].argmax(-1)
        right += int((found == ids[:, 1:]).sum())
    return right / (len(windows) * (windows.shape[1] - 1))
