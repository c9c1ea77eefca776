"""What the simulated clock of tools/moe/load.py needs to know of a real model: its costs, and the experts it loads."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from experts.moe.policy.expected import Frequencies, choose, expected_tokens, to_load
from experts.moe.policy.schedule import Generation, StepCosts, TaskProfiles
from tools.moe.load import Effort, Step

if TYPE_CHECKING:
    from experts.moe.model.runtime import MoeRuntime

_ROWS = (1, 2, 4, 8)
_TOKENS = (32, 64, 128, 256)


def measure_costs(runtime: "MoeRuntime", *, repeats: int = 5) -> StepCosts:
    """Seconds of prefills by length and of decode steps by rows, as least squares without negative costs."""
    from scipy.optimize import nnls

    ids = {length: _prefill_s(runtime, length, repeats) for length in _TOKENS}
    rows = {count: _decode_s(runtime, count, repeats) for count in _ROWS}
    table = [[length, 1, 0] for length in ids] + [[0, 1, count] for count in rows]
    found, _ = nnls(np.array(table, dtype=float), np.array([*ids.values(), *rows.values()]))
    return StepCosts(*(float(each) for each in found))


class TaskLoading:
    """eMoE's experts on the simulated clock: chosen anew every `period` prompts, by the policies that the mode uses.

    `frequencies` and `weights` are by task; `slots` experts fit, `least` of each layer. `Work` of tools/moe/load.py.
    """

    def __init__(
        self,
        frequencies: Mapping[str | None, Frequencies],
        weights: Mapping[str | None, Sequence[float]],
        slots: int,
        *,
        least: int = 2,
        period: int = 1,
        profiles: TaskProfiles | None = None,
    ) -> None:
        self._frequencies = frequencies
        self._weights = weights
        self._slots = slots
        self._least = least
        self._period = period
        self._profiles = profiles or TaskProfiles()
        layers = len(next(iter(frequencies.values())))
        self._chosen: tuple[tuple[int, ...], ...] = ((),) * layers
        self._prompts = 0

    def begin(self, step: Step, now: float) -> Effort:  # noqa: ARG002
        if step.phase == "decode":
            return Effort()
        self._prompts += len(step.rows)
        if self._prompts > 1 and self._prompts % self._period:
            return Effort()
        running: list[tuple[Generation, float]] = [(one, 1.0) for one in (*step.beside, *step.rows)]
        tokens = expected_tokens(running, self._frequencies, self._weights, self._profiles)
        before = self._chosen
        self._chosen = choose(tokens, self._slots, self._least, before)
        return Effort(loads=len(to_load(self._chosen, before)))

    def end(self, step: Step, latencies_s: Sequence[float], now: float) -> None:
        """Nothing to learn."""


def _prefill_s(runtime: "MoeRuntime", length: int, repeats: int) -> float:
    import torch

    ids = torch.randint(3, runtime.model.config.vocab_size, (1, length))
    return _median_s(lambda: runtime.model(ids, logits_to_keep=1), repeats)


def _decode_s(runtime: "MoeRuntime", rows: int, repeats: int) -> float:
    import torch

    ids = torch.randint(3, runtime.model.config.vocab_size, (rows, 32))
    with torch.inference_mode():
        past = runtime.model(ids, use_cache=True, logits_to_keep=1).past_key_values
    return _median_s(lambda: runtime.model(ids[:, :1], past_key_values=past, use_cache=True), repeats)


def _median_s(run: Callable[[], object], repeats: int) -> float:
    import torch

    spent: list[float] = []
    with torch.inference_mode():
        run()
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            spent.append(time.perf_counter() - began)
    return statistics.median(spent)
