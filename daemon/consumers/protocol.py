"""A kind of consumer: its settings and its connection. The only interface between results and plant (docs/plant.md).

A runner owns what all kinds share: reading results, the durable position, gaps, back-off, the state people see.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from daemon.wire.keys import unusable

#: A message of the results stream exactly as published (PROTOCOL.md, Results stream), with its `topic` added.
Message = dict[str, Any]
ResultKind = Literal["inspections", "boards", "generations", "reviews"]

#: The state that people see: `connected`; `refused`, which a person has to correct; or `waiting` for the next attempt,
#: which may succeed.
State = Literal["connected", "refused", "waiting"]

#: The key of a setting below its consumer: `("tls", "ca")`.
SettingKey = tuple[str, ...]
#: Mistakes or warnings, each with the key that it is about.
KeyedTexts = list[tuple[SettingKey, str]]
SecretFiles = Mapping[SettingKey, Callable[[Path], object]]


class Consumer(Protocol):
    """Delivers messages, one call at a time; after an error the runner calls `close`, and later `open` again."""

    async def open(self, position: int) -> int | None:
        """Connect. Everything up to `position` is delivered already. Raises DeliveryError.

        A server that keeps its own position returns it if it is lower: everything after it is delivered again.
        """
        ...

    async def deliver(self, messages: Sequence[Message]) -> int:
        """Deliver `messages` in the order of `seq`; return the `seq` up to which all are delivered durably.

        Later ones come again. Without messages, check the connection and return 0. Raises DeliveryError if it is lost.
        """
        ...

    async def close(self) -> None:
        """Disconnect quickly, in good order if possible; never raises DeliveryError."""
        ...


class LineAccess(Protocol):
    """Questions to the line, which may block: call them in a thread. The file `alarms` may not exist."""

    @property
    def name(self) -> str: ...
    @property
    def alarms(self) -> Path: ...

    def end(self) -> tuple[int, str | None]:
        """Return the last `seq` and its epoch."""
        ...

    def at(self, seq: int) -> str | None:
        """Return `at` of the message `seq`, None if there is none (any more)."""
        ...

    def before_oldest(self) -> int:
        """Return the `seq` before the first message that is kept."""
        ...

    def defects(self) -> Mapping[str, str]:
        """Return defect names by code, from the newest rules."""
        ...

    def picture(self, inspection_id: int) -> bytes | None:
        """Return a kept picture, None if it is gone; NotYetError while its copy is still to be made."""
        ...

    def review(self, fields: Mapping[str, Any]) -> None:
        """Decide as control's `review` does. Raises ReviewAnswerError."""
        ...


class NotYetError(Exception):
    """The line cannot answer yet: ask again later."""


class ReviewAnswerError(Exception):
    """The line refused a decision; `is_final` if it always will."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final


class DeliveryError(Exception):
    """Delivery is impossible now. The text says what was refused, by whom, and what to do."""

    def __init__(self, reason: str, state: Literal["refused", "waiting"] = "waiting") -> None:
        super().__init__(reason)
        self.reason = reason
        self.state: Literal["refused", "waiting"] = state


class ConsumerSettings(BaseModel):
    """Settings of every kind; a kind adds its own and its `kind`. No method connects."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: Extra of CoServe, package, and sentence, if the kind needs a package beside the core.
    extra: ClassVar[tuple[str, str, str] | None] = None
    #: Files that only the daemon may read, by key, and what reads them.
    secret_files: ClassVar[SecretFiles] = {}
    #: With `boards`, the state of a board is delivered again after each review of it (ResultsReader.board_states).
    repeats_boards: ClassVar[bool] = False
    #: Messages that are read and handed over at once.
    batch: ClassVar[int] = 200

    kind: str
    send: Annotated[list[ResultKind], Field(min_length=1)] = ["boards", "inspections", "reviews"]
    start: Literal["oldest", "newest"] = "oldest"

    def make(self, identifier: str, line: LineAccess) -> Consumer:
        """Import the packages and return a consumer, not yet connected; `identifier` never changes."""
        raise NotImplementedError

    def servers(self) -> list[tuple[str, int]]:
        return []

    def mistakes(self, line: str, others: Mapping[str, "ConsumerSettings"]) -> KeyedTexts:
        """Return contradictions within these settings, with the line's name, or with `others`, the consumers above."""
        del line, others
        return []

    def file_problems(self) -> KeyedTexts:
        files = self.files()
        return unusable((key, files.get(key), read) for key, read in self.secret_files.items())

    def warnings(self) -> KeyedTexts:
        return []

    def files(self) -> dict[SettingKey, Path]:
        files: dict[SettingKey, Path] = {}
        placed(self, files.setdefault)
        return files


def placed(settings: Any, place: Callable[[SettingKey, Path], Path], above: SettingKey = ()) -> Any:
    """Return the same settings with `place` applied to each file in them and to its key."""
    match settings:
        case Path():
            return place(above, settings)
        case dict():
            return {name: placed(value, place, (*above, str(name))) for name, value in settings.items()}
        case list():
            return [placed(value, place, above) for value in settings]
        case BaseModel():
            given = {name: getattr(settings, name) for name in type(settings).model_fields}
            fields = {name: placed(value, place, (*above, name)) for name, value in given.items()}
            return settings.model_copy(update={name: new for name, new in fields.items() if new != given[name]})
        case _:
            return settings
