"""Executor threads: journal keys in, answers out. A fault costs an image or a batch, never the thread."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import structlog

from daemon.dispatch.orders import Answered, BatchOrder, BatchReport, Fault, ImageOrder, Slot, Unanswered
from daemon.errors import is_device_error, ran_out_of_memory
from daemon.host.worker import Worker
from daemon.policy.request import ExecutorFacts, RequestId
from daemon.records import JournalKey
from daemon.storage.journal import JournalError
from experts.errors import ExpertError, ImageError
from experts.spec import Answer, ExpertId, ExpertSpec
from experts.vision.preprocess import MAX_PIXELS, Prepared, prepare

#: Accepting images goes before inference: publishers wait, verdicts have a queue (docs/decisions.md, measured).
_NICENESS = 5
S = TypeVar("S", bound=Slot)

_NOT_NUMBERS = "the network's outputs are not finite numbers: import the expert again"


class _GivenUpError(Exception):
    """The batch took too long and was given up."""


@dataclass(slots=True)
class _RunningBatch:
    """Shared by the executor's thread and the drive's."""

    order: BatchOrder
    preparing: RequestId | None = None
    is_given_up: bool = False

    def raise_if_given_up(self) -> None:
        if self.is_given_up:
            raise _GivenUpError("this batch took too long and was given up")


@dataclass(slots=True)
class _Inference:
    """Answers so far; `memory_limit` is the largest batch that fitted after one ran out of memory."""

    experts: Sequence[ExpertSpec]
    answers: dict[int, Answer | Unanswered] = field(default_factory=dict[int, "Answer | Unanswered"])
    memory_limit: int | None = None
    device_error: str | None = None


class ExecutorThread(Generic[S]):
    """One executor of one device's pool.

    `slot(expert)` gives the resident expert's slot, `read(key)` an image's bytes (Journal.read). `infer(slot, images,
    experts)` is the forward pass: for each image, in order, the answer of its expert, or why that one has none. `enter`
    prepares the thread. `mark(key)` notes the image in the decoder, None when none is, for the start after a crash
    (storage/suspect_images.py). A decoder refuses more than `max_pixels`.
    """

    def __init__(
        self,
        facts: ExecutorFacts,
        slot: Callable[[ExpertId], S],
        read: Callable[[JournalKey], bytes],
        infer: Callable[[S, Sequence[Prepared], Sequence[ExpertSpec]], Sequence[Answer | ExpertError]],
        *,
        enter: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        mark: Callable[[JournalKey | None], None] = lambda _key: None,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.facts = facts
        self._slot = slot
        self._read = read
        self._run = infer
        self._prepare_thread = enter
        self._clock = clock
        self._mark = mark
        self._max_pixels = max_pixels
        self._work: _RunningBatch | None = None
        self._report: Callable[[BatchReport], None] = lambda _report: None
        self._worker: Worker[BatchOrder] = Worker(f"executor {facts.executor}", self._carry_out, self._enter)
        self._log: Any = structlog.get_logger("executor").bind(executor=facts.executor)

    def start(self, report: Callable[[BatchReport], None]) -> None:
        self._report = report
        self._worker.start()

    def submit(self, order: BatchOrder) -> None:
        self._worker.put(order)

    def give_up(self) -> RequestId | None:
        """Hand further batches to a new thread, and with it a new stream."""
        work, self._work = self._work, None
        if work is not None:
            work.is_given_up = True
        self._worker = self._worker.successor()
        return None if work is None else work.preparing

    def stop(self, timeout_s: float) -> bool:
        return self._worker.stop(timeout_s)

    def _enter(self) -> None:
        with suppress(OSError):  # a sandbox may forbid it
            os.nice(_NICENESS)  # on Linux a thread's own, and that of threads it starts
        self._prepare_thread()

    def _carry_out(self, order: BatchOrder) -> None:
        started_s = self._clock()
        work = self._work = _RunningBatch(order)
        try:
            report = self._answer(work, started_s)
        except Exception as error:  # noqa: BLE001  the drive must learn that this batch is over
            if not isinstance(error, _GivenUpError):
                self._log.exception("batch_failed", expert=order.spec.name, images=len(order.images))
            lost = tuple(Unanswered("expert_failed", _text(error)) for _ in order.images)
            device_error = _text(error) if is_device_error(error) else None
            report = BatchReport(
                self.facts.executor, order.batch_id, lost, started_s, self._clock(), 0.0, device_error=device_error
            )
        self._report(report)

    def _answer(self, work: _RunningBatch, started_s: float) -> BatchReport:
        order = work.order
        prepared, faults = self._prepare(work)
        work.raise_if_given_up()
        slot = self._slot(order.spec.expert)
        if slot.spec != order.spec:
            raise ExpertError(order.spec.expert, "other weights are resident than the catalog names; reload it again")
        inference = _Inference([image.head or order.spec for image in order.images])
        begin_s = self._clock()
        self._infer(slot, prepared, tuple(prepared), inference)
        ended_s = self._clock()
        results: list[Answered | Unanswered] = []
        for number in range(len(order.images)):
            if number in faults:
                results.append(faults[number])
                continue
            answer, placement = inference.answers[number], prepared[number].placement
            if isinstance(answer, Answer):
                results.append(Answered(answer, (placement.width, placement.height)))
            else:
                results.append(answer)
        infer_ms = (ended_s - begin_s) * 1000.0
        return BatchReport(
            self.facts.executor,
            order.batch_id,
            tuple(results),
            started_s,
            ended_s,
            infer_ms,
            inference.memory_limit,
            inference.device_error,
        )

    def _prepare(self, work: _RunningBatch) -> tuple[dict[int, Prepared], dict[int, Unanswered]]:
        prepared: dict[int, Prepared] = {}
        faults: dict[int, Unanswered] = {}
        for number, image in enumerate(work.order.images):
            try:
                prepared[number] = self._prepare_one(image, work)
            except ImageError as error:
                faults[number] = Unanswered("bad_image", error.reason)
            except JournalError as error:
                # A disk that refuses to read may recover; altered bytes stay altered.
                fault: Fault = "unreadable" if isinstance(error.__cause__, OSError) else "bad_image"
                if fault == "bad_image":
                    self._log.error("image_damaged", segment=error.segment, offset=error.offset, reason=error.reason)
                faults[number] = Unanswered(fault, str(error))
            except _GivenUpError:
                raise
            except Exception as error:  # noqa: BLE001  a hostile image costs one image
                self._log.exception("image_failed", segment=image.key.segment, offset=image.key.offset)
                faults[number] = Unanswered("bad_image", _text(error))
        return prepared, faults

    def _prepare_one(self, image: ImageOrder, work: _RunningBatch) -> Prepared:
        payload = self._read(image.key)
        work.raise_if_given_up()
        work.preparing = image.request_id
        self._mark(image.key)
        try:
            return prepare(payload, image.pixels.encoding, image.pixels.shape, work.order.spec, self._max_pixels)
        finally:
            work.preparing = None
            if not work.is_given_up:  # else the mark belongs to the thread that took over
                self._mark(None)

    def _infer(self, slot: S, prepared: dict[int, Prepared], chosen: tuple[int, ...], into: _Inference) -> None:
        """Answer the images `chosen`: in halves after running out of memory, one by one after another error.

        A device error ends the batch: no image caused it, and it would repeat for each.
        """
        if not chosen:
            return
        try:
            images = [prepared[number] for number in chosen]
            answers = self._run(slot, images, [into.experts[number] for number in chosen])
        except Exception as error:  # noqa: BLE001  an error of the network costs one image
            if is_device_error(error):
                into.device_error = _text(error)
            if len(chosen) == 1 or into.device_error is not None:
                self._log.warning("inference_failed", expert=slot.spec.name, error=_text(error))
                into.answers |= {number: Unanswered("expert_failed", _text(error)) for number in chosen}
                return
            middle = len(chosen) // 2
            if ran_out_of_memory(error):
                into.memory_limit = min(middle, into.memory_limit or middle)
                parts = [chosen[:middle], chosen[middle:]]
            else:
                parts = [(number,) for number in chosen]
        else:
            for number, answer in zip(chosen, answers, strict=True):
                into.answers[number] = _checked(answer)
            return
        # Outside the handler: while the error is being handled it holds the failed batch's tensors.
        for part in parts:
            self._infer(slot, prepared, part, into)


def _checked(answer: Answer | ExpertError) -> Answer | Unanswered:
    if isinstance(answer, ExpertError):
        return Unanswered("expert_failed", str(answer))
    return answer if answer.is_finite else Unanswered("expert_failed", _NOT_NUMBERS)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
