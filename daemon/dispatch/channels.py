"""Channels for weights: one transfer at a time on each, urgent loads before loads that may be needed later.

All pools of a machine share the disk as one channel; each GPU has one from host memory, and host memory its own. Two
simultaneous transfers would each take twice as long.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import structlog

from daemon.policy.actions import Cause, Load
from daemon.policy.request import PoolId, device_of

T = TypeVar("T")

#: Lower numbers go first.
_URGENCY: dict[Cause, int] = {"demand": 0, "pin": 0, "prefetch": 1, "startup": 2}
#: How many more urgent transfers may overtake a waiting one. Otherwise a pool whose only load in flight is part of its
#: initial fill could never load what its images need, while other pools keep the channel busy.
PATIENCE = 8


class WaitingLine(Generic[T]):
    """Transfers that wait for one channel: by urgency, then arrival, with bounded overtaking."""

    def __init__(self) -> None:
        self._lanes: tuple[deque[T], ...] = tuple(deque() for _ in range(max(_URGENCY.values()) + 1))
        self._overtaken = [0] * len(self._lanes)

    def add_transfer(self, cause: Cause, transfer: T) -> None:
        self._lanes[_URGENCY[cause]].append(transfer)

    def next_transfer(self) -> T | None:
        waiting = [urgency for urgency, lane in enumerate(self._lanes) if lane]
        if not waiting:
            return None
        chosen = next((urgency for urgency in waiting if self._overtaken[urgency] >= PATIENCE), waiting[0])
        for urgency in waiting:
            self._overtaken[urgency] += urgency > chosen
        self._overtaken[chosen] = 0
        return self._lanes[chosen].popleft()


#: A load, and calls that move its bytes and receive the result; neither may raise.
_Transfer = tuple[Load, Callable[[], Any], Callable[[Any], None]]

#: Hung threads of one channel; beyond this number its disk is dead, and further loads wait for it.
_MAX_HUNG_THREADS = 4


class Channel:
    """A thread that makes one transfer after the other. Each pool that uses it opens it, and closes it when done."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: WaitingLine[_Transfer] = WaitingLine()
        self._changed = threading.Condition()
        self._users = 0
        self._closed = False
        self._left_behind: list[threading.Thread] = []
        self.under_way: tuple[Load, float] | None = None
        self._thread = self._new_thread()
        self._log: Any = structlog.get_logger("channel").bind(channel=name)

    def open(self) -> None:
        with self._changed:
            self._users += 1
            if self._users == 1 and not self._closed:
                self._thread.start()

    def transfer(self, load: Load, carry_out: Callable[[], T], done: Callable[[T], None]) -> None:
        """Call `carry_out` when its turn comes; `done` gets its result once `load` is not `under_way` any more."""
        with self._changed:
            self._waiting.add_transfer(load.cause, (load, carry_out, done))
            self._changed.notify_all()

    def abandon(self, load: Load) -> None:
        """If `load` is under way, leave its thread behind and go on in a new one."""
        with self._changed:
            self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
            if self.under_way is None or self.under_way[0] != load or self._closed:
                return
            if len(self._left_behind) >= _MAX_HUNG_THREADS:
                self._log.error("channel_stalled", loads=len(self._left_behind) + 1)
                return
            self._left_behind.append(self._thread)
            self.under_way = None
            self._thread = self._new_thread()
            self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Close; the last user finishes the running transfer and drops waiting ones. False after `timeout_s`."""
        with self._changed:
            self._users -= 1
            if self._users > 0 or self._thread.ident is None:
                return True
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name=f"loader {self._name}", daemon=True)

    def _run(self) -> None:
        while (transfer := self._next()) is not None:
            _, carry_out, done = transfer
            try:
                done(self._carry_out(carry_out))
            except Exception:  # noqa: BLE001  a defect of one transfer must not stop the others
                self._log.exception("transfer_defect")

    def _carry_out(self, carry_out: Callable[[], Any]) -> Any:
        try:
            return carry_out()
        finally:
            with self._changed:
                if threading.current_thread() is self._thread:
                    self.under_way = None

    def _next(self) -> _Transfer | None:
        with self._changed:
            while not self._closed and threading.current_thread() is self._thread:
                transfer = self._waiting.next_transfer()
                if transfer is not None:
                    self.under_way = (transfer[0], time.monotonic())
                    return transfer
                self._changed.wait()
        return None


class Channels:
    def __init__(self) -> None:
        self.disk = Channel("disk")
        self._copying: dict[str, Channel] = {}

    def copying_to(self, pool: PoolId) -> Channel:
        name = copy_channel(pool)
        channel = self._copying.get(name)
        if channel is None:
            channel = self._copying[name] = Channel(name)
        return channel


def copy_channel(pool: PoolId) -> str:
    """Return the GPU, or "memory": CPU pools and the RAM tier share the bandwidth of host memory."""
    device = device_of(pool)
    return device if device.startswith("cuda") else "memory"
