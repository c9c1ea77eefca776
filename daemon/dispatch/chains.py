"""Images on their way through their chains of experts, each to exactly one end. Drive thread only."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from daemon.dispatch.pool import Fault
from daemon.line.serving import Serving
from daemon.policy.request import Request, RequestId
from daemon.policy.scheduler import Scheduler
from daemon.records import Image, Stage, Verdict
from experts.spec import Answer, ExpertId, ExpertSpec, name_of, resident_in
from routing_rules.routes import GUARDS, Judgement, Step, guarded, judge

#: Pause before bytes that could not be read are read again.
_READ_AGAIN_S = 5.0
#: How long an image without a deadline waits for a hung load or for unreadable bytes, as a multiple of `hang_after_s`.
_PARKED_FACTOR = 10.0
#: Retry limit for an image whose device on another PC was lost: the image may have crashed the worker there.
MAX_LOSSES = 3


#: An answer that counts: its image, the number of its stage and step, and the judgement before and after it.
Judged = tuple[Image, int, Step, Judgement | None, Judgement]


@dataclass(slots=True, eq=False)
class Chain:
    """One image on its way: the expert it waits for, and the answers so far."""

    image: Image
    #: That of its edition.
    catalog: Mapping[ExpertId, ExpertSpec]
    step: Step
    deadline_s: float | None
    #: The scheduler's view of this step: a new one each time the image is queued for an expert.
    request: Request = field(init=False)
    #: The expert of this step, if it is a head: the request is then for its backbone.
    head: ExpertSpec | None = None
    stages: list[Stage] = field(default_factory=list[Stage])
    judgement: Judgement | None = None
    #: Guards that object to a pass, found with the image or with an answer.
    guards: list[str] = field(default_factory=list[str])
    #: How often a device failed with a batch of this step.
    failures: int = 0
    #: When this step first had to wait outside the queues, and until when it may; see `Chains.park`.
    parked_since_s: float | None = None
    parked_until_s: float = 0.0
    read_again_s: float | None = None


class Chains:
    """Sends each image to its next expert until it ends, exactly once, or stays in the journal because the line stops.

    Some images cannot be served now, through no fault of theirs: a load of their expert hangs (they go on when it has
    ended), or their bytes cannot be read (they are retried). They are parked and block no queue; each ends at its
    deadline, or `_PARKED_FACTOR * hang_after_s` after it was parked first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        serving: Serving,
        *,
        hang_after_s: float,
        clock: Callable[[], float],
        guards: Collection[str] = GUARDS,
    ) -> None:
        """`guards` are those switched on."""
        self._scheduler, self._serving = scheduler, serving
        self._guards = frozenset(guards)
        #: What the drive reports once a turn, and empties.
        self.judged: list[Judged] = []
        self.bad_images: list[tuple[Image, str]] = []
        self.verdicts: list[Verdict] = []
        self._may_wait_s = _PARKED_FACTOR * hang_after_s
        self._clock = clock
        self._chains: dict[RequestId, Chain] = {}
        self._parked: dict[RequestId, Chain] = {}
        self._last_id = 0
        self._refusals: dict[ExpertId, str] = {}
        self._log: Any = structlog.get_logger("drive")
        self.completed = 0
        #: Images retried after a failure of their device or of the disk.
        self.retries = 0
        self._last_error: str | None = None
        self.last_error_at_s = 0.0
        #: The last step's expert that failed an image, and why: its next answer ends that error.
        self._failed = ("", "")
        self.is_stopping = False
        self.take_editions()

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

    def chain_of(self, request: Request) -> Chain:
        return self._chains[request.request_id]

    def image_names(self, requests: Iterable[Request]) -> list[str]:
        images = (self.chain_of(request).image for request in requests)
        return [f"{image.source}/{image.image_id}" for image in images]

    # Editions

    def take_editions(self) -> None:
        """Know the experts of all editions that serve; end what is parked for one that serves no more."""
        self.resident: dict[ExpertId, ExpertSpec] = {}
        for served in reversed(self._serving.all()):
            self.resident |= resident_in(served.catalog)
        self._refusals.clear()
        for chain in [chain for chain in self._parked.values() if self._serves_no_more(chain)]:
            del self._parked[chain.request.request_id]
            self.end(chain.request, "edition_gone")

    @property
    def catalog(self) -> Mapping[ExpertId, ExpertSpec]:
        return self._serving.current.catalog

    def resident_of(self, spec: ExpertSpec) -> ExpertSpec:
        """Return what a slot holds while an expert answers; for a backbone's own entry what its heads have there."""
        if spec.classes:
            return spec.resident
        return next((held for held in self.resident.values() if held.sha256 == spec.sha256), spec)

    def _serves_no_more(self, chain: Chain) -> bool:
        return chain.image.edition not in self._serving.served

    # From expert to expert

    def admit(self, images: Iterable[Image]) -> None:
        for image in images:
            served = self._serving.served.get(image.edition)
            step = None if served is None else served.routes.first_step(image.board.type, image.component)
            if served is None or step is None:
                self._finish(Verdict(image, "unknown", reason="edition_gone"))
                continue
            deadline_s = None
            if image.deadline_ms is not None:
                deadline_s = image.accepted_s + image.deadline_ms / 1000.0
            self._ask(Chain(image, served.catalog, step, deadline_s))

    def answered(self, request: Request, answer: Answer, image_size: tuple[int, int], stage: Stage) -> None:
        """Take an expert's answer, with the row to store; `image_size` is (width, height)."""
        chain, now = self._chains.pop(request.request_id), self._clock()
        before = chain.judgement
        chain.stages.append(stage)
        chain.guards += answer.guards
        if chain.step.expert == self._failed[0]:
            self.last_error = None if self.last_error == self._failed[1] else self.last_error
            self._failed = ("", "")
        if self._serves_no_more(chain):
            self._end(chain, "edition_gone")
            return
        judged = chain.judgement = judge(
            chain.step, answer.label, answer.confidence, answer.detections, before, image_size
        )
        if chain.deadline_s is not None and now > chain.deadline_s:
            self._end(chain, "deadline")
            return
        self.judged.append((chain.image, len(chain.stages) - 1, chain.step, before, judged))
        if judged.next is not None:
            chain.step, chain.failures = judged.next, 0
            self._ask(chain)
        else:
            found = self._guards.intersection((chain.image.guard, *chain.guards))
            verdict, reason = guarded(judged.verdict, found)
            self._finish(Verdict(chain.image, verdict, judged.defect, reason, tuple(chain.stages)))

    def unanswered(self, request: Request, fault: Fault, *, is_device_error: bool, is_lost: bool) -> None:
        """End the image, or retry it if its device failed or its bytes could not be read this time."""
        match fault.kind:
            case "bad_image":
                self.end_as_bad(request, fault.detail)
            case "unreadable":
                self.last_error = fault.detail
                if not self._park(self.chain_of(request), reads_again=True):
                    self.end_as_bad(request, fault.detail)
            case "expert_failed" if is_device_error:
                self.retry(request, MAX_LOSSES if is_lost else 1)
            case "expert_failed":
                self.last_error = f"expert {name_of(request.expert)}: {fault.detail}"
                self._failed = (self.chain_of(request).step.expert, self.last_error)
                self.end(request, "expert_failed")

    def retry(self, request: Request, max_failures: int = 1) -> None:
        """Queue an image again for the expert whose batch failed, at most `max_failures` times."""
        chain = self.chain_of(request)
        if chain.failures >= max_failures:
            self.end(request, "expert_failed")
            return
        del self._chains[request.request_id]
        chain.failures += 1
        self.retries += 1
        self._ask(chain)

    def _ask(self, chain: Chain) -> None:
        self._last_id += 1
        expert = ExpertId(chain.step.expert)
        spec = chain.catalog.get(expert)
        chain.head = spec if spec is not None and spec.backbone is not None else None
        resident = expert if spec is None else spec.resident.expert
        request_id = RequestId(self._last_id)
        chain.request = Request(request_id, resident, self._clock(), chain.deadline_s, len(chain.stages))
        chain.parked_since_s = None
        self._chains[request_id] = chain
        self._queue(chain)

    def _queue(self, chain: Chain) -> None:
        if self.is_stopping:
            return  # it stays in the journal and starts its chain again at the next start
        request = chain.request
        if self._scheduler.is_stuck(request.expert):
            self.park([request])
            return
        refused = self._scheduler.arrive(request, self._clock())
        if refused is not None:
            if self._refusals.get(request.expert) != refused:
                self._refusals[request.expert] = self.last_error = refused
                self._log.error("expert_unusable", expert=name_of(request.expert), reason=refused)
            self.end_all([request])

    # Parked

    def park(self, requests: Iterable[Request]) -> None:
        """Let images wait until `release`: a load of their expert hangs."""
        for request in requests:
            if not self._park(self.chain_of(request)):
                self.end(request, "expert_failed")

    def release(self, expert: ExpertId) -> None:
        """Resume images parked for `expert`: its hung load has ended, or another pool has the expert."""
        parked = self._parked.values()
        self._resume([chain for chain in parked if chain.read_again_s is None and chain.request.expert == expert])

    def retry_and_expire(self, now: float) -> float | None:
        """End images whose time is up and retry due ones. Return when to call this again."""
        for request in self._scheduler.expire(now):
            self.end(request, "deadline")
        if not self._parked:
            return None
        late = [chain for chain in self._parked.values() if chain.parked_until_s <= now]
        for chain in late:
            del self._parked[chain.request.request_id]
        again = [c for c in self._parked.values() if c.read_again_s is not None and c.read_again_s <= now]
        self.retries += len(again)
        self._resume(again)
        for chain in late:
            if chain.parked_until_s == chain.deadline_s:
                self.end(chain.request, "deadline")
            elif chain.read_again_s is None:
                self.end(chain.request, "expert_failed")
            else:
                self.end_as_bad(chain.request, "its bytes could not be read")
        parked = self._parked.values()
        return min(
            (min(each.parked_until_s, each.read_again_s or each.parked_until_s) for each in parked), default=None
        )

    def _park(self, chain: Chain, *, reads_again: bool = False) -> bool:
        """Park an image; False if it has waited as long as it may."""
        now = self._clock()
        if chain.parked_since_s is None:
            chain.parked_since_s = now
        until_s = chain.parked_since_s + self._may_wait_s
        if now >= until_s:
            return False
        chain.parked_until_s = until_s if chain.deadline_s is None else min(until_s, chain.deadline_s)
        chain.read_again_s = now + _READ_AGAIN_S if reads_again else None
        self._parked[chain.request.request_id] = chain
        return True

    def _resume(self, chains: list[Chain]) -> None:
        for chain in chains:
            del self._parked[chain.request.request_id]
        for chain in chains:
            self._queue(chain)

    # Ends

    def end_as_bad(self, request: Request, reason: str) -> None:
        self.bad_images.append((self.chain_of(request).image, reason))
        self.end(request, "bad_image")

    def end_all(self, requests: Iterable[Request]) -> None:
        """End requests whose expert is gone or unusable."""
        for request in requests:
            chain = self.chain_of(request)
            if self._serves_no_more(chain):
                self.end(request, "edition_gone")
                continue
            # A line without any experts collects pictures to train them with.
            self.end(request, "expert_failed" if chain.catalog else "no_expert")

    def end(self, request: Request, reason: str) -> None:
        self._end(self._chains.pop(request.request_id), reason)

    def _end(self, chain: Chain, reason: str) -> None:
        """End an image that was not judged to its end: it is never a pass. The stages that ran are kept."""
        self._finish(Verdict(chain.image, "unknown", reason=reason, stages=tuple(chain.stages)))

    def _finish(self, verdict: Verdict) -> None:
        self.completed += 1
        self.verdicts.append(verdict)
