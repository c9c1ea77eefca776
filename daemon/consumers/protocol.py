"""What a consumer is: the one interface between the results and whatever they are brought to (docs/plant.md).

A runner owns everything that is the same for each: reading the results, the durable position, gaps, back-off, the
state that people see. A consumer knows its protocol and nothing else.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

#: A message of the results stream exactly as published (PROTOCOL.md, Results stream), with its `topic` added.
Message = dict[str, Any]

#: What people see of a consumer: its connection stands; it was told no, which a person has to mend; or it waits for
#: its next attempt, which time may mend.
State = Literal["connected", "refused", "waiting"]


class Consumer(Protocol):
    """Brings messages somewhere. One call at a time; after an error `close`, and a new `open` when it is due."""

    async def open(self, position: int) -> None:
        """Connect, before anything is delivered; everything up to `position` was. DeliveryError where that fails."""
        ...

    async def deliver(self, messages: Sequence[Message]) -> int:
        """Bring `messages`, in the order of their `seq`, where they belong.

        Answer the `seq` up to which all of them are there for good; what comes after it is given again. With no
        messages, only find out whether the connection still stands, and answer 0. DeliveryError where that is lost.
        """
        ...

    async def close(self) -> None:
        """Say goodbye if that is possible, and let go of the connection; never DeliveryError, and never for long."""
        ...


class DeliveryError(Exception):
    """Nothing can be delivered now. The text says what was refused, by whom, and what to do."""

    def __init__(self, reason: str, state: Literal["refused", "waiting"] = "waiting") -> None:
        super().__init__(reason)
        self.reason = reason
        self.state: Literal["refused", "waiting"] = state
