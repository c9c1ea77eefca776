"""A kind of consumer: its settings and its connection. The only interface between results and plant (docs/plant.md).

A runner owns everything that all kinds share: reading the results, the durable position, gaps, back-off, the state
that people see. A kind knows its own protocol and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

#: A message of the results stream exactly as published (PROTOCOL.md, Results stream), with its `topic` added.
Message = dict[str, Any]
ResultKind = Literal["inspections", "boards", "generations", "reviews"]

#: The state that people see: `connected`; `refused`, which a person has to correct; or `waiting` for the next attempt,
#: which may succeed.
State = Literal["connected", "refused", "waiting"]

#: The key of a setting below its consumer: `("tls", "ca")`.
SettingKey = tuple[str, ...]
_Section = TypeVar("_Section", bound=BaseModel)
#: Mistakes or warnings, each with the key that it is about.
KeyedTexts = list[tuple[SettingKey, str]]


class Consumer(Protocol):
    """Delivers messages, one call at a time; after an error the runner calls `close`, and later `open` again."""

    async def open(self, position: int) -> None:
        """Connect. Everything up to `position` is delivered already. Raises DeliveryError if there is no connection."""
        ...

    async def deliver(self, messages: Sequence[Message]) -> int:
        """Deliver `messages` in the order of their `seq`; return the `seq` up to which all are delivered durably.

        Later ones are handed over again. Without messages, only check that the connection is still there, and return 0.
        Raises DeliveryError if the connection is lost.
        """
        ...

    async def close(self) -> None:
        """End the connection, in good order if that is possible; quick, and never raises DeliveryError."""
        ...


class DeliveryError(Exception):
    """Nothing can be delivered now. The text says what was refused, by whom, and what to do."""

    def __init__(self, reason: str, state: Literal["refused", "waiting"] = "waiting") -> None:
        super().__init__(reason)
        self.reason = reason
        self.state: Literal["refused", "waiting"] = state


class ConsumerSettings(BaseModel):
    """Keys of every kind, which adds its own and its `kind`, and overrides what it needs; no method connects."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Extra of CoServe, package, and sentence, if the kind needs a package beside the core.
    extra: ClassVar[tuple[str, str, str] | None] = None
    #: Keys of files that only the daemon may read.
    secret_files: ClassVar[frozenset[SettingKey]] = frozenset()
    #: With `boards`, the state of a board is delivered again after each review of it (ResultsReader.board_states).
    repeats_boards: ClassVar[bool] = False

    kind: str
    send: Annotated[list[ResultKind], Field(min_length=1)] = ["boards", "inspections", "reviews"]
    start: Literal["oldest", "newest"] = "oldest"

    def make(self, identifier: str) -> Consumer:
        """Import the packages and return a consumer, not yet connected; `identifier` is the same at every start."""
        raise NotImplementedError

    def servers(self) -> list[tuple[str, int]]:
        """Return host and port of every server that it connects to."""
        return []

    def mistakes(self, others: Mapping[str, "ConsumerSettings"]) -> KeyedTexts:
        """Return contradictions between these settings, or with those of `others`, the consumers above it."""
        del others
        return []

    def file_problems(self) -> KeyedTexts:
        """Return what is wrong with the files that it names."""
        return []

    def warnings(self) -> KeyedTexts:
        """Return settings that work and are unsafe."""
        return []

    def files(self) -> dict[SettingKey, Path]:
        """Return every file that it names, by key."""
        files: dict[SettingKey, Path] = {}
        _placed(self, files.setdefault, ())
        return files

    def resolved(self, place: Callable[[Path], Path]) -> Self:
        """Return the same settings with `place` applied to each file."""
        return _placed(self, lambda _, file: place(file), ())


def _placed(section: _Section, place: Callable[[SettingKey, Path], Path], above: SettingKey) -> _Section:
    update: dict[str, Any] = {}
    for name in type(section).model_fields:
        match getattr(section, name):
            case Path() as file:
                update[name] = place((*above, name), file)
            case BaseModel() as inner:
                update[name] = _placed(inner, place, (*above, name))
            case _:
                pass
    return section.model_copy(update=update)
