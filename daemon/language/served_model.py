"""One language model in service: a checkpoint in its mode (experts/moe) under a batching engine, for `ModelThread`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from daemon.config.settings import Model
from daemon.records import Generation
from experts.moe.errors import InvalidLogitsError, ModelError
from experts.moe.folder import file_states
from experts.moe.model.engine import Engine
from experts.moe.model.keys_values import bytes_per_token, text_tokens
from experts.moe.model.runtime import MoeRuntime
from experts.moe.model.text import PromptError, TextCodec
from experts.moe.modes import open_mode
from experts.moe.policy.schedule import BatchLimits, SloSlack, TextRequest

#: After this many failed steps in a row the model is at fault, not its texts.
_FAILED_STEPS = 3


class ServedModel:
    """The runtime, its engine, and the running requests. All but `close` is called by the model's own thread."""

    def __init__(
        self,
        model: Model,
        budget_bytes: int,
        gets_on: Callable[[], None],
        on_token: Callable[[Generation, int, str], None],
    ) -> None:
        """`on_token` gets tokens of streamed requests. Raises ModelError, OSError, ModuleNotFoundError."""
        self._settings = model
        self._on_token = on_token
        self._states = file_states(model.checkpoint)
        self._codec = TextCodec.open(model.checkpoint)
        self._mode: Any = open_mode(model.mode, model.checkpoint, model.options)
        self._runtime = MoeRuntime.open(
            model.checkpoint, self._mode, budget_bytes, device=model.device, storage=model.storage
        )
        self._runtime.observers.append(lambda _step, _token, _done: gets_on())
        network, arch = self._runtime.model, self._runtime.arch
        # The library's default if config.json names no context; a prompt beyond it would wait for ever.
        self._codec.context = arch.context_tokens
        self._vocabulary: int = network.get_input_embeddings().num_embeddings
        token_bytes = bytes_per_token(network.config, arch.dtype)
        try:
            #: Tokens that the memory of texts holds.
            self.text_tokens = text_tokens(
                model.checkpoint, token_bytes, model.text_bytes, arch.context_tokens, model.max_new_tokens
            )
        except ModelError:
            self._runtime.close()
            raise
        self._texts: dict[str, Generation] = {}
        self._engine = Engine(
            self._runtime,
            self._codec,
            SloSlack(BatchLimits(model.rows, self.text_tokens)),
            token_bytes,
            on_token=self._handle_token,
            waited_s=lambda: self._runtime.cache.counts.wait_s,
        )

    @property
    def is_idle(self) -> bool:
        return self._engine.is_idle

    def begin(self, text: Generation, arrived_s: float) -> Generation | None:
        """Queue a request. Return its end at once if its prompt cannot be continued."""
        settings = self._settings
        new_tokens = min(text.max_new_tokens or settings.max_new_tokens, settings.max_new_tokens)
        try:
            tokens = self._codec.encode(text.prompt)
        except PromptError:
            tokens = []
        if (
            not tokens
            or max(tokens) >= self._vocabulary  # of a tokenizer that is larger than the model
            or self._codec.max_total_tokens(len(tokens), new_tokens) > self.text_tokens
        ):
            return replace(text, reason="bad_prompt", mode=settings.mode)
        name = str(text.generation_id)
        self._texts[name] = text
        self._engine.enqueue(
            TextRequest(
                request=name,
                tokens=tuple(tokens),
                max_new_tokens=new_tokens,
                task=text.task,
                arrived_s=arrived_s,
                slo_s=None if text.slo_ms is None else text.slo_ms / 1000,
                deadline_s=None if text.deadline_ms is None else arrived_s + text.deadline_ms / 1000,
            )
        )
        return None

    def step(self) -> tuple[list[tuple[Generation, str | None]], Exception | None]:
        """Run one step; return ended requests with their errors, and the error after which the model is lost."""
        ended = self._engine.step()
        lost = self._lost([text.error for text in ended if text.error is not None])
        return [self._outcome(text) for text in ended], lost

    def _lost(self, errors: Sequence[Exception]) -> Exception | None:
        """Return the error after which the model cannot go on; None if the errors concern their own texts only.

        It cannot go on if its files are damaged, if ledgers or device are not consistent (checked when it is idle,
        too), or if all of the last few steps failed.
        """
        for error in errors:
            if isinstance(error, ModelError) and not isinstance(error, InvalidLogitsError):
                return error
        if not (errors or self._engine.is_idle):
            return None
        try:
            self._engine.check()
            self._runtime.check()
        except Exception as error:  # noqa: BLE001  after any error, nothing more is computed with this model
            return error
        return errors[0] if errors and self._engine.failed_steps >= _FAILED_STEPS else None

    def was_changed(self) -> str | None:
        """Describe the first file that is gone or was replaced: parts read before and later would not fit."""
        folder = self._settings.checkpoint
        now = file_states(folder)
        if now == self._states:
            return None
        before, after = dict.fromkeys(self._states), dict.fromkeys(now)
        name = next(state[0] for state in (*self._states, *now) if state not in before or state not in after)
        what = "was changed" if any(state[0] == name for state in now) else "is gone"
        return f"{folder / name}: {what} while the model was in service; it is opened again for the next request"

    def resize(self, budget_bytes: int) -> None:
        """Set the budget of its experts, in force on return. Raises ModelError if it is too small."""
        self._mode.resize(budget_bytes)

    def account(self) -> dict[str, Any]:
        cache = self._runtime.cache
        counts = cache.counts
        return {
            "mode": self._settings.mode,
            "running": self._engine.running,
            "used_bytes": cache.allocated_bytes + self._mode.reserved_bytes,
            "text_used_bytes": self._engine.used_bytes,
            "text_budget_bytes": self._settings.text_bytes,
            "expert_fetches": counts.fetches,
            "hit_rate": round(counts.hit_rate, 4),
            "brownout_threshold": self._threshold(),
        }

    def close(self) -> None:
        self._runtime.close()

    def _handle_token(self, request: TextRequest, piece: str, since_s: float) -> None:
        text = self._texts[request.request]
        index = len(request.new) - 1
        if (threshold := self._threshold()) is not None:
            self._mode.observe("decode" if index else "prefill", since_s)
            lowest = min(threshold, text.brownout_threshold or threshold)
            text = self._texts[request.request] = replace(text, brownout_threshold=lowest)
        if text.stream:
            self._on_token(text, index, piece)

    def _outcome(self, ended: TextRequest) -> tuple[Generation, str | None]:
        counts = self._runtime.cache.pop_request(ended.request)
        outcome = replace(
            self._texts.pop(ended.request),
            text=ended.text,
            reason=ended.reason,
            mode=self._settings.mode,
            prompt_tokens=len(ended.tokens),
            new_tokens=len(ended.new),
            ttft_ms=None if ended.ttft_s is None else 1000 * ended.ttft_s,
            tpot_ms=None if ended.tpot_s is None else 1000 * ended.tpot_s,
            expert_fetches=counts.fetches,
            predictor_hit_rate=counts.hit_rate if counts.served else None,
        )
        return outcome, None if ended.error is None else f"{type(ended.error).__name__}: {ended.error}"

    def _threshold(self) -> float | None:
        """Return the lowest threshold in force, of mode brownout."""
        thresholds = getattr(self._mode, "thresholds", None)
        return min(thresholds.values()) if thresholds else None
