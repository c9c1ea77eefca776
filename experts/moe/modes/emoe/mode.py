"""eMoE: every p prompts a predictor names the experts of the next ones; in between nothing is loaded.

Experts are chosen by their expected tokens (§3.4, experts/moe/policy/expected.py). A token whose expert is absent goes
to the next resident one of its ranking (§3.2.2). Loading runs beside computing: a layer waits only for its own experts
in flight (§4). The first prompt starts with the most popular experts that the budget holds (ours; the paper loads all).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import PositiveInt

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.gating import ExpertKey, ForwardStep, Routing, StepRow, expert_mask, mask_gate
from experts.moe.model.mode import Mode, ModeOptions
from experts.moe.modes.emoe.fitting import load_predictor
from experts.moe.modes.emoe.predictor import ExpertPredictor, Variant
from experts.moe.modes.emoe.sensitivity import load_shares, sensitivity_weights
from experts.moe.policy.expected import ChosenExperts, Frequencies, choose, expected_tokens, to_load
from experts.moe.policy.schedule import Generation, TaskProfiles
from experts.moe.trace import shares
from experts.moe.weights.prepared import PreparedFiles

#: Past prompts whose tasks a period is expected to have; the last period's if it is longer.
_RECENT_PROMPTS = 32


@dataclass(frozen=True, slots=True)
class EmoeKnowledge:
    """Results of `coserve moe fit`: the predictor, its tasks by number, how sensitive each is in each layer."""

    predictor: ExpertPredictor
    tasks: tuple[str, ...]
    weights: Mapping[str | None, tuple[float, ...]]


def load_knowledge(prepared: PreparedFiles) -> EmoeKnowledge:
    """Raises ModelError if a result of the fit is missing or of other weights."""
    predictor, tasks = load_predictor(prepared)
    return EmoeKnowledge(predictor, tasks, sensitivity_weights(load_shares(prepared)))


class EmoeOptions(ModeOptions, frozen=True):
    """`period`: prompts from one choice of experts to the next (§5.7). `task_aware: false` chooses for all known tasks
    alike.

    `variant`: predict all layers at once (eMoE-A) or layer by layer (eMoE-L).
    """

    period: PositiveInt = 40
    variant: Variant = "all"
    task_aware: bool = True


class Emoe(Mode):
    Options = EmoeOptions
    lossless = False

    def __init__(self, knowledge: EmoeKnowledge, options: EmoeOptions) -> None:
        super().__init__()
        self._knowledge = knowledge
        self._options = options
        #: Sensitivity of each layer, averaged over tasks.
        self._average = tuple(sum(row) / len(row) for row in zip(*knowledge.weights.values(), strict=True))
        self._policy = ChosenExperts()
        #: Lengths of answers, by task.
        self.profiles = TaskProfiles()
        self._prompts = 0
        #: The last prompts, the ones that decode, and the predictor's input.
        self._recent: deque[Generation] = deque(maxlen=max(_RECENT_PROMPTS, options.period))
        self._decoding: dict[str, Generation] = {}
        self._past: deque[tuple[int, torch.Tensor]] = deque(maxlen=knowledge.predictor.history)
        self._routed: dict[int, torch.Tensor] = {}
        self._chosen: tuple[tuple[int, ...], ...] = ()
        self._expected: list[list[float]] = []
        self._allowed: list[torch.Tensor] = []
        self._is_loading = False

    @classmethod
    def open(cls, checkpoint: Path, options: EmoeOptions) -> "Emoe":
        return cls(load_knowledge(PreparedFiles(checkpoint)), options)

    def eviction_policy(self, arch: MoeArch) -> ChosenExperts:  # noqa: ARG002
        return self._policy

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        any_prompt = [(Generation("", None, 1, 0, 0.0), 1.0)]
        popular: dict[str | None, Frequencies] = {None: self._knowledge.predictor.prior[-1].tolist()}
        self._expected = expected_tokens(any_prompt, popular, {None: self._average}, self.profiles)
        self._choose(cache.budget_bytes // arch.expert_bytes)
        cache.preload(ExpertKey(layer, expert) for layer, experts in enumerate(self._chosen) for expert in experts)

    def begin(self, step: ForwardStep) -> None:
        super().begin(step)
        self._check_loading()
        if step.phase == "decode":
            self._record_lengths(step)
            return
        self._routed.clear()
        new = [_generation(row) for row in step.rows]
        first, self._prompts = self._prompts, self._prompts + len(new)
        if first and any(number % self._options.period == 0 for number in range(first, self._prompts)):
            self._choose_again(new)
        self._recent.extend(new)

    def route(self, routing: Routing) -> Routing:
        if self.step.phase == "prefill":
            self._routed[routing.layer] = routing.index
        allowed = self._allowed[routing.layer].to(routing.logits.device)
        return mask_gate(routing, allowed, renormalise=self.arch.renormalise)

    def end(self, step: ForwardStep) -> None:
        if step.phase == "decode" or len(self._routed) < self.arch.layers:
            return
        layers = [self._routed[layer].cpu() for layer in range(self.arch.layers)]
        for number, row in enumerate(step.rows):
            index = [_of_row(layer, step, number) for layer in layers]
            self._past.append((self._task_number(row.task), shares(index, self.arch.experts)))
        self._routed.clear()

    def resize(self, budget_bytes: int) -> None:
        """Evict the experts with the fewest expected tokens, or load more beside computing. Raises ModelError."""
        self.require_budget(budget_bytes, self.arch, self.cache.store.folder)
        self._choose(budget_bytes // self.arch.expert_bytes)
        self.cache.resize(budget_bytes)
        self._load(tuple(self.cache.resident(layer) for layer in range(self.arch.layers)))

    # Choosing

    def _choose_again(self, new: list[Generation]) -> None:
        """Predict the next period, and begin to load the missing experts of its choice."""
        expected = self._expected_generations(new)
        tasks = list(dict.fromkeys(generation.task for generation, _ in expected))
        numbers = [self._task_number(task) for task in tasks]
        predicted = self._knowledge.predictor.predict(list(self._past), numbers, self._options.variant)
        frequencies: dict[str | None, Frequencies] = dict(zip(tasks, predicted.tolist(), strict=True))
        weights = dict.fromkeys(tasks, self._average)
        if self._options.task_aware:
            weights |= self._knowledge.weights
        self._expected = expected_tokens(expected, frequencies, weights, self.profiles)
        before = self._chosen
        self._choose(sum(len(experts) for experts in before))
        self._load(before)

    def _expected_generations(self, new: list[Generation]) -> list[tuple[Generation, float]]:
        """Return running and new requests, and the rest of the period as its past suggests, each with its count."""
        if not self._options.task_aware:
            return [(Generation(task, task, 1, 0, 0.0), 1.0) for task in self._knowledge.tasks]
        count = max(0, self._options.period - len(new)) / max(1, len(self._recent))
        certain = [(generation, 1.0) for generation in (*self._decoding.values(), *new)]
        return certain + [(generation, count) for generation in self._recent if count]

    def _choose(self, slots: int) -> None:
        resident = self._chosen or ((),) * self.arch.layers
        self._chosen = choose(self._expected, slots, self.arch.top_k, resident)
        self._policy.choose(self._chosen)
        self._allowed = [expert_mask(experts, self.arch.experts) for experts in self._chosen]

    def _load(self, resident: tuple[tuple[int, ...], ...]) -> None:
        missing = to_load(self._chosen, resident)
        self._is_loading = bool(missing)
        self.cache.prefetch([ExpertKey(*key) for key in missing])

    def _check_loading(self) -> None:
        """Allow only the experts that could be loaded, once loading has ended."""
        if self._is_loading and not self.cache.pending():
            self._is_loading = False
            resident = [self.cache.resident(layer) for layer in range(self.arch.layers)]
            self._allowed = [expert_mask(experts, self.arch.experts) for experts in resident]

    # Requests

    def _task_number(self, task: str | None) -> int:
        tasks = self._knowledge.tasks
        return tasks.index(task) if task in tasks else len(tasks)

    def _record_lengths(self, step: ForwardStep) -> None:
        """Note which requests decode, and record the length of those that have ended: W_o of Eq. 2."""
        running = {row.request: row for row in step.rows if row.request}
        for request, generation in self._decoding.items():
            if request not in running:
                self.profiles.record_length(generation)
        prompts = {generation.request: generation for generation in self._recent}
        self._decoding = {
            request: _one_more_token(self._decoding.get(request) or prompts.get(request) or _generation(row))
            for request, row in running.items()
        }


def _generation(row: StepRow) -> Generation:
    return Generation(row.request, row.task, row.tokens, row.tokens, 0.0)


def _one_more_token(generation: Generation) -> Generation:
    return replace(generation, generated=generation.generated + 1, max_new_tokens=generation.max_new_tokens + 1)


def _of_row(index: torch.Tensor, step: ForwardStep, number: int) -> torch.Tensor:
    """Return one row's part, (t, k), of a layer's (T, k)."""
    return index.split([row.tokens for row in step.rows])[number]
