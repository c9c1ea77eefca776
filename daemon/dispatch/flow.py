"""Images on their way through their chains: the next expert of each, and its end. Drive thread only."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from daemon.dispatch.orders import ImageOrder, Unanswered
from daemon.line.serving import Serving
from daemon.policy.request import Request, RequestId
from daemon.policy.scheduler import Scheduler
from daemon.records import Accepted, Outcome, Stage, accepted_at_s
from experts.spec import Answer, ExpertId, ExpertSpec, name_of, resident_in
from routing_rules.routes import Judgement, Step, judge

#: Pause before bytes that could not be read are read again.
AGAIN_S = 5.0

#: Reason of the end (PROTOCOL.md, `reason` of `unknown`).
End = Literal["deadline", "expert_failed", "bad_image"]


@dataclass(frozen=True, slots=True)
class _Parked:
    request: Request
    until_s: float
    again_s: float | None


class Parked:
    """Requests that cannot be served now, through no fault of theirs: they wait here and block no queue.

    Either a load of their expert hangs (they go on when it has ended), or their image's bytes cannot be read now (they
    are retried). Each ends at its deadline, or `max_s` seconds after its first arrival here.
    """

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._waiting: dict[RequestId, _Parked] = {}
        self._first_s: dict[RequestId, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def park(self, request: Request, now: float, *, tries_again: bool = False) -> bool:
        """Let `request` wait here; False if it has waited as long as it may."""
        until_s = self._first_s.setdefault(request.request_id, now) + self._max_s
        if now >= until_s:
            self.forget(request.request_id)
            return False
        if request.deadline_s is not None:
            until_s = min(until_s, request.deadline_s)
        again_s = now + AGAIN_S if tries_again else None
        self._waiting[request.request_id] = _Parked(request, until_s, again_s)
        return True

    def forget(self, request_id: RequestId) -> None:
        """Forget the first arrival of a request: its next stay has a new time limit."""
        self._first_s.pop(request_id, None)

    def of(self, expert: ExpertId) -> list[Request]:
        entries = self._waiting.values()
        return self._take([entry for entry in entries if entry.again_s is None and entry.request.expert == expert])

    def due(self, now: float) -> tuple[list[Request], list[tuple[Request, End]]]:
        if not self._waiting:
            return [], []
        ended: list[tuple[Request, End]] = []
        late = [entry for entry in self._waiting.values() if entry.until_s <= now]
        for entry, request in zip(late, self._take(late), strict=True):
            reason: End = "expert_failed" if entry.again_s is None else "bad_image"
            ended.append((request, "deadline" if entry.until_s == request.deadline_s else reason))
            self.forget(request.request_id)
        again = [entry for entry in self._waiting.values() if entry.again_s is not None and entry.again_s <= now]
        return self._take(again), ended

    def requests(self) -> list[Request]:
        return [entry.request for entry in self._waiting.values()]

    def remove(self, request: Request) -> None:
        self._waiting.pop(request.request_id, None)

    def next_s(self) -> float | None:
        times = [min(entry.until_s, entry.again_s or entry.until_s) for entry in self._waiting.values()]
        return min(times, default=None)

    def _take(self, entries: list[_Parked]) -> list[Request]:
        return [self._waiting.pop(entry.request.request_id).request for entry in entries]


@dataclass(slots=True)
class _Image:
    accepted: Accepted
    #: That of its edition.
    catalog: Mapping[ExpertId, ExpertSpec]
    step: Step
    deadline_s: float | None
    stages: list[Stage] = field(default_factory=list[Stage])
    judgement: Judgement | None = None
    #: The expert of this step, if it is a head: the request is then for its backbone.
    head: ExpertSpec | None = None
    #: How often a device failed with a batch of this step.
    failures: int = 0


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """One expert's answer about one image, with the row to store. `image_size` is (width, height)."""

    request_id: RequestId
    answer: Answer
    image_size: tuple[int, int]
    stage: Stage


