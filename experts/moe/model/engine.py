"""Continuous batching: requests join and leave a running batch between steps, tokens go out as they come.

A step is either the prefill of one request, alone and without padding, or one token for every request that runs.
Whom to take in is a scheduler's decision (policy/schedule.py); between two prefills the others get a token, so that
nobody's time per token grows by more than one prompt. Decoding is greedy: the same prompt gives the same tokens, alone
or beside others. What a request may come to hold is claimed before its prefill; a prefill that fails costs its own
request, a token that fails those whose token it was. No threads here: whoever owns the engine calls `step`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from experts.moe.errors import InvalidLogitsError
from experts.moe.gating import StepRow
from experts.moe.model.keys_values import KeyValues, TextMemory
from experts.moe.model.text import TextCodec, TextStream
from experts.moe.policy.schedule import Generation, GenerationScheduler, TaskProfiles


class StepContext(Protocol):
    """`MoeRuntime` as the engine needs it."""

    model: Any

    def step(self, rows: Sequence[StepRow]) -> Any: ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request for text. `tokens` is the prompt (`TextCodec.encode`); seconds are on the engine's clock.

    `slo_s` from arrival orders the queue; after `deadline_s` nobody waits for the text any more.
    """

    request: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    task: str | None
    arrived_s: float
    slo_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of a request: its place in the text, and what it adds (empty while a character is not whole)."""

    request: str
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a request. `text` is what was said; None where it could not be done, and `reason` says why.

    `ttft_s` and `total_s` are from arrival, `tpot_s` is the mean of the tokens after the first; None where there are
    none. `error` is what broke its step.
    """

    request: str
    text: str | None
    reason: str | None
    prompt_tokens: int
    new_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    total_s: float
    error: Exception | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What a step cost: a prefill of so many tokens, or one token for each of so many rows.

    Of its seconds `loading_s` are told to `TaskProfiles.loaded`.
    """

    phase: Literal["prefill", "decode"]
    count: int
    seconds: float
    loading_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Running:
    asked: EngineRequest
    stream: TextStream
    new: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def next_input(self) -> int:
        return self.new[-1]

    @property
    def row(self) -> StepRow:
        return StepRow(self.asked.request, self.asked.task, 1)


class Engine:
    """`enqueue` requests and call `step` while there are any. One thread."""

    def __init__(
        self,
        runtime: StepContext,
        codec: TextCodec,
        scheduler: GenerationScheduler,
        memory: TextMemory,
        *,
        profiles: TaskProfiles | None = None,
        on_token: Callable[[TokenEvent], None] = lambda _: None,
        waited_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory` has the books of what runs, the scheduler's limits are those of `memory`.

        `profiles` are the scheduler's, told of each request's length and of what a task that enters waits for.
        `on_token` is called amid a step; `waited_s` says how long computing has waited for experts until now.
        """
        self._runtime = runtime
        self._codec = codec
        self.scheduler = scheduler
        self._memory = memory
        self._profiles = profiles
        self._on_token = on_token
        self._waited_s = waited_s
        self._clock = clock
        self._device = next(runtime.model.parameters()).device
        self._waiting: dict[str, EngineRequest] = {}
        self._running: list[_Running] = []
        self._cache = KeyValues(runtime.model.config)
        self._owes_tokens = False
        #: What the last step computed; None where it computed nothing, or failed.
        self.last_step: StepTiming | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._running)

    def enqueue(self, asked: EngineRequest) -> None:
        """Queue a request; one that asks for more than the context holds gets what fits."""
        if asked.request in self._waiting or any(one.asked.request == asked.request for one in self._running):
            raise ValueError(f"request {asked.request} is here already")
        most = self._codec.max_total_tokens(len(asked.tokens), asked.max_new_tokens)
        self._waiting[asked.request] = replace(asked, max_new_tokens=most - len(asked.tokens))

    def step(self) -> list[Completion]:
        """One prefill or one token for all that run; what ended by it, or before it by its deadline."""
        self.last_step = None
        now = self._clock()
        ended = self._expire(now)
        joining = None if self._owes_tokens else self._next(now)
        if joining is not None:
            del self._waiting[joining.request]
            self._memory.claim(joining.request, _as_generation(joining).held_tokens)
            self._owes_tokens = bool(self._running)
            return ended + self._prefill(joining)
        self._owes_tokens = False
        return ended + (self._decode() if self._running else [])

    def check(self) -> None:
        """Raise LedgerError where the memory that is claimed is not that of the requests that run."""
        self._memory.check([one.asked.request for one in self._running], self._cache.held_bytes)

    # Deciding

    def _next(self, now: float) -> EngineRequest | None:
        if not self._waiting:
            return None
        waiting = [_as_generation(asked) for asked in self._waiting.values()]
        running = [_as_generation(one.asked, len(one.new), one.first_s) for one in self._running]
        admitted = self.scheduler.admit(waiting, running, now)
        return self._waiting[admitted[0].request] if admitted else None

    def _expire(self, now: float) -> list[Completion]:
        ended: list[Completion] = []
        for asked in list(self._waiting.values()):
            if _is_late(asked, now):
                del self._waiting[asked.request]
                ended.append(_never_began(asked, now, "deadline"))
        if any(_is_late(one.asked, now) for one in self._running):
            ended += [self._undone(one, now, "deadline") for one in self._running if _is_late(one.asked, now)]
            self._keep([place for place, one in enumerate(self._running) if not _is_late(one.asked, now)])
        return ended

    # Computing

    def _prefill(self, asked: EngineRequest) -> list[Completion]:
        began_s, waited_s = self._clock(), self._waited_s()
        try:
            tokens = torch.tensor([asked.tokens], device=self._device)
            with self._runtime.step((StepRow(asked.request, asked.task, len(asked.tokens)),)), torch.inference_mode():
                past = self._cache.fresh()
                out = self._runtime.model(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
                (token,) = self._choose(out.logits)
        except Exception as error:  # noqa: BLE001  told with `error`; whoever owns the engine decides what becomes of the model
            return self._not_begun(asked, error)
        if token is None:
            return self._not_begun(asked, self._no_number())
        one = _Running(asked, self._codec.stream())
        enters = all(other.asked.task != asked.task for other in self._running)
        loading_s = self._waited_s() - waited_s if enters else 0.0
        self.last_step = StepTiming("prefill", len(asked.tokens), self._clock() - began_s, loading_s)
        if self._profiles is not None and enters:
            self._profiles.loaded(asked.task, loading_s)
        return self._join(one, token, past)

    def _not_begun(self, asked: EngineRequest, error: Exception) -> list[Completion]:
        self._memory.release(asked.request)
        return [_never_began(asked, self._clock(), "model_failed", error)]

    def _join(self, one: _Running, token: int, past: Any) -> list[Completion]:
        """A request with its first token is one of those that run, or has ended with it."""
        if self._take(one, token):
            ended = self._done(one)
        else:
            try:
                self._cache.join(past, len(one.asked.tokens))
            except Exception as error:  # noqa: BLE001  no memory for one more; the others are as they were
                ended = self._undone(one, self._clock(), "model_failed", error)
            else:
                self._running.append(one)
                return []
        self._memory.release(one.asked.request)
        return [ended]

    def _decode(self) -> list[Completion]:
        began_s = self._clock()
        try:
            with self._runtime.step(tuple(one.row for one in self._running)), torch.inference_mode():
                inputs = torch.tensor([[one.next_input] for one in self._running], device=self._device)
                out = self._runtime.model(input_ids=inputs, use_cache=True, **self._cache.arguments(self._device))
                tokens = self._choose(out.logits)
        except Exception as error:  # noqa: BLE001  whoever owns the engine decides what becomes of the model
            now = self._clock()
            ended = [self._undone(one, now, "model_failed", error) for one in self._running]
            self._keep([])
            return ended
        self._cache.grew()
        if any(token is not None for token in tokens):
            self.last_step = StepTiming("decode", len(self._running), self._clock() - began_s)
        going, ended = list[int](), list[Completion]()
        for place, (one, token) in enumerate(zip(self._running, tokens, strict=True)):
            if token is None:
                ended.append(self._undone(one, self._clock(), "model_failed", self._no_number()))
            elif self._take(one, token):
                ended.append(self._done(one))
            else:
                going.append(place)
        self._keep(going)
        return ended

    def _choose(self, logits: torch.Tensor) -> list[int | None]:
        """The most likely token of each row, None for a row that is no numbers; logits: (B, 1, V)."""
        best = logits[:, -1].float().max(dim=-1)
        tokens = zip(best.indices.tolist(), best.values.isfinite().tolist(), strict=True)
        return [token if is_number else None for token, is_number in tokens]

    def _no_number(self) -> InvalidLogitsError:
        folder = Path(getattr(self._runtime.model.config, "name_or_path", "") or ".")
        message = "the model's answer is not a number: if other texts have none either, its weights are damaged,"
        return InvalidLogitsError(folder, f"{message} import them again")

    # Books

    def _take(self, one: _Running, token: int) -> bool:
        """Note a token and say it; whether the text ends here. The end-of-text token itself is no part of it."""
        now = self._clock()
        one.first_s = one.first_s or now
        if token in self._codec.ends:
            return True
        one.last_s = now
        one.new.append(token)
        is_last = len(one.new) >= one.asked.max_new_tokens
        text = one.stream.add(token)
        if is_last:
            text += one.stream.end()
        self._on_token(TokenEvent(one.asked.request, len(one.new) - 1, text))
        return is_last

    def _keep(self, places: list[int]) -> None:
        """Only these go on; the memory of the others is free again."""
        if len(places) < len(self._running):
            going = [self._running[place] for place in places]
            for one in self._running:
                if one not in going:
                    self._memory.release(one.asked.request)
            self._running = going
            self._cache.keep(places)

    def _done(self, one: _Running) -> Completion:
        if self._profiles is not None:
            self._profiles.ended(_as_generation(one.asked, len(one.new)))
        return self._end(one, self._clock(), one.stream.text, None, None)

    def _undone(self, one: _Running, now: float, reason: str, error: Exception | None = None) -> Completion:
        return self._end(one, now, None, reason, error)

    def _end(
        self, one: _Running, now: float, text: str | None, reason: str | None, error: Exception | None
    ) -> Completion:
        asked, count = one.asked, len(one.new)
        return Completion(
            request=asked.request,
            text=text,
            reason=reason,
            prompt_tokens=len(asked.tokens),
            new_tokens=count,
            ttft_s=one.first_s - asked.arrived_s,
            tpot_s=(one.last_s - one.first_s) / (count - 1) if count > 1 else None,
            total_s=now - asked.arrived_s,
            error=error,
        )


def _never_began(asked: EngineRequest, now: float, reason: str, error: Exception | None = None) -> Completion:
    return Completion(asked.request, None, reason, len(asked.tokens), 0, None, None, now - asked.arrived_s, error)


def _is_late(asked: EngineRequest, now: float) -> bool:
    return asked.deadline_s is not None and now > asked.deadline_s


def _as_generation(asked: EngineRequest, generated: int = 0, began_s: float | None = None) -> Generation:
    return Generation(
        request=asked.request,
        task=asked.task,
        prompt_tokens=len(asked.tokens),
        max_new_tokens=asked.max_new_tokens,
        arrived_s=asked.arrived_s,
        slo_s=asked.slo_s,
        generated=generated,
        began_s=began_s,
    )
