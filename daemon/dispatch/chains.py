"""Images under way: which step of its chain each is at, and what becomes of it when an answer comes."""

from collections.abc import Callable
from dataclasses import dataclass, field

from daemon.policy.request import Request, RequestId
from daemon.records import Accepted, Outcome, Stage
from experts.spec import Answer, ExpertId
from routing_rules.routes import Judgement, Routes, Step, judge


@dataclass(slots=True)
class _Image:
    accepted: Accepted
    step: Step
    deadline_s: float | None
    stages: list[Stage] = field(default_factory=list[Stage])
    judgement: Judgement | None = None
    #: The device of this step's first batch has failed.
    is_second_try: bool = False


@dataclass(frozen=True, slots=True)
class ImageAnswer:
    """One expert's answer for one image, with what is stored of it. `image_size` is (width, height)."""

    request_id: RequestId
    answer: Answer
    image_size: tuple[int, int]
    stage: Stage


class Chains:
    """From acceptance to outcome. Each image is in exactly one place: waiting under its request's number, or ended."""

    def __init__(
        self, routes: Callable[[str], Routes | None], clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self._routes = routes
        self._clock = clock
        self._wall = wall
        self._images: dict[RequestId, _Image] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._images)

    def accepted(self, request_id: RequestId) -> Accepted:
        return self._images[request_id].accepted

    def admit(self, accepted: Accepted) -> Request | Outcome:
        """The first request of an image, or its end where the rules that its board opened with cannot route it."""
        routes = self._routes(accepted.rules_version)
        step = None if routes is None else routes.first_step(accepted.board_type, accepted.component)
        if step is None:
            return Outcome(accepted.inspection_id, "unknown", None, "rules_changed", ())
        deadline_s = None
        if accepted.deadline_ms is not None:
            deadline_s = self._accepted_s(accepted) + accepted.deadline_ms / 1000.0
        return self._request(_Image(accepted, step, deadline_s))

    def _accepted_s(self, accepted: Accepted) -> float:
        """When it was accepted, on the drive's clock, which never jumps.

        Of an image from before a restart only the wall clock knows; set back meanwhile, it counts no downtime.
        """
        if accepted.accepted_s is not None:
            return accepted.accepted_s
        return self._clock() - max(0.0, self._wall() - accepted.accepted_wall_s)

    def answered(self, found: ImageAnswer, now: float) -> Request | Outcome:
        """Judge an answer: the request of the chain's next step, or the image's end."""
        image = self._images.pop(found.request_id)
        image.stages.append(found.stage)
        answer = found.answer
        image.judgement = judge(
            image.step, answer.label, answer.confidence, answer.detections, image.judgement, found.image_size
        )
        if image.deadline_s is not None and now > image.deadline_s:
            return _unjudged(image, "deadline")
        if image.judgement.next is not None:
            image.step, image.is_second_try = image.judgement.next, False
            return self._request(image)
        verdict, defect = image.judgement.verdict, image.judgement.defect
        return Outcome(image.accepted.inspection_id, verdict, defect, None, tuple(image.stages))

    def again(self, request_id: RequestId) -> Request | None:
        """The same step once more; None where this was its second try, and the image is to end."""
        image = self._images[request_id]
        if image.is_second_try:
            return None
        del self._images[request_id]
        image.is_second_try = True
        return self._request(image)

    def ended(self, request_id: RequestId, reason: str) -> Outcome:
        """The end of an image that could not be judged."""
        return _unjudged(self._images.pop(request_id), reason)

    def _request(self, image: _Image) -> Request:
        self._last_id += 1
        request_id = RequestId(self._last_id)
        self._images[request_id] = image
        expert = ExpertId(image.step.expert)
        return Request(request_id, expert, self._clock(), image.deadline_s, len(image.stages))


def _unjudged(image: _Image, reason: str) -> Outcome:
    """Nothing that was not judged to its end is ever a pass; the stages that ran are kept, for people."""
    return Outcome(image.accepted.inspection_id, "unknown", None, reason, tuple(image.stages))
