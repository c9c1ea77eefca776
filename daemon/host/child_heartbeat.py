"""Whether a process beside the line still lives: one that is well beats once a second, from its event loop.

A process that is stopped, waits for itself or turns in circles does not end, and nobody would start it again: it is
silent. Beats are counted by an eventfd, which never fills and which a child cannot hold anything up with.
"""

import asyncio
import os
from collections.abc import Callable

_BEAT_EVERY_S = 1.0
#: Until its first beat a child has so many times as long: at low priority on a crowded machine a start takes minutes.
_TIMES_FOR_A_START = 10
#: What one look adds to a silence at the most: where the daemon itself stood still, its children may have as well.
_LOOK_S = 0.2


async def beat(fd: int | None, is_well: Callable[[], bool] = lambda: True) -> None:
    """In the child's event loop: a beat each second in which it `is_well`. Nothing where nobody listens (None)."""
    while fd is not None:
        if is_well():
            os.eventfd_write(fd, 1)
        await asyncio.sleep(_BEAT_EVERY_S)


class Heartbeat:
    """The heart of one process as the daemon hears it: made with that process, asked often, closed with it."""

    def __init__(self, now_s: float, hung_after_s: float) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._hung_after_s = hung_after_s
        self._silent_s = 0.0
        self._looked_s = now_s
        #: When it last beat; None before its first beat.
        self.heard_s: float | None = None

    def hangs(self, now_s: float) -> bool:
        """Whether it was silent for longer than it may be, as far as the daemon has looked."""
        if self._has_beaten():
            self._silent_s, self.heard_s = 0.0, now_s
        else:
            self._silent_s += min(now_s - self._looked_s, _LOOK_S)
        self._looked_s = now_s
        return self._silent_s >= self.patience_s

    @property
    def patience_s(self) -> float:
        """How long its process may be silent now."""
        return self._hung_after_s * (_TIMES_FOR_A_START if self.heard_s is None else 1)

    def close(self) -> None:
        os.close(self.fd)

    def _has_beaten(self) -> bool:
        try:
            return os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False
