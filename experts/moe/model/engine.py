"""Continuous batching: texts join and leave a running batch between steps, and tokens are emitted as they come.

A step is the prefill of one text, alone and without padding, or one token for every running text. A scheduler chooses
the text to begin (policy/schedule.py); between two prefills the others get a token, so that no time per token grows by
more than one prompt. Decoding is greedy: a prompt gives the same tokens alone or beside others. A failed prefill costs
its own text, a failed decode step all of its texts. No threads: the owner of the engine calls `step`.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from experts.ledger import LedgerError
from experts.moe.errors import InvalidLogitsError
from experts.moe.gating import StepRow
from experts.moe.model.keys_values import KeyValues
from experts.moe.model.runtime import MoeRuntime
from experts.moe.model.text import TextCodec, TextStream
from experts.moe.policy.schedule import SloSlack, TextRequest, batch_tokens

#: Gets a text with its newest token, that token's part of the text (empty while a character is incomplete), and the
#: seconds since the token before, or since arrival.
OnToken = Callable[[TextRequest, str, float], None]


class Engine:
    """Serves texts: `enqueue` them and call `step` while there are any. Not thread-safe.

    The scheduler's limits bound the memory of running texts: `token_bytes` for each of its tokens. Its costs and
    profiles learn from each step. `waited_s` returns how long computing has waited for experts so far.
    """

    def __init__(
        self,
        runtime: MoeRuntime,
        codec: TextCodec,
        scheduler: SloSlack,
        token_bytes: int,
        *,
        on_token: OnToken,
        waited_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtime = runtime
        self._codec = codec
        self._scheduler = scheduler
        self._token_bytes = token_bytes
        self._on_token = on_token
        self._waited_s = waited_s
        self._clock = clock
        self._device = next(runtime.model.parameters()).device
        self._waiting: list[TextRequest] = []
        #: The rows of the batch.
        self._running: dict[TextRequest, TextStream] = {}
        self._cache = KeyValues()
        self._decode_next = False
        #: Steps that failed, since the last one that did not.
        self.failed_steps = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._running)

    @property
    def used_bytes(self) -> int:
        """Memory that the running texts may come to hold."""
        return batch_tokens(self._running) * self._token_bytes

    def enqueue(self, text: TextRequest) -> None:
        """Queue a text; `max_new_tokens` beyond the context are cut."""
        prompt_tokens = len(text.tokens)
        text.max_new_tokens = self._codec.max_total_tokens(prompt_tokens, text.max_new_tokens) - prompt_tokens
        self._waiting.append(text)

    def step(self) -> list[TextRequest]:
        """Compute one prefill, or one token for all running texts; return the texts that ended."""
        now = self._clock()
        ended = self._expire(now)
        joining = None if self._decode_next else self._scheduler.next_text(self._waiting, self._running, now)
        if joining is not None:
            self._waiting.remove(joining)
            self._decode_next = bool(self._running)
            return ended + self._prefill(joining)
        self._decode_next = False
        return ended + (self._decode() if self._running else [])

    def check(self) -> None:
        """Raise LedgerError if the running texts hold more than is counted for them, or more than they may."""
        limit_bytes = self._scheduler.limits.tokens * self._token_bytes
        if not self._cache.held_bytes <= self.used_bytes <= limit_bytes:
            held = f"{self._cache.held_bytes} bytes are held, {self.used_bytes} counted"
            raise LedgerError(f"{held} of {limit_bytes} for {self.running} texts")

    def _expire(self, now: float) -> list[TextRequest]:
        texts = [*self._waiting, *self._running]
        late = [text for text in texts if text.deadline_s is not None and now > text.deadline_s]
        if late:
            self._waiting = [text for text in self._waiting if text not in late]
            self._keep([text for text in self._running if text not in late])
        return [_ended(text, "deadline") for text in late]

    def _prefill(self, text: TextRequest) -> list[TextRequest]:
        began_s, waited_s = self._clock(), self._waited_s()
        row = StepRow(text.request, text.task, len(text.tokens))
        try:
            tokens = torch.tensor([text.tokens], device=self._device)
            with self._runtime.step((row,)), torch.inference_mode():
                past = self._cache.fresh()
                out = self._runtime.model(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
                (token,) = _best_tokens(out.logits)
        except Exception as error:  # noqa: BLE001  the owner of the engine decides whether the model can go on
            return self._fail([text], error)
        if token is None:
            return self._fail([text], self._invalid_logits())
        loading_s = 0.0
        if all(running.task != text.task for running in self._running):
            loading_s = self._waited_s() - waited_s
            self._scheduler.profiles.record_loading(text.task, loading_s)
        self._scheduler.costs.record_prefill(len(text.tokens), self._clock() - began_s - loading_s)
        self.failed_steps = 0
        stream = TextStream(self._codec.decode)
        if self._add_token(text, stream, token):
            return [text]
        try:
            self._cache.join(past, len(text.tokens))
        except Exception as error:  # noqa: BLE001  no memory for one more row; the others are unchanged
            return [_ended(text, "model_failed", error)]
        self._running[text] = stream
        return []

    def _decode(self) -> list[TextRequest]:
        began_s, texts = self._clock(), list(self._running)
        rows = tuple(StepRow(text.request, text.task, 1) for text in texts)
        try:
            with self._runtime.step(rows), torch.inference_mode():
                inputs = torch.tensor([[text.new[-1]] for text in texts], device=self._device)
                out = self._runtime.model(input_ids=inputs, use_cache=True, **self._cache.arguments(self._device))
                tokens = _best_tokens(out.logits)
        except Exception as error:  # noqa: BLE001  the owner of the engine decides whether the model can go on
            self._keep([])
            return self._fail(texts, error)
        self._cache.count_token()
        lost = [text for text, token in zip(texts, tokens, strict=True) if token is None]
        ended = self._fail(lost, self._invalid_logits()) if lost else []
        if len(lost) < len(texts):
            self._scheduler.costs.record_decode(self._clock() - began_s)
            self.failed_steps = 0
        for (text, stream), token in zip(self._running.items(), tokens, strict=True):
            if token is not None and self._add_token(text, stream, token):
                ended.append(text)
        self._keep([text for text in texts if text not in ended])
        return ended

    def _fail(self, texts: Sequence[TextRequest], error: Exception) -> list[TextRequest]:
        self.failed_steps += 1
        return [_ended(text, "model_failed", error) for text in texts]

    def _invalid_logits(self) -> InvalidLogitsError:
        folder = Path(getattr(self._runtime.model.config, "name_or_path", "") or ".")
        message = "the model's output is not a number: if other texts fail too, its weights are damaged,"
        return InvalidLogitsError(folder, f"{message} import them again")

    def _add_token(self, text: TextRequest, stream: TextStream, token: int) -> bool:
        """Add a token and emit it; return True if the text ends. The end-of-text token is not part of the text."""
        now, since_s = self._clock(), text.arrived_s if text.first_s is None else text.last_s
        if text.first_s is None:
            text.first_s = now
        is_last = token in self._codec.ends
        if not is_last:
            text.last_s = now
            text.new.append(token)
            is_last = len(text.new) >= text.max_new_tokens
            piece = stream.add(token)
            self._on_token(text, piece + stream.end() if is_last else piece, now - since_s)
        if is_last:
            text.text = stream.text
            self._scheduler.profiles.record_length(text)
        return is_last

    def _keep(self, going: Sequence[TextRequest]) -> None:
        if len(going) < len(self._running):
            self._cache.keep([place for place, text in enumerate(self._running) if text in going])
            self._running = {text: self._running[text] for text in going}


def _best_tokens(logits: torch.Tensor) -> list[int | None]:
    """Return each row's most likely token, None for invalid logits; logits: (B, 1, V)."""
    best = logits[:, -1].float().max(dim=-1)
    tokens = zip(best.indices.tolist(), best.values.isfinite().tolist(), strict=True)
    return [token if is_number else None for token, is_number in tokens]


def _ended(text: TextRequest, reason: str, error: Exception | None = None) -> TextRequest:
    text.reason, text.error = reason, error
    return text
