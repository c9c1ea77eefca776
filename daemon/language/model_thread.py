"""The thread of one language model: opens its checkpoint, takes requests in and computes, one step after another.

Each accepted request ends exactly once, with a text or as `unknown` and a reason. If a checkpoint is damaged, changed
or gone, the thread's requests end as `unknown`; the next request opens it again.
"""

import gc
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from daemon.line.lease import next_step_s
from daemon.records import Generation

if TYPE_CHECKING:
    from daemon.language.served_model import ServedModel

#: A checkpoint that could not be opened is tried again for a request, but not more often.
_OPEN_AGAIN_S = 1.0
#: A model that makes way for images checks this often if they are done.
_YIELD_POLL_S = 0.02
#: Opening reads all weights outside experts.
_OPENING_FACTOR = 10.0

MODEL_FAILED = "model_failed"
#: Entries of an account that are 0 once the model is closed.
_HELD = ("running", "used_bytes", "text_used_bytes")

#: Opens a checkpoint within a budget of bytes for its experts, or raises an exception with the reason. The second
#: argument is called within a step whenever a layer is done.
Opener = Callable[[int, Callable[[], None]], "ServedModel"]


class ModelThread:
    """The thread of one model. `generate`, `resize`, `give_up` and `status` may be called by any thread."""

    def __init__(
        self,
        name: str,
        opener: Opener,
        budget_bytes: int,
        *,
        on_outcome: Callable[[Generation], None],
        images_under_way: Callable[[], bool] = lambda: False,
        hang_after_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        ran: Callable[[], float] | None = None,
    ) -> None:
        """Hold `budget_bytes` from the start, also if the checkpoint cannot be opened.

        `ran` is the seconds in which this process ran, by which a step hangs; without it, those of `clock`.
        """
        self.name = name
        self._opener = opener
        self._budget_bytes = budget_bytes
        self._on_outcome = on_outcome
        self._images_under_way = images_under_way
        self._hang_after_s = hang_after_s
        self._clock = clock
        self._ran = ran or clock
        self._letters: queue.SimpleQueue[Generation | _Resize | None] = queue.SimpleQueue()
        self._model: ServedModel | None = None
        self._texts: dict[int, Generation] = {}
        #: Budgets that were ordered and are not in force yet.
        self._resizes: list[_Resize] = []
        self._lock = threading.Lock()
        self._ended_s = self._took_s = 0.0
        self._working_since_s: float | None = None
        self._works_for_s = hang_after_s
        self._given_up = False
        self._stopping = False
        self._failed_at_s: float | None = None
        self._left_cycles = False
        self._account: dict[str, Any] = {}
        #: `ServedModel.text_tokens` of the last opening; None before.
        self.text_tokens: int | None = None
        self.last_error: str | None = None
        self._log: Any = structlog.get_logger("model").bind(model=name)
        self._thread = threading.Thread(target=self._run, name=f"model-{name}", daemon=True)

    # From any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End after the running step; False after `timeout_s`. Requests without a result stay accepted."""
        self._stopping = True
        self._letters.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def generate(self, text: Generation) -> None:
        with self._lock:
            self._texts[text.generation_id] = text
        if self._given_up:
            self._end(replace(text, reason=MODEL_FAILED))
        else:
            self._letters.put(text)

    def resize(self, budget_bytes: int) -> "Future[int]":
        """Set a budget from the next step on. The future gives the bytes held then, or the error."""
        with self._lock:
            if not self._resizes or self._resizes[-1].budget_bytes != budget_bytes:
                self._resizes.append(_Resize(budget_bytes, Future()))
                self._letters.put(self._resizes[-1])
            return self._resizes[-1].done

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return max([self._budget_bytes, *(resize.budget_bytes for resize in self._resizes)])

    @property
    def is_failing(self) -> bool:
        return self._given_up or (self._model is None and self.last_error is not None)

    @property
    def is_opening(self) -> bool:
        return self._model is None and self.last_error is None

    @property
    def waiting(self) -> int:
        return len(self._texts)

    def hangs_s(self) -> float | None:
        """Return the seconds without progress of its step, None until that is longer than any layer may take."""
        since_s = self._working_since_s
        if since_s is None or self._given_up:
            return None
        took_s = self._ran() - since_s
        return took_s if took_s > self._works_for_s else None

    def give_up(self, reason: str) -> None:
        """Stop waiting for a step that hangs. If it ends later, the model is opened again."""
        self._given_up = True
        self.last_error = reason
        self._log.error("model_hung", reason=reason)
        self._end_all()
        self._letters.put(None)  # it may wait for one by now

    def status(self) -> dict[str, Any]:
        state = "ready" if self._model is not None else "opening" if self.is_opening else "failed"
        return {
            "name": self.name,
            "state": "hanging" if self._given_up else state,
            "requests": self.waiting,
            "budget_bytes": self._budget_bytes,
            **self._account,
            "last_error": self.last_error,
        }

    # The model's thread

    def _run(self) -> None:
        self._open()
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001  a defect costs what runs; the next request begins anew
                self._log.exception("model_defect")
                self._fail(f"{type(error).__name__}: {error}")
        if self._model is not None:
            self._close()

    def _turn(self) -> None:
        self._take_letters()
        if self._given_up:
            self._close()  # its hanging call has ended: the next request opens it again
            self._given_up = False
            self._log.warning("model_came_back")
            return
        model = self._model
        if model is None or model.is_idle or self._stopping:
            return
        changed = model.was_changed()
        if changed is not None:
            self._fail(changed)
            return
        self._compute(model)

    def _take_letters(self) -> None:
        """Take the queued letters; wait while there is nothing to compute, or while images go first."""
        wait_s = self._wait_s()
        while True:
            try:
                letter = self._letters.get(timeout=wait_s) if wait_s != 0.0 else self._letters.get_nowait()
            except queue.Empty:
                if wait_s == 0.0 or self._wait_s() == 0.0:
                    return
                continue
            wait_s = 0.0
            if isinstance(letter, _Resize):
                self._resize(letter)
            elif letter is not None:
                self._begin(letter)

    def _wait_s(self) -> float | None:
        """Seconds to wait for a letter: None for no limit, 0 for not at all."""
        if self._stopping:
            return 0.0
        if self._model is None or self._model.is_idle:
            return None
        due_s = next_step_s(self._ended_s, self._took_s, images_under_way=self._images_under_way())
        left_s = due_s - self._clock()
        return min(left_s, _YIELD_POLL_S) if left_s > 0.0 else 0.0

    def _begin(self, text: Generation) -> None:
        if text.generation_id not in self._texts:
            return  # given up meanwhile
        if self._model is not None and (changed := self._model.was_changed()) is not None:
            self._fail(changed, but=text.generation_id)
        if self._model is None and not self._open():
            self._end(replace(text, reason=MODEL_FAILED))
            return
        if text.generation_id not in self._texts:
            return  # given up while it was opened
        assert self._model is not None, "it has just been opened"
        refused = self._model.begin(text, text.accepted_s)
        if refused is not None:
            self._end(refused)

    def _compute(self, model: "ServedModel") -> None:
        began_s = self._clock()
        self._working(self._hang_after_s)
        try:
            ended, error = model.step()
        finally:
            self._working_since_s = None
        self._ended_s = self._clock()
        self._took_s = self._ended_s - began_s
        for outcome, broken_by in ended:
            if broken_by is not None:
                self.last_error = broken_by
                self._log.warning("text_failed", generation=outcome.generation_id, error=broken_by)
            self._end(outcome)
        self._account = model.account()
        if error is not None:
            self._fail(str(error))

    def _resize(self, resize: "_Resize") -> None:
        try:
            if self._model is not None:
                self._working(self._hang_after_s)
                self._model.resize(resize.budget_bytes)
        except Exception as error:  # noqa: BLE001  the caller of `resize` gets it
            self._undo_resize()
            self._end_resize(resize, self._budget_bytes)
            resize.done.set_exception(error)
        else:
            self._end_resize(resize, resize.budget_bytes)
            resize.done.set_result(resize.budget_bytes)
        finally:
            self._working_since_s = None
            if self._model is not None:
                self._account = self._model.account()

    def _undo_resize(self) -> None:
        """Give back the memory that a failed growth took: it counts as free."""
        assert self._model is not None, "a closed model has any budget"
        try:
            self._model.resize(self._budget_bytes)
        except Exception as error:  # noqa: BLE001  once closed, it holds nothing
            self._fail(f"it could not go back to {self._budget_bytes} bytes: {error}")

    def _end_resize(self, resize: "_Resize", budget_bytes: int) -> None:
        with self._lock:
            self._budget_bytes = budget_bytes
            self._resizes.remove(resize)

    # Opening and failing

    def _open(self) -> bool:
        now = self._clock()
        if self._failed_at_s is not None and now - self._failed_at_s < _OPEN_AGAIN_S:
            return False
        if self._left_cycles:
            gc.collect()  # cycles hold the weights of the closed model, which would be in memory twice
            self._left_cycles = False
        self._working(_OPENING_FACTOR * self._hang_after_s)
        try:
            self._model = self._opener(self._budget_bytes, self._gets_on)
        except Exception as error:  # noqa: BLE001  a checkpoint, or the machine: the line goes on without it
            self._failed_at_s = self._clock()
            self.last_error = str(error)
            self._log.error("model_not_opened", error=str(error))
            return False
        finally:
            self._working_since_s = None
        self._failed_at_s = self.last_error = None
        self._given_up = False
        self._account = self._model.account()
        self.text_tokens = self._model.text_tokens
        self._log.info("model_opened", took_s=round(self._clock() - now, 3), **self._account)
        return True

    def _fail(self, reason: str, but: int | None = None) -> None:
        """End all requests `but` one, and close the model: the next request opens it again."""
        self.last_error = reason
        self._log.error("model_failed", error=reason)
        self._end_all(but)
        self._close()

    def _close(self) -> None:
        model, self._model = self._model, None
        if model is None:
            return
        self._left_cycles = True
        self._account = self._account | {name: 0 for name in _HELD if name in self._account}
        try:
            model.close()
        except Exception:  # noqa: BLE001  its memory may be lost, the line is not
            self._log.exception("model_not_closed")

    def _gets_on(self) -> None:
        """Note that a layer was computed: a long step that makes progress does not hang."""
        self._working_since_s = self._ran()

    def _working(self, may_take_s: float) -> None:
        self._works_for_s = may_take_s
        self._working_since_s = self._ran()

    # Ends

    def _end_all(self, but: int | None = None) -> None:
        with self._lock:
            texts = [text for number, text in self._texts.items() if number != but]
        for text in texts:
            self._end(replace(text, reason=MODEL_FAILED))

    def _end(self, ended: Generation) -> None:
        """Report the end of a request, once: one that was given up has ended already."""
        with self._lock:
            if self._texts.pop(ended.generation_id, None) is None:
                return
        total_s = self._clock() - ended.accepted_s
        self._on_outcome(replace(ended, total_ms=total_s * 1000))


@dataclass(eq=False, frozen=True, slots=True)
class _Resize:
    budget_bytes: int
    done: "Future[int]"
