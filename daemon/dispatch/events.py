"""The drive's queue of events: put by any thread, taken by the drive's. Who asks for something waits for its answer."""

import queue
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any, TypeVar

from daemon.dispatch.orders import BatchReport, LoadEnd
from daemon.records import Accepted
from daemon.wire.control import ControlError
from experts.spec import ExpertId, ExpertSpec
from routing_rules.routes import Routes

R = TypeVar("R")

#: Events handled before the scheduler is asked again: many at once are cheap, too many leave executors idle.
_EVENTS_PER_TURN = 256
_ANSWER_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One of control's requests."""

    kind: str
    fields: Mapping[str, Any]
    answer: Future[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Reload:
    catalog: Mapping[ExpertId, ExpertSpec]
    routes: Routes
    answer: Future[None]


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Event = tuple[Accepted, ...] | BatchReport | LoadEnd | Ask | Reload | Stop


class Events:
    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(self, event: Event) -> None:
        self._waiting.put(event)

    def take(self, timeout_s: float | None) -> Iterator[Event]:
        """The events of one turn, waiting `timeout_s` for the first."""
        try:
            yield self._waiting.get(timeout=timeout_s) if timeout_s != 0.0 else self._waiting.get_nowait()
            for _ in range(_EVENTS_PER_TURN):
                yield self._waiting.get_nowait()
        except queue.Empty:
            pass

    def refuse_the_rest(self) -> None:
        """Whoever still waits for an answer hears that the line has stopped."""
        while True:
            try:
                event = self._waiting.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, Ask | Reload):
                event.answer.set_exception(ControlError("stopping", "the line is stopping"))


def answer_of(answer: Future[R]) -> R:
    try:
        return answer.result(_ANSWER_WITHIN_S)
    except FutureTimeoutError:
        raise ControlError("internal", f"the scheduler gave no answer within {_ANSWER_WITHIN_S:g} s") from None
