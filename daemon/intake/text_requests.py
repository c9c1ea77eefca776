"""Answer `generate`: check that the model exists and can continue the prompt, then accept it as an image.

The row is what makes a request for text durable; it has no payload. Only the intake thread calls.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from daemon.intake.backlog import Accounts, Peer
from daemon.records import AcceptedText, TextRequest
from daemon.wire.messages import Answer, Code, Generate, MessageError, answer
from routing_rules.routes import Routes

_FAILED_RETRY_MS = 500

Key = tuple[str, str]  # (source, id)


class TextReader(Protocol):
    """Queries to the results."""

    def find_text(self, source: str, request_id: str) -> TextRequest | None: ...


class TextModel(Protocol):
    """Facts about a model that are known without running it."""

    def problem(self, request: TextRequest) -> str | None:
        """Return why the model can never serve this request, with the name of the field; None if it can."""
        ...


class TextNotStored(Protocol):
    @property
    def reason(self) -> str: ...


#: The writer's reply: accepted, the earlier request with the same key, or the reason of a failure.
TextStored = AcceptedText | TextRequest | TextNotStored


class TextWriter(Protocol):
    """Makes requests durable; `reply` is called once, from another thread."""

    def write(self, request: TextRequest, reply: Callable[[TextStored], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class TextSettled:
    """The writer's reply to one request."""

    key: Key
    result: TextStored


@dataclass(slots=True)
class _InFlight:
    """A request at the writer, and the repetitions of it that came meanwhile."""

    peer: Peer
    request: TextRequest
    repeated: list[tuple[Peer, TextRequest]] = field(default_factory=list)


class TextAdmission:
    """Requests for text on their way to the disk."""

    def __init__(self, models: Mapping[str, TextModel], reader: TextReader, writer: TextWriter) -> None:
        self._models = models
        self._reader = reader
        self._writer = writer
        self._in_flight: dict[Key, _InFlight] = {}
        self._log = structlog.get_logger("intake")

    def take(
        self,
        accounts: Accounts,
        peer: Peer,
        message: Generate,
        routes: Routes,
        post: Callable[[TextSettled], None],
    ) -> Answer | None:
        """Return the answer; None if it follows once `post` was called. MessageError if it can never be accepted."""
        key, request = (message.source, message.image_id), _request(message)
        flight = self._in_flight.get(key)
        if flight is not None:
            return self._repeat(accounts, peer, message, request, flight)
        known = self._reader.find_text(*key)
        if known is not None:
            return _duplicate(accounts, key, differs=known != request)
        self._check(message, request, routes)
        busy = accounts.enter(peer, message, request.size_bytes)
        if busy is not None:
            return busy
        self._in_flight[key] = _InFlight(peer, request)
        accounts.count_unanswered(peer)
        self._writer.write(request, lambda result: post(TextSettled(key, result)))
        return None

    def settle(self, accounts: Accounts, settled: TextSettled) -> list[tuple[Peer, Answer]]:
        """Return the answers to a request and to its repetitions, once the writer has replied."""
        source, request_id = settled.key
        flight = self._in_flight.pop(settled.key, None)
        if flight is None:
            self._log.error("reply_without_message", source=source, id=request_id)
            return []
        everyone = [(flight.peer, flight.request), *flight.repeated]
        accounts.left_memory(source, flight.request.size_bytes)
        for peer, _ in everyone:
            accounts.answered(peer)
        if isinstance(settled.result, AcceptedText):
            accepted = answer("accepted", request_id, source, accounts.credit(source))
            repeats = [(p, _duplicate(accounts, settled.key, differs=r != flight.request)) for p, r in flight.repeated]
            return [(flight.peer, accepted), *repeats]
        accounts.not_stored(source, flight.request.size_bytes)
        if isinstance(settled.result, TextRequest):
            first = settled.result
            return [(peer, _duplicate(accounts, settled.key, differs=r != first)) for peer, r in everyone]
        reason = f"the request could not be stored: {settled.result.reason}"
        credit = accounts.credit(source)
        again = answer("busy", request_id, source, credit, retry_after_ms=_FAILED_RETRY_MS, reason=reason)
        return [(peer, again) for peer, _ in everyone]

    def _repeat(
        self, accounts: Accounts, peer: Peer, message: Generate, request: TextRequest, flight: _InFlight
    ) -> Answer | None:
        if accounts.is_over_credit(peer):
            return accounts.over_credit(message)
        flight.repeated.append((peer, request))
        accounts.count_unanswered(peer)
        return None

    def _check(self, message: Generate, request: TextRequest, routes: Routes) -> None:
        if request.board is not None and request.board.type not in routes.recipes:
            raise _refusal(message, "unknown_board", f"the rules name no board type {request.board.type!a}")
        model = self._models.get(request.model)
        if model is None:
            names = ", ".join(self._models) or "none"
            raise _refusal(message, "unknown_model", f"the configuration names no model {request.model!a}: {names}")
        problem = model.problem(request)
        if problem is not None:
            raise _refusal(message, "bad_field", problem)


def _request(message: Generate) -> TextRequest:
    return TextRequest(
        source=message.source,
        request_id=message.image_id,
        model=message.model,
        prompt=message.prompt,
        max_new_tokens=message.max_new_tokens,
        task=message.task,
        slo_ms=message.slo_ms,
        deadline_ms=message.deadline_ms,
        board=message.board,
        stream=message.stream,
    )


def _duplicate(accounts: Accounts, key: Key, *, differs: bool) -> Answer:
    source, request_id = key
    return answer("duplicate", request_id, source, accounts.credit(source), differs=differs)


def _refusal(message: Generate, code: Code, reason: str) -> MessageError:
    return MessageError(code, reason, message.image_id, message.source)
