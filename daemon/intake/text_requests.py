"""The checks of `generate`: whether the model exists and can continue the prompt. Only the intake thread calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from daemon.records import AcceptedText, TextRequest
from daemon.storage.journal import WriteFailed
from daemon.wire.messages import Code, Generate, Message, MessageError
from routing_rules.routes import Routes

#: The writer's reply: accepted, the earlier request with the same key, or the reason of a failure.
TextStored = AcceptedText | TextRequest | WriteFailed


class TextReader(Protocol):
    """Queries to the results."""

    def find_text(self, source: str, request_id: str) -> TextRequest | None: ...


class TextModel(Protocol):
    """Facts about a model that are known without running it."""

    def problem(self, request: TextRequest) -> str | None:
        """Return why the model can never serve this request, with the name of the field; None if it can."""
        ...


class TextWriter(Protocol):
    """Makes requests durable; `reply` is called once, from another thread."""

    def write(self, request: TextRequest, reply: Callable[[TextStored], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class TextIntake:
    """The models of a line, and where their requests are stored."""

    models: Mapping[str, TextModel]
    reader: TextReader
    writer: TextWriter

    def check(self, message: Generate, routes: Routes) -> None:
        """Raise MessageError if this request can never be accepted."""
        request = message.request
        if request.board is not None and request.board.type not in routes.recipes:
            raise refusal(message, "unknown_board", f"the rules name no board type {request.board.type!a}")
        model = self.models.get(request.model)
        if model is None:
            names = ", ".join(self.models) or "none"
            raise refusal(message, "unknown_model", f"the configuration names no model {request.model!a}: {names}")
        problem = model.problem(request)
        if problem is not None:
            raise refusal(message, "bad_field", problem)


def refusal(message: Message, code: Code, reason: str) -> MessageError:
    """Return the error that refuses `message` for good."""
    return MessageError(code, reason, message.image_id, message.source)