class Chains:
    """Each image's chain of experts, by the number of its current request. `on_answer` must not block."""

    def __init__(
        self,
        serving: Serving,
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_answer: Callable[..., None] = lambda *_: None,
    ) -> None:
        self._serving, self._on_answer = serving, on_answer
        self._clock = clock
        self._wall = wall
        self._images: dict[RequestId, _Image] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._images)

    def accepted(self, request_id: RequestId) -> Accepted:
        return self._images[request_id].accepted

    def head(self, request_id: RequestId) -> ExpertSpec | None:
        """Return the head that judges the current step."""
        return self._images[request_id].head

    def admit(self, accepted: Accepted) -> Request | Outcome:
        """Return an image's first request, or its end if its edition serves no more."""
        served = self._serving.get(accepted.edition)
        step = None if served is None else served.routes.first_step(accepted.board_type, accepted.component)
        if served is None or step is None:
            return Outcome(accepted.inspection_id, "unknown", None, "edition_gone", ())
        deadline_s = None
        if accepted.deadline_ms is not None:
            deadline_s = accepted_at_s(accepted, self._clock(), self._wall()) + accepted.deadline_ms / 1000.0
        return self._request(_Image(accepted, served.catalog, step, deadline_s))

    def answered(self, answered: ImageAnswer, now: float) -> Request | Outcome:
        image = self._images.pop(answered.request_id)
        image.stages.append(answered.stage)
        if self._serving.get(image.accepted.edition) is None:
            return _unjudged(image, "edition_gone")
        answer, before = answered.answer, image.judgement
        image.judgement = judge(
            image.step, answer.label, answer.confidence, answer.detections, before, answered.image_size
        )
        if image.deadline_s is not None and now > image.deadline_s:
            return _unjudged(image, "deadline")
        self._on_answer(image.accepted, len(image.stages) - 1, image.step, before, image.judgement)
        if image.judgement.next is not None:
            image.step, image.failures = image.judgement.next, 0
            return self._request(image)
        verdict, defect = image.judgement.verdict, image.judgement.defect
        return Outcome(image.accepted.inspection_id, verdict, defect, None, tuple(image.stages))

    def again(self, request_id: RequestId, max_failures: int) -> Request | None:
        image = self._images[request_id]
        if image.failures >= max_failures:
            return None
        del self._images[request_id]
        image.failures += 1
        return self._request(image)

    def of_ended_editions(self, requests: Iterable[Request]) -> list[Request]:
        images = ((request, self._images[request.request_id].accepted.edition) for request in requests)
        return [request for request, edition in images if self._serving.get(edition) is None]

    def has_experts(self, request: Request) -> bool:
        return bool(self._images[request.request_id].catalog)

    def ended(self, request_id: RequestId, reason: str) -> Outcome:
        return _unjudged(self._images.pop(request_id), reason)

    def _request(self, image: _Image) -> Request:
        self._last_id += 1
        request_id = RequestId(self._last_id)
        self._images[request_id] = image
        expert = ExpertId(image.step.expert)
        spec = image.catalog.get(expert)
        image.head = spec if spec is not None and spec.backbone is not None else None
        resident = expert if spec is None else spec.resident.expert
        return Request(request_id, resident, self._clock(), image.deadline_s, len(image.stages))


def _unjudged(image: _Image, reason: str) -> Outcome:
    """An image that was not judged to its end is never a pass. The stages that ran are kept."""
    return Outcome(image.accepted.inspection_id, "unknown", None, reason, tuple(image.stages))


#: How long an image without a deadline waits for a hung load or for unreadable bytes, as a multiple of `hang_after_s`.
_PARKED_FACTOR = 10.0
#: Retry limit for an image whose device on another PC was lost: the image may have crashed the worker there.
MAX_LOSSES = 3


