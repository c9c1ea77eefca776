"""eMoE: every p prompts a predictor names the experts of the next ones; in between nothing is loaded.

Experts are chosen by their expected tokens (§3.4). A token whose expert is absent goes to the next resident one of its
ranking (§3.2.2). Loading runs beside computing: a layer waits only for its own experts in flight (§4). The first prompt
starts with the most popular experts that the budget holds (ours; the paper loads all).
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import PositiveInt

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.gating import ForwardStep, Routing, expert_mask, mask_gate
from experts.moe.model.mode import KeepingMode, ModeOptions
from experts.moe.modes.emoe.fitting import load_predictor, load_sensitivity
from experts.moe.modes.emoe.predictor import Variant
from experts.moe.trace import shares
from experts.moe.weights.prepared import PreparedFiles

#: Past prompts whose tasks a period is expected to have; the last period's if it is longer.
_RECENT_PROMPTS = 32
#: A resident expert counts this much more, so that others must be worth their load.
_RESIDENT_BONUS = 0.25


class EmoeOptions(ModeOptions, frozen=True):
    """`period`: prompts from one choice of experts to the next (§5.7). `task_aware: false` takes all tasks as alike.

    `variant`: predict all layers at once (eMoE-A) or layer by layer (eMoE-L).
    """

    period: PositiveInt = 40
    variant: Variant = "all"
    task_aware: bool = True


@dataclass(eq=False, slots=True)
class _Prompt:
    """`tokens` of the prompt and of its answer so far."""

    request: str
    task: str | None
    tokens: int


class Emoe(KeepingMode):
    Options = EmoeOptions
    lossless = False

    def __init__(self, prepared: PreparedFiles, options: EmoeOptions) -> None:
        """Raises ModelError if a result of `coserve moe fit` is missing or of other weights."""
        super().__init__()
        self._options = options
        self._predictor, self._tasks = load_predictor(prepared)
        #: Sensitivity of each task in each layer, and averaged over tasks.
        self._weights = load_sensitivity(prepared)
        self._average = tuple(sum(row) / len(row) for row in zip(*self._weights.values(), strict=True))
        self._prompts = 0
        #: The last prompts, those that decode, and the predictor's input.
        self._recent: deque[_Prompt] = deque(maxlen=max(_RECENT_PROMPTS, options.period))
        self._decoding: list[_Prompt] = []
        self._past: deque[tuple[int, torch.Tensor]] = deque(maxlen=self._predictor.history)
        self._routed: dict[int, torch.Tensor] = {}
        self._is_loading = False

    @classmethod
    def open(cls, checkpoint: Path, options: EmoeOptions) -> "Emoe":
        return cls(PreparedFiles(checkpoint), options)

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        #: Expected tokens of each expert, (L, E), and the experts that should be in memory and that gates may choose.
        self._expected = self._predictor.prior[-1] * torch.tensor(self._average)[:, None]
        self._chosen = torch.zeros(arch.layers, arch.experts, dtype=torch.bool)
        super().attach(cache, arch)

    def begin(self, step: ForwardStep) -> None:
        super().begin(step)
        self._check_loading()
        if step.phase == "decode":
            running = {row.request for row in step.rows if row.request}
            self._decoding = [prompt for prompt in self._recent if prompt.request in running]
            for prompt in self._decoding:
                prompt.tokens += 1
            return
        self._routed.clear()
        new = [_Prompt(row.request, row.task, row.tokens) for row in step.rows]
        first, self._prompts = self._prompts, self._prompts + len(new)
        if first and any(number % self._options.period == 0 for number in range(first, self._prompts)):
            self._choose_again(new)
        self._recent.extend(new)

    def route(self, routing: Routing) -> Routing:
        if self.step.phase == "prefill":
            self._routed[routing.layer] = routing.index
        return mask_gate(routing, self._allowed[routing.layer], renormalise=self.arch.renormalise)

    def end(self, step: ForwardStep) -> None:
        if step.phase == "decode" or len(self._routed) < self.arch.layers:
            return
        rows = [self._routed[layer].cpu().split([row.tokens for row in step.rows]) for layer in range(self.arch.layers)]
        for row, index in zip(step.rows, zip(*rows, strict=True), strict=True):
            self._past.append((self._task_number(row.task), shares(index, self.arch.experts)))
        self._routed.clear()

    def _choose_again(self, new: list[_Prompt]) -> None:
        """Predict the next period, and begin to load the missing experts of its choice."""
        tokens = self._expected_tokens(new)
        numbers = [self._task_number(task) for task in tokens]
        predicted = self._predictor.predict(list(self._past), numbers, self._options.variant)
        weights = self._weights if self._options.task_aware else {}
        sensitivity = torch.tensor([weights.get(task, self._average) for task in tokens])
        self._expected = torch.einsum("t,tl,tle->le", torch.tensor([*tokens.values()]), sensitivity, predicted.cpu())
        self.choose(int(self._chosen.sum()))
        self.cache.prefetch(self.kept())

    def _expected_tokens(self, new: list[_Prompt]) -> dict[str | None, float]:
        """Return the tokens of each task: of running and new prompts, and of the period's rest as its past suggests."""
        if not self._options.task_aware:
            return dict.fromkeys(self._tasks, 1.0)
        rest = max(0, self._options.period - len(new)) / max(1, len(self._recent))
        tokens: dict[str | None, float] = {}
        for prompts, times in ((self._decoding, 1.0), (new, 1.0), (self._recent, rest)):
            for prompt in prompts if times else ():
                tokens[prompt.task] = tokens.get(prompt.task, 0.0) + times * prompt.tokens
        return tokens

    def choose(self, slots: int) -> None:
        """Choose the experts with the most expected tokens, of each layer a token's before all others (§3.4)."""
        worth = self._expected * (1.0 + _RESIDENT_BONUS * self._chosen)
        best = worth.topk(self.arch.top_k, dim=1)
        worth = worth.scatter(1, best.indices, best.values + worth.max() + 1.0)
        self._chosen = torch.zeros_like(self._chosen)
        self._chosen.view(-1)[worth.flatten().topk(slots).indices] = True
        self.keep((layer, expert) for layer, expert in self._chosen.nonzero().tolist())
        self._allowed, self._is_loading = self._chosen, True

    def _check_loading(self) -> None:
        """Allow only the experts that could be loaded, once loading has ended."""
        if self._is_loading and not self.cache.pending():
            self._is_loading = False
            rows = [expert_mask(self.cache.resident(layer), self.arch.experts) for layer in range(self.arch.layers)]
            self._allowed = torch.stack(rows)

    def _task_number(self, task: str | None) -> int:
        return self._tasks.index(task) if task in self._tasks else len(self._tasks)
