"""Continuous batching: requests join and leave a running batch between steps, and tokens are emitted as they come.

A step is the prefill of one request, alone and without padding, or one token for every running request. A scheduler
chooses the requests to begin (policy/schedule.py); between two prefills the others get a token, so that no time per
token grows by more than one prompt. Decoding is greedy: a prompt gives the same tokens alone or beside others. A
request's memory is claimed before its prefill. A failed prefill costs its own request, a failed decode step all of its
requests. No threads: the owner of the engine calls `step`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from experts.moe.errors import InvalidLogitsError
from experts.moe.gating import StepRow
from experts.moe.model.keys_values import KeyValues, TextMemory
from experts.moe.model.runtime import MoeRuntime
from experts.moe.model.text import TextCodec, TextStream
from experts.moe.policy.schedule import Generation, SloSlack, TaskProfiles


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request for text. `tokens` is the prompt (`TextCodec.encode`); seconds are on the engine's clock.

    `slo_s` from arrival orders the queue; after `deadline_s` the request ends without a text.
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
    """One token of a request: its index in the answer, and its text (empty while a character is incomplete)."""

    request: str
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a request: its `text`, or None and the `reason`.

    `ttft_s` is from arrival, `tpot_s` is the mean of the tokens after the first, None without such.
    `error` is the exception that broke its step.
    """

    request: str
    text: str | None
    reason: str | None
    prompt_tokens: int
    new_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    error: Exception | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Cost of a prefill of `count` tokens, or of a token for each of `count` rows; `loading_s` is part of it."""

    phase: Literal["prefill", "decode"]
    count: int
    seconds: float
    loading_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Running:
    request: EngineRequest
    stream: TextStream
    new: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def name(self) -> str:
        return self.request.request


class Engine:
    """Serves requests: `enqueue` them and call `step` while there are any. Not thread-safe.

    `memory` is the ledger of running texts, whose limits the scheduler has too. The scheduler's `profiles` learn each
    request's length and loading time. `on_token` is called during a step; `waited_s` returns how long computing has
    waited for experts so far.
    """

    def __init__(
        self,
        runtime: MoeRuntime,
        codec: TextCodec,
        scheduler: SloSlack,
        memory: TextMemory,
        *,
        profiles: TaskProfiles | None = None,
        on_token: Callable[[TokenEvent], None] = lambda _: None,
        waited_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtime = runtime
        self._codec = codec
        self.scheduler = scheduler
        self._memory = memory
        self._profiles = profiles or TaskProfiles()
        self._on_token = on_token
        self._waited_s = waited_s
        self._clock = clock
        self._device = next(runtime.model.parameters()).device
        self._waiting: dict[str, EngineRequest] = {}
        self._running: list[_Running] = []
        self._cache = KeyValues()
        self._decode_next = False
        #: Timing of the last step; None if it computed nothing, or failed.
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

    def enqueue(self, request: EngineRequest) -> None:
        """Queue a request; `max_new_tokens` beyond the context are cut."""
        name = request.request
        if name in self._waiting or any(running.name == name for running in self._running):
            raise ValueError(f"request {name} is here already")
        max_total = self._codec.max_total_tokens(len(request.tokens), request.max_new_tokens)
        self._waiting[name] = replace(request, max_new_tokens=max_total - len(request.tokens))

    def step(self) -> list[Completion]:
        """Compute one prefill, or one token for all running requests; return the requests that ended."""
        self.last_step = None
        now = self._clock()
        completions = self._expire(now)
        joining = None if self._decode_next else self._next_request(now)
        if joining is not None:
            del self._waiting[joining.request]
            self._memory.claim(joining.request, _as_generation(joining).held_tokens)
            self._decode_next = bool(self._running)
            return completions + self._prefill(joining)
        self._decode_next = False
        return completions + (self._decode() if self._running else [])

    def check(self) -> None:
        """Raise LedgerError unless the claimed memory is that of the running requests."""
        self._memory.check([running.name for running in self._running], self._cache.held_bytes)

    # Choosing

    def _next_request(self, now: float) -> EngineRequest | None:
        if not self._waiting:
            return None
        waiting = [_as_generation(request) for request in self._waiting.values()]
        running = [_as_generation(each.request, len(each.new), each.first_s) for each in self._running]
        admitted = self.scheduler.admit(waiting, running, now)
        return self._waiting[admitted[0].request] if admitted else None

    def _expire(self, now: float) -> list[Completion]:
        completions: list[Completion] = []
        for request in list(self._waiting.values()):
            if _is_late(request, now):
                del self._waiting[request.request]
                completions.append(_not_begun(request, "deadline"))
        late = [_is_late(running.request, now) for running in self._running]
        if any(late):
            for running, is_late in zip(self._running, late, strict=True):
                if is_late:
                    completions.append(self._completion(running, reason="deadline"))
            self._keep([place for place, is_late in enumerate(late) if not is_late])
        return completions

    # Computing

    def _prefill(self, request: EngineRequest) -> list[Completion]:
        began_s, waited_s = self._clock(), self._waited_s()
        row = StepRow(request.request, request.task, len(request.tokens))
        try:
            tokens = torch.tensor([request.tokens], device=self._device)
            with self._runtime.step((row,)), torch.inference_mode():
                past = self._cache.fresh()
                out = self._runtime.model(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
                (token,) = _best_tokens(out.logits)
        except Exception as error:  # noqa: BLE001  the owner of the engine decides whether the model can go on
            return self._fail_prefill(request, error)
        if token is None:
            return self._fail_prefill(request, self._invalid_logits())
        enters = all(running.request.task != request.task for running in self._running)
        loading_s = self._waited_s() - waited_s if enters else 0.0
        self.last_step = StepTiming("prefill", len(request.tokens), self._clock() - began_s, loading_s)
        if enters:
            self._profiles.record_loading(request.task, loading_s)
        return self._join(_Running(request, self._codec.stream()), token, past)

    def _fail_prefill(self, request: EngineRequest, error: Exception) -> list[Completion]:
        self._memory.release(request.request)
        return [_not_begun(request, "model_failed", error)]

    def _join(self, running: _Running, token: int, past: Any) -> list[Completion]:
        """Add a request with its first token to the batch, or end it with that token."""
        if self._add_token(running, token):
            completion = self._complete(running)
        else:
            try:
                self._cache.join(past, len(running.request.tokens))
            except Exception as error:  # noqa: BLE001  no memory for one more row; the others are unchanged
                completion = self._completion(running, reason="model_failed", error=error)
            else:
                self._running.append(running)
                return []
        self._memory.release(running.name)
        return [completion]

    def _decode(self) -> list[Completion]:
        began_s = self._clock()
        rows = tuple(StepRow(running.name, running.request.task, 1) for running in self._running)
        try:
            with self._runtime.step(rows), torch.inference_mode():
                inputs = torch.tensor([[running.new[-1]] for running in self._running], device=self._device)
                out = self._runtime.model(input_ids=inputs, use_cache=True, **self._cache.arguments(self._device))
                tokens = _best_tokens(out.logits)
        except Exception as error:  # noqa: BLE001  the owner of the engine decides whether the model can go on
            completions = [self._completion(running, reason="model_failed", error=error) for running in self._running]
            self._keep([])
            return completions
        self._cache.count_token()
        if any(token is not None for token in tokens):
            self.last_step = StepTiming("decode", len(self._running), self._clock() - began_s)
        going, completions = list[int](), list[Completion]()
        for place, (running, token) in enumerate(zip(self._running, tokens, strict=True)):
            if token is None:
                error = self._invalid_logits()
                completions.append(self._completion(running, reason="model_failed", error=error))
            elif self._add_token(running, token):
                completions.append(self._complete(running))
            else:
                going.append(place)
        self._keep(going)
        return completions

    def _invalid_logits(self) -> InvalidLogitsError:
        folder = Path(getattr(self._runtime.model.config, "name_or_path", "") or ".")
        message = "the model's output is not a number: if other texts fail too, its weights are damaged,"
        return InvalidLogitsError(folder, f"{message} import them again")

    # Requests

    def _add_token(self, running: _Running, token: int) -> bool:
        """Add a token and emit it; return True if the text ends. The end-of-text token is not part of the text."""
        now = self._clock()
        running.first_s = running.first_s or now
        if token in self._codec.ends:
            return True
        running.last_s = now
        running.new.append(token)
        is_last = len(running.new) >= running.request.max_new_tokens
        text = running.stream.add(token)
        if is_last:
            text += running.stream.end()
        self._on_token(TokenEvent(running.name, len(running.new) - 1, text))
        return is_last

    def _keep(self, places: list[int]) -> None:
        if len(places) < len(self._running):
            going = [self._running[place] for place in places]
            for running in self._running:
                if running not in going:
                    self._memory.release(running.name)
            self._running = going
            self._cache.keep(places)

    def _complete(self, running: _Running) -> Completion:
        self._profiles.record_length(_as_generation(running.request, len(running.new)))
        return self._completion(running, text=running.stream.text)

    def _completion(
        self, running: _Running, *, text: str | None = None, reason: str | None = None, error: Exception | None = None
    ) -> Completion:
        request, count = running.request, len(running.new)
        return Completion(
            request=request.request,
            text=text,
            reason=reason,
            prompt_tokens=len(request.tokens),
            new_tokens=count,
            ttft_s=running.first_s - request.arrived_s,
            tpot_s=(running.last_s - running.first_s) / (count - 1) if count > 1 else None,
            error=error,
        )


def _best_tokens(logits: torch.Tensor) -> list[int | None]:
    """Return each row's most likely token, None for invalid logits; logits: (B, 1, V)."""
    best = logits[:, -1].float().max(dim=-1)
    tokens = zip(best.indices.tolist(), best.values.isfinite().tolist(), strict=True)
    return [token if is_number else None for token, is_number in tokens]


def _not_begun(request: EngineRequest, reason: str, error: Exception | None = None) -> Completion:
    return Completion(request.request, None, reason, len(request.tokens), 0, None, None, error)


def _is_late(request: EngineRequest, now: float) -> bool:
    return request.deadline_s is not None and now > request.deadline_s


def _as_generation(request: EngineRequest, generated: int = 0, began_s: float | None = None) -> Generation:
    return Generation(
        request=request.request,
        task=request.task,
        prompt_tokens=len(request.tokens),
        max_new_tokens=request.max_new_tokens,
        arrived_s=request.arrived_s,
        slo_s=request.slo_s,
        generated=generated,
        began_s=began_s,
    )
