"""Channels: what bytes move over. One transfer at a time on each, what is waited for before what may be needed later.

The disk is one channel that all pools share; each GPU has one from host memory, and host memory has one to itself.
Two transfers at once on a channel would each take twice as long, and the first would arrive no sooner.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import structlog

from daemon.orders import device_of
from daemon.policy.actions import Cause
from daemon.policy.request import PoolId

T = TypeVar("T")

#: Smaller goes first.
_URGENCY: dict[Cause, int] = {"demand": 0, "pin": 0, "prefetch": 1, "startup": 2}
#: More urgent transfers that may go before one that waits. A pool whose only load in flight is its first fill could
#: otherwise never ask for what its images need, while other pools keep the channel busy.
PATIENCE = 8


class WaitingLine(Generic[T]):
    """Transfers that wait for one channel: by urgency, then in the order in which they came, overtaken boundedly."""

    def __init__(self) -> None:
        self._lanes: tuple[deque[T], ...] = tuple(deque() for _ in range(max(_URGENCY.values()) + 1))
        self._overtaken = [0] * len(self._lanes)

    def put(self, cause: Cause, transfer: T) -> None:
        self._lanes[_URGENCY[cause]].append(transfer)

    def take(self) -> T | None:
        """Whose turn it is; None where nobody waits."""
        waiting = [urgency for urgency, lane in enumerate(self._lanes) if lane]
        if not waiting:
            return None
        chosen = next((urgency for urgency in waiting if self._overtaken[urgency] >= PATIENCE), waiting[0])
        for urgency in waiting:
            self._overtaken[urgency] += urgency > chosen
        self._overtaken[chosen] = 0
        return self._lanes[chosen].popleft()


class Channel:
    """A thread that makes one transfer after the other. Whoever uses it opens it, and closes it when done."""

    def __init__(self, name: str) -> None:
        self._waiting: WaitingLine[Callable[[], None]] = WaitingLine()
        self._changed = threading.Condition()
        self._users = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"loader {name}", daemon=True)
        self._log: Any = structlog.get_logger("channel").bind(channel=name)

    def open(self) -> None:
        with self._changed:
            self._users += 1
            if self._users == 1 and not self._closed:
                self._thread.start()

    def submit(self, cause: Cause, transfer: Callable[[], None]) -> None:
        """Call `transfer` on the channel's thread when its turn comes. It must not raise."""
        with self._changed:
            self._waiting.put(cause, transfer)
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """The last one who closes it ends the transfer under way and gives up those that wait.

        False where that took longer than `timeout_s` seconds.
        """
        with self._changed:
            self._users -= 1
            if self._users > 0 or self._thread.ident is None:
                return True
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (transfer := self._next()) is not None:
            try:
                transfer()
            except Exception:  # noqa: BLE001  a defect of one transfer must not stop the others
                self._log.exception("transfer_defect")

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._closed:
                transfer = self._waiting.take()
                if transfer is not None:
                    return transfer
                self._changed.wait()
        return None


class Channels:
    """The channels of one machine."""

    def __init__(self) -> None:
        self.disk = Channel("disk")
        self._copying: dict[str, Channel] = {}

    def copying_to(self, pool: PoolId) -> Channel:
        """The way into `pool` for bytes that are in memory already."""
        name = copy_channel(pool)
        channel = self._copying.get(name)
        if channel is None:
            channel = self._copying[name] = Channel(name)
        return channel


def copy_channel(pool: PoolId) -> str:
    """Its GPU's name, or "memory": the CPU's pools and the RAM tier share the bandwidth of host memory."""
    device = device_of(pool)
    return device if device.startswith("cuda") else "memory"
