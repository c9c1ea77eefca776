"""Heartbeat of a process beside the line: while it is well, its event loop beats once a second.

A process that is stopped, deadlocked or busy-looping does not end: its silence shows that it needs a restart. Beats are
counted by an eventfd, which never fills and which a child cannot hold anything up with.
"""

import asyncio
import os
from collections.abc import Callable

_BEAT_EVERY_S = 1.0
#: Factor on the allowed silence before the first beat: at low priority on a crowded machine a start takes minutes.
_TIMES_FOR_A_START = 10
#: Each check adds at most this to a silence: if the daemon itself was paused, its children may have been too.
_LOOK_S = 0.2


async def beat(fd: int | None, is_well: Callable[[], bool] = lambda: True) -> None:
    """Beat each second in which the process `is_well`, from its event loop. Without `fd` do nothing."""
    while fd is not None:
        if is_well():
            os.eventfd_write(fd, 1)
        await asyncio.sleep(_BEAT_EVERY_S)


class Heartbeat:
    """The daemon's end of one process's heartbeat: made with that process, asked often, closed with it."""

    def __init__(self, now_s: float, hung_after_s: float) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._hung_after_s = hung_after_s
        self._silent_s = 0.0
        self._looked_s = now_s
        #: When it last beat; None before its first beat.
        self.heard_s: float | None = None

    def hangs(self, now_s: float) -> bool:
        """Return True if it was silent for longer than allowed, counting only time in which the daemon itself ran."""
        if self._has_beaten():
            self._silent_s, self.heard_s = 0.0, now_s
        else:
            self._silent_s += min(now_s - self._looked_s, _LOOK_S)
        self._looked_s = now_s
        return self._silent_s >= self.patience_s

    @property
    def patience_s(self) -> float:
        """Seconds that its process may be silent now."""
        return self._hung_after_s * (_TIMES_FOR_A_START if self.heard_s is None else 1)

    def close(self) -> None:
        os.close(self.fd)

    def _has_beaten(self) -> bool:
        try:
            return os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False
