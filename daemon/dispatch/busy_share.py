"""How busy something was lately: two half-overlapping windows, O(1) per report."""


class BusyShare:
    """The share of the last `window_s` to twice `window_s` seconds spent busy, from 0 to 1."""

    def __init__(self, now: float, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._began_s = now
        self._busy_s = 0.0
        self._before_s = 0.0
        self._before_busy_s = 0.0

    def add(self, started_s: float, ended_s: float) -> None:
        self._roll(ended_s)
        self._busy_s += ended_s - started_s

    def share(self, now: float, running_since_s: float | None = None) -> float:
        """`running_since_s` is when what runs now began, None where it is idle."""
        self._roll(now)
        busy_s = self._before_busy_s + self._busy_s
        if running_since_s is not None:
            busy_s += now - running_since_s
        seconds = self._before_s + now - self._began_s
        return min(1.0, busy_s / seconds) if seconds > 0.0 else 0.0

    def _roll(self, now: float) -> None:
        if now - self._began_s >= self._window_s:
            self._before_s, self._before_busy_s = now - self._began_s, self._busy_s
            self._began_s, self._busy_s = now, 0.0