class ImageFlow:
    """Sends each image to its next expert until it ends, exactly once, or stays in the journal because the line stops.

    `on_outcome` and `on_bad_image` must not block.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        chains: Chains,
        serving: Serving,
        *,
        on_outcome: Callable[[Outcome], None],
        on_bad_image: Callable[[Accepted, str], None],
        hang_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._chains = chains
        self._serving = serving
        self._parked = Parked(_PARKED_FACTOR * hang_after_s)
        self._refusals: dict[ExpertId, str] = {}
        self.take_editions()
        self._on_outcome, self._on_bad_image = on_outcome, on_bad_image
        self._clock = clock
        self._log: Any = structlog.get_logger("drive")
        self.completed = 0
        #: Images retried after a failure of their device or of the disk.
        self.retries = 0
        self._last_error: str | None = None
        self.last_error_at_s = 0.0
        self.is_stopping = False

    @property
    def last_error(self) -> str | None:
        return self._last_error

    @last_error.setter
    def last_error(self, reason: str | None) -> None:
        self._last_error, self.last_error_at_s = reason, time.time()

    @property
    def under_way(self) -> int:
        return len(self._chains)

    @property
    def parked(self) -> int:
        return len(self._parked)

    def admit(self, images: Iterable[Accepted]) -> None:
        for image in images:
            self._go_on(self._chains.admit(image))

    def order_of(self, request: Request) -> ImageOrder:
        accepted = self._chains.accepted(request.request_id)
        return ImageOrder(request.request_id, accepted.key, accepted.pixels, self._chains.head(request.request_id))

    def names(self, requests: Iterable[Request]) -> list[str]:
        images = (self._chains.accepted(request.request_id) for request in requests)
        return [f"{image.source}/{image.image_id}" for image in images]

    def answered(self, answered: ImageAnswer) -> None:
        self._parked.forget(answered.request_id)
        self._go_on(self._chains.answered(answered, self._clock()))

    def unanswered(self, request: Request, result: Unanswered, *, is_device_error: bool, is_lost: bool = False) -> None:
        """End the image, or retry it if its device failed or its bytes could not be read this time."""
        match result.fault:
            case "bad_image":
                self.is_bad(request, result.detail)
            case "unreadable":
                self.last_error = result.detail
                if not self._parked.park(request, self._clock(), tries_again=True):
                    self.is_bad(request, result.detail)
            case "expert_failed" if is_device_error:
                self.again(request, MAX_LOSSES if is_lost else 1)
            case "expert_failed":
                self.last_error = f"expert {name_of(request.expert)}: {result.detail}"
                self.end(request, "expert_failed")

    def is_bad(self, request: Request, reason: str) -> None:
        self._on_bad_image(self._chains.accepted(request.request_id), reason)
        self.end(request, "bad_image")

    def again(self, request: Request, max_failures: int = 1) -> None:
        again = self._chains.again(request.request_id, max_failures)
        if again is None:
            self.end(request, "expert_failed")
        else:
            self.retries += 1
            self._go_on(again)

    def retry_and_expire(self, now: float) -> float | None:
        """End images whose time is up and retry due ones. Return when to call this again."""
        for request in self._scheduler.expire(now):
            self.end(request, "deadline")
        again, ended = self._parked.due(now)
        for request in again:
            self.retries += 1
            self._go_on(request)
        for request, reason in ended:
            if reason == "bad_image":
                self.is_bad(request, "its bytes could not be read")
            else:
                self.end(request, reason)
        return self._parked.next_s()

    def park(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if not self._parked.park(request, self._clock()):
                self.end(request, "expert_failed")

    def release(self, expert: ExpertId) -> None:
        """Resume images parked for `expert`: its hung load has ended, or another pool has the expert."""
        for request in self._parked.of(expert):
            self._go_on(request)

    def end_all(self, requests: Iterable[Request]) -> None:
        """End requests whose expert is gone or unusable."""
        for request in requests:
            if self._chains.of_ended_editions([request]):
                self.end(request, "edition_gone")
                continue
            # A line without any experts collects pictures to train them with.
            self.end(request, "expert_failed" if self._chains.has_experts(request) else "no_expert")

    def take_editions(self) -> None:
        """Know the experts of all editions that serve; end what waits here for one that serves no more."""
        self.resident = {}
        for served in reversed(self._serving.all()):
            self.resident |= resident_in(served.catalog)
        self._refusals.clear()
        for request in self._chains.of_ended_editions(self._parked.requests()):
            self._parked.remove(request)
            self.end(request, "edition_gone")

    @property
    def catalog(self) -> Mapping[ExpertId, ExpertSpec]:
        return self._serving.current.catalog

    def resident_of(self, spec: ExpertSpec) -> ExpertSpec:
        """Return what a slot holds while an expert answers; for a backbone's own entry what its heads have there."""
        if spec.classes:
            return spec.resident
        return next((held for held in self.resident.values() if held.sha256 == spec.sha256), spec)

    def end(self, request: Request, reason: str) -> None:
        self._parked.forget(request.request_id)
        self._finish(self._chains.ended(request.request_id, reason))

    def _go_on(self, step: Request | Outcome) -> None:
        if isinstance(step, Outcome):
            self._finish(step)
            return
        if self.is_stopping:
            return  # it stays in the journal and starts its chain again at the next start
        if self._scheduler.is_stuck(step.expert):
            self.park([step])
            return
        refused = self._scheduler.arrive(step, self._clock())
        if refused is not None:
            if self._refusals.get(step.expert) != refused:
                self._refusals[step.expert] = self.last_error = refused
                self._log.error("expert_unusable", expert=name_of(step.expert), reason=refused)
            self.end_all([step])

    def _finish(self, outcome: Outcome) -> None:
        self.completed += 1
        self._on_outcome(outcome)
