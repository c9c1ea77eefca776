"""The position of a consumer, in a file of its own that outlives a kill and a power cut.

A restored database reuses numbers for other messages; its new epoch shows that. Marks remember when earlier messages
were made, so they find the last message that both databases have.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from daemon.host.folders import make_folder
from experts.durable import replace_durably

_MODE = 0o640


class PositionError(Exception):
    """A position file that cannot be used; the text says why."""


class Mark(NamedTuple):
    """A delivered message. `at` tells it from a message with the same `seq` in another history."""

    seq: int
    at: str


@dataclass(frozen=True, slots=True)
class DeliveryPosition:
    """Everything up to `seq` is delivered. `missed` counts what was pruned before delivery.

    `epoch` is the database's; None was saved by CoServe 1.0. What was pruned up to `counted_to` is counted
    already, or was gone before this consumer existed.
    """

    seq: Annotated[int, Field(ge=0, alias="position")]
    marks: tuple[Mark, ...] = ()
    missed: int = 0
    counted_to: int = 0
    epoch: str | None = None

    def moved(self, seq: int, there: Sequence[Mark] = ()) -> "DeliveryPosition":
        """Return the position after delivery up to `seq`; `there` are the messages in between that still exist."""
        after = max(self.seq, self.counted_to)
        gone = max(0, seq - after) - sum(after < mark.seq <= seq for mark in there)
        return replace(
            self,
            seq=seq,
            marks=_thinned((*self.marks, there[-1])) if there else self.marks,
            missed=self.missed + gone,
            counted_to=max(seq, self.counted_to),
        )

    def back_to(self, seq: int) -> "DeliveryPosition":
        return replace(self, seq=seq, marks=tuple(mark for mark in self.marks if mark.seq <= seq))


def _thinned(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Keep the oldest mark for each power-of-two distance from the newest."""
    newest = marks[-1].seq
    oldest: dict[int, Mark] = {}
    for mark in reversed(marks):
        oldest[(newest - mark.seq).bit_length()] = mark
    return tuple(sorted(oldest.values(), key=lambda mark: mark.seq))


_STORED = TypeAdapter(DeliveryPosition)


class PositionFile:
    """`NAME.position` of one consumer: a line of JSON and a line with its sha256."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.position"

    def load(self) -> DeliveryPosition | None:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PositionError(f"{self.path} cannot be read: {error.strerror}") from None
        text, _, checksum = content.rstrip(b"\n").partition(b"\n")
        if checksum.decode("ascii", "replace") != _checksum(text):
            raise PositionError(f"{self.path} is damaged: its second line is not the sha256 of its first")
        try:
            return _STORED.validate_json(text)
        except ValidationError:
            raise PositionError(f"{self.path} is damaged: its first line is not a position") from None

    def save(self, position: DeliveryPosition) -> None:
        make_folder(self.path.parent)
        text = _STORED.dump_json(position, by_alias=True)
        replace_durably(self.path, text + b"\n" + _checksum(text).encode() + b"\n", _MODE)


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
