"""One language model in service: a checkpoint in its mode (experts/moe) under a batching engine, for `ModelThread`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daemon.config.settings import Model
from daemon.language.model_thread import MODEL_FAILED
from daemon.records import Generation
from experts.moe.errors import InvalidLogitsError, ModelError
from experts.moe.model.engine import Completion, Engine, EngineRequest, StepTiming, TokenEvent
from experts.moe.model.keys_values import TextMemory, bytes_per_token, require_text_memory
from experts.moe.model.runtime import MoeRuntime
from experts.moe.model.text import PromptError, TextCodec
from experts.moe.modes import open_mode
from experts.moe.policy.schedule import BatchLimits, SloSlack, StepCosts, TaskProfiles
from experts.moe.weights.folder import file_states

#: Assumed costs until some are measured; then means over this many steps.
_COSTS = StepCosts(prefill_token_s=0.001, step_s=0.02, row_s=0.0)
_STEPS = 32
#: After this many failed steps in a row the model is at fault, not its texts.
_FAILED_STEPS = 3


@dataclass(slots=True)
class _Taken:
    text: Generation
    arrived_s: float
    last_token_s: float
    threshold: float | None = None


class ServedModel:
    """The runtime, its engine, and the running requests. All but `close` is called by the model's own thread."""

    def __init__(
        self,
        model: Model,
        budget_bytes: int,
        gets_on: Callable[[], None],
        on_token: Callable[[Generation, int, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_token` gets tokens of streamed requests. Raises ModelError, OSError, ModuleNotFoundError."""
        self._settings = model
        self._on_token = on_token
        self._clock = clock
        self._states = file_states(model.checkpoint)
        self._codec = TextCodec.open(model.checkpoint)
        self._mode: Any = open_mode(model.mode, model.checkpoint, model.options)
        self._runtime = MoeRuntime.open(
            model.checkpoint, self._mode, budget_bytes, device=model.device, storage=model.storage
        )
        self._runtime.observers.append(lambda _step, _token, _done: gets_on())
        # The library's default if config.json names no context; a prompt beyond it would wait for ever.
        self._codec.context = self._runtime.arch.context_tokens
        self._vocabulary: int = self._runtime.model.get_input_embeddings().num_embeddings
        try:
            token_bytes = bytes_per_token(self._runtime.model.config, self._runtime.arch.dtype)
            self._memory = TextMemory(token_bytes, model.text_bytes)
            require_text_memory(model.checkpoint, self._memory, self._codec.context, model.max_new_tokens)
        except ModelError:
            self._runtime.close()
            raise
        self._taken: dict[str, _Taken] = {}
        self._failed_steps = 0
        self._costs, self._profiles = _COSTS, TaskProfiles()
        self._engine = Engine(
            self._runtime,
            self._codec,
            self._scheduler(),
            self._memory,
            profiles=self._profiles,
            on_token=self._handle_token,
            waited_s=lambda: self._runtime.cache.metrics.counts.wait_s,
            clock=clock,
        )

    def _scheduler(self) -> SloSlack:
        return SloSlack(BatchLimits(self._settings.rows, self._memory.tokens), self._costs, self._profiles)

    @property
    def is_idle(self) -> bool:
        return self._engine.is_idle

    @property
    def text_tokens(self) -> int:
        return self._memory.tokens

    def begin(self, text: Generation, arrived_s: float) -> Generation | None:
        """Queue a request. Return its end at once if its prompt cannot be continued."""
        settings = self._settings
        bad_prompt = replace(text, reason="bad_prompt", mode=settings.mode)
        try:
            tokens = self._codec.encode(text.prompt)
        except PromptError:
            return bad_prompt
        new_tokens = min(text.max_new_tokens or settings.max_new_tokens, settings.max_new_tokens)
        if max(tokens) >= self._vocabulary:  # of a tokenizer that is larger than the model
            return bad_prompt
        if self._codec.max_total_tokens(len(tokens), new_tokens) > self._memory.tokens:
            return bad_prompt
        slo_s = settings.slo if text.slo_ms is None else text.slo_ms / 1000
        deadline_s = None if text.deadline_ms is None else arrived_s + text.deadline_ms / 1000
        name = str(text.generation_id)
        self._taken[name] = _Taken(text, arrived_s, arrived_s)
        self._engine.enqueue(
            EngineRequest(
                request=name,
                tokens=tuple(tokens),
                max_new_tokens=new_tokens,
                task=text.task,
                arrived_s=arrived_s,
                slo_s=slo_s,
                deadline_s=deadline_s,
            )
        )
        return None

    def step(self) -> tuple[list[tuple[Generation, str | None]], Exception | None]:
        """Run one step; return ended requests with their errors, and the error after which the model is lost."""
        ended = self._engine.step()
        if self._engine.last_step is not None:
            self._costs = learned(self._costs, self._engine.last_step)
            self._engine.scheduler = self._scheduler()
        lost = self._lost([completion.error for completion in ended if completion.error is not None])
        return [self._outcome(completion) for completion in ended], lost

    def _lost(self, errors: Sequence[Exception]) -> Exception | None:
        """Return the error after which the model cannot go on; None if the errors concern their own texts only.

        It cannot go on if its files are damaged, if ledgers or device are not consistent (checked when it is idle,
        too), or if all of the last few steps failed.
        """
        if self._engine.last_step is not None:
            self._failed_steps = 0
        elif errors:
            self._failed_steps += 1
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
        return errors[0] if errors and self._failed_steps >= _FAILED_STEPS else None

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
        counts = cache.metrics.counts
        return {
            "mode": self._settings.mode,
            "running": self._engine.running,
            "used_bytes": cache.allocated_bytes + getattr(self._mode, "reserved_bytes", 0),
            "text_used_bytes": self._memory.used_bytes,
            "text_budget_bytes": self._memory.budget_bytes,
            "expert_fetches": counts.fetches,
            "hit_rate": round(counts.hit_rate, 4),
            "brownout_threshold": self._threshold(),
        }

    def close(self) -> None:
        self._runtime.close()

    def _handle_token(self, event: TokenEvent) -> None:
        taken = self._taken[event.request]
        now = self._clock()
        if hasattr(self._mode, "observe"):
            self._mode.observe("decode" if event.index else "prefill", now - taken.last_token_s)
        taken.last_token_s = now
        threshold = self._threshold()
        if threshold is not None:
            taken.threshold = threshold if taken.threshold is None else min(taken.threshold, threshold)
        if taken.text.stream:
            self._on_token(taken.text, event.index, event.text)

    def _outcome(self, ended: Completion) -> tuple[Generation, str | None]:
        taken = self._taken.pop(ended.request)
        counts = self._runtime.cache.metrics.pop_request(ended.request)
        outcome = replace(
            taken.text,
            text=ended.text,
            reason=MODEL_FAILED if ended.error is not None else ended.reason,
            mode=self._settings.mode,
            prompt_tokens=ended.prompt_tokens,
            new_tokens=ended.new_tokens,
            ttft_ms=None if ended.ttft_s is None else 1000 * ended.ttft_s,
            tpot_ms=None if ended.tpot_s is None else 1000 * ended.tpot_s,
            expert_fetches=counts.fetches,
            predictor_hit_rate=counts.hit_rate if counts.served else None,
            brownout_threshold=taken.threshold,
        )
        return outcome, None if ended.error is None else f"{type(ended.error).__name__}: {ended.error}"

    def _threshold(self) -> float | None:
        thresholds = getattr(self._mode, "thresholds", None)
        return min(thresholds.values()) if thresholds else None


def learned(costs: StepCosts, timing: StepTiming) -> StepCosts:
    """Update the costs by one step: a moving mean, since memory, load and prompts change them.

    The loading time of a task that entered is in its profile, not in the costs of a prompt.
    """
    if timing.phase == "prefill":
        token_s = (timing.seconds - timing.loading_s) / timing.count
        return replace(costs, prefill_token_s=costs.prefill_token_s + (token_s - costs.prefill_token_s) / _STEPS)
    return replace(costs, step_s=costs.step_s + (timing.seconds - costs.step_s) / _STEPS)
