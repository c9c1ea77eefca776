"""eMoE: every p prompts a predictor says which experts the next ones want; in between nothing is loaded.

Experts are chosen by the tokens that they are expected to get (§3.4, experts/moe/policy/expected.py). A token whose
expert is absent goes to the next of its ranking that is there (§3.2.2). Loading runs beside the computing, layer by
layer: a layer waits only for those of its own that are on their way (§4). The first prompt starts with the most popular
experts that the budget holds (ours; the paper loads all).
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt

from experts.moe.arch import MoeArch
from experts.moe.cache.slots import SlotCache
from experts.moe.errors import ModelError
from experts.moe.gating import ExpertKey, ForwardStep, Routing, StepRow
from experts.moe.model.masking import mask_gate, present
from experts.moe.model.mode import BaseMode
from experts.moe.modes.emoe.fitting import load_predictor
from experts.moe.modes.emoe.predictor import ExpertPredictor, Variant, spreads
from experts.moe.modes.emoe.sensitivity import load_shares, weights
from experts.moe.modes.options import Options, read_options
from experts.moe.policy.expected import ChosenExperts, Frequencies, choose, expected_tokens, to_load
from experts.moe.policy.schedule import Generation, TaskProfiles
from experts.moe.weights.prepared import PreparedFiles

#: Prompts between two calls of the predictor in the paper (§5.7).
PERIOD = 40
#: The prompts of a period are expected to be of the tasks of the last so many, or of the last period's if it is longer.
_RECENT = 32


@dataclass(frozen=True, slots=True)
class EmoeKnowledge:
    """What `coserve moe fit` made: the predictor, the tasks it knows by number, how sensitive each is in each layer."""

    predictor: ExpertPredictor
    tasks: tuple[str, ...]
    weights: Mapping[str | None, tuple[float, ...]]


def load_knowledge(prepared: PreparedFiles) -> EmoeKnowledge:
    """Raises ModelError where a part is missing or of other weights."""
    predictor, tasks = load_predictor(prepared)
    return EmoeKnowledge(predictor, tasks, weights(load_shares(prepared)))


class _Options(Options, frozen=True):
    period: PositiveInt = PERIOD
    variant: Variant = "all"
    task_aware: bool = True


class Emoe(BaseMode):
    """`period`: prompts from one choice of experts to the next. `variant`: how the predictor is asked, all layers at
    once (eMoE-A) or layer by layer (eMoE-L). `task_aware=False` chooses for all known tasks alike.
    """

    name = "emoe"
    lossless = False

    def __init__(
        self, knowledge: EmoeKnowledge, *, period: int = PERIOD, variant: Variant = "all", task_aware: bool = True
    ) -> None:
        super().__init__()
        self._known = knowledge
        self._period = period
        self._variant: Variant = variant
        self._task_aware = task_aware
        #: How much wrong routing costs in each layer, for no task in particular.
        self._average = tuple(sum(row) / len(row) for row in zip(*knowledge.weights.values(), strict=True))
        self._residency = ChosenExperts()
        #: Lengths of answers, by task.
        self.profiles = TaskProfiles()
        self._prompts = 0
        #: The last prompts, those that decode, and what the predictor sees.
        self._recent: deque[Generation] = deque(maxlen=max(_RECENT, period))
        self._decoding: dict[str, Generation] = {}
        self._past: deque[tuple[int, torch.Tensor]] = deque(maxlen=knowledge.predictor.history)
        self._routed: dict[int, torch.Tensor] = {}
        self._chosen: tuple[tuple[int, ...], ...] = ()
        self._expected: list[list[float]] = []
        self._allowed: list[torch.Tensor] = []
        self._is_loading = False

    @classmethod
    def open(cls, checkpoint: Path, options: Mapping[str, Any]) -> "Emoe":
        """With what `coserve moe fit` made. Options: `period`, `variant`, `task_aware`. Raises ModelError."""
        chosen = read_options(_Options, "emoe", checkpoint, options)
        knowledge = load_knowledge(PreparedFiles(checkpoint))
        return cls(knowledge, period=chosen.period, variant=chosen.variant, task_aware=chosen.task_aware)

    def residency(self, arch: MoeArch) -> ChosenExperts:  # noqa: ARG002
        return self._residency

    def attach(self, cache: SlotCache, arch: MoeArch) -> None:
        super().attach(cache, arch)
        predictor = self._known.predictor
        if (predictor.layers, predictor.experts) != (arch.layers, arch.experts):
            message = (
                f"eMoE's predictor is of {predictor.layers} layers with {predictor.experts} experts, the model has"
            )
            message += f" {arch.layers} with {arch.experts}; make it again with `coserve moe fit`"
            raise ModelError(cache.store.folder, message)
        alike = [(Generation("", None, 1, 0, 0.0), 1.0)]
        popular: dict[str | None, Frequencies] = {None: predictor.prior[-1].tolist()}
        self._expected = expected_tokens(alike, popular, {None: self._average}, self.profiles)
        self._choose(self._slots(cache.budget_bytes))
        cache.fill(ExpertKey(layer, expert) for layer, experts in enumerate(self._chosen) for expert in experts)

    def begin(self, step: ForwardStep) -> None:
        super().begin(step)
        self._settle()
        if step.phase == "decode":
            self._note_lengths(step)
            return
        self._routed.clear()
        new = [_generation(row) for row in step.rows]
        first, self._prompts = self._prompts, self._prompts + len(new)
        if first and any(number % self._period == 0 for number in range(first, self._prompts)):
            self._renew(new)
        self._recent.extend(new)

    def route(self, routing: Routing) -> Routing:
        if self.step.phase == "prefill":
            self._routed[routing.layer] = routing.index
        predictions = self.cache.metrics.predictions
        predictions.predict(routing.layer, torch.tensor(self._chosen[routing.layer], device=routing.index.device))
        predictions.check(routing)
        allowed = self._allowed[routing.layer].to(routing.logits.device)
        return mask_gate(routing, allowed, renormalise=self.arch.renormalise)

    def end(self, step: ForwardStep) -> None:
        if step.phase == "decode" or len(self._routed) < self.arch.layers:
            return
        layers = [self._routed[layer].cpu() for layer in range(self.arch.layers)]
        for number, row in enumerate(step.rows):
            index = [_of_row(layer, step, number) for layer in layers]
            self._past.append((self._number(row.task), spreads(index, self.arch.experts)))
        self._routed.clear()

    def resize(self, budget_bytes: int) -> None:
        """Experts that no longer fit go, those with the fewest expected tokens; new room is filled beside computing."""
        self._choose(self._slots(budget_bytes))
        self.cache.resize(budget_bytes)
        self._load(tuple(self.cache.resident(layer) for layer in range(self.arch.layers)))

    # Choosing

    def _slots(self, budget_bytes: int) -> int:
        """Experts that fit. Raises ModelError where not every layer can hold one token's."""
        arch, size = self.arch, self.cache.store.expert_bytes
        need = arch.layers * arch.top_k
        if budget_bytes < need * size:
            message = f"mode emoe needs at least {need * size} bytes for experts, and has {budget_bytes}"
            raise ModelError(self.cache.store.folder, f"{message}; raise the model's budget or choose another mode")
        return budget_bytes // size

    def _renew(self, new: list[Generation]) -> None:
        """Ask the predictor, and begin to load what is missing of what it says."""
        scheduled = self._scheduled(new)
        tasks = list(dict.fromkeys(one.task for one, _ in scheduled))
        found = self._known.predictor.predict(list(self._past), [self._number(task) for task in tasks], self._variant)
        frequencies: dict[str | None, Frequencies] = dict(zip(tasks, found.tolist(), strict=True))
        weights = dict.fromkeys(tasks, self._average)
        if self._task_aware:
            weights |= self._known.weights
        self._expected = expected_tokens(scheduled, frequencies, weights, self.profiles)
        before = self._chosen
        self._choose(sum(len(experts) for experts in before))
        self._load(before)

    def _scheduled(self, new: list[Generation]) -> list[tuple[Generation, float]]:
        """Whom to choose experts for: those that run or begin now, and the rest of the period as its past suggests."""
        if not self._task_aware:
            return [(Generation(task, task, 1, 0, 0.0), 1.0) for task in self._known.tasks]
        to_come = max(0, self._period - len(new)) / max(1, len(self._recent))
        certain = [*self._decoding.values(), *new]
        return [(one, 1.0) for one in certain] + [(one, to_come) for one in self._recent if to_come]

    def _choose(self, slots: int) -> None:
        here = self._chosen or ((),) * self.arch.layers
        self._chosen = choose(self._expected, slots, self.arch.top_k, here)
        self._residency.choose(self._chosen)
        self._allowed = [present(experts, self.arch.experts) for experts in self._chosen]

    def _load(self, resident: tuple[tuple[int, ...], ...]) -> None:
        missing = to_load(self._chosen, resident)
        self._is_loading = bool(missing)
        self.cache.prefetch([ExpertKey(*key) for key in missing])

    def _settle(self) -> None:
        """When loading has ended, what could not be loaded is not chosen among."""
        if self._is_loading and not self.cache.pending():
            self._is_loading = False
            here = [self.cache.resident(layer) for layer in range(self.arch.layers)]
            self._allowed = [present(experts, self.arch.experts) for experts in here]

    # Requests

    def _number(self, task: str | None) -> int:
        tasks = self._known.tasks
        return tasks.index(task) if task in tasks else len(tasks)

    def _note_lengths(self, step: ForwardStep) -> None:
        """Who decodes, and how long those were that no longer do: W_o of Eq. 2 is the average of each task."""
        running = {row.request: row for row in step.rows if row.request}
        for request, generation in self._decoding.items():
            if request not in running:
                self.profiles.ended(generation)
        prompts = {one.request: one for one in self._recent}
        self._decoding = {
            request: _one_more(self._decoding.get(request) or prompts.get(request) or _generation(row))
            for request, row in running.items()
        }


def _generation(row: StepRow) -> Generation:
    return Generation(row.request, row.task, row.tokens, row.tokens, 0.0)


def _one_more(generation: Generation) -> Generation:
    return replace(generation, generated=generation.generated + 1, max_new_tokens=generation.max_new_tokens + 1)


def _of_row(index: torch.Tensor, step: ForwardStep, number: int) -> torch.Tensor:
    """(t, k): the part of a layer's (T, k) that is one row's. An encoder has other lengths than the step says."""
    if len(index) != step.tokens:
        return index.chunk(len(step.rows))[number]
    return index.split([row.tokens for row in step.rows])[number]
