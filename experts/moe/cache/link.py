"""A slower way to the weights than this machine has, for experiments: so many milliseconds for each expert."""

import threading
import time
from collections.abc import Callable


class SlowLink:
    """One serial channel: transfers follow each other, and none ends earlier than it may.

    All threads share it. A transfer begins where the last one ended, or now if that is later; a disk slower than the
    link stays as slow as it is. Nobody computes in the waiting: the thread sleeps without the interpreter's lock.
    """

    def __init__(
        self,
        ms_per_expert: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not ms_per_expert > 0:
            raise ValueError(f"a link of {ms_per_expert} ms per expert is none; give more than 0")
        self.ms_per_expert = ms_per_expert
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = clock()
        self._channel = threading.Lock()

    def carry(self, transfer: Callable[[], None]) -> None:
        """Do `transfer` in the time of one expert on this link, or longer where it takes longer."""
        with self._channel:
            self._free_at_s = max(self._free_at_s, self._clock()) + self.ms_per_expert / 1000
            transfer()
            # A sleep may end early by the clock's grain, hence the loop.
            while (left_s := self._free_at_s - self._clock()) > 0:
                self._sleep(left_s)
