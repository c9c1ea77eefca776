"""Measured speed of processors that share a device: images per second of each pool, from the batches that ended."""

from collections.abc import Sequence

from daemon.policy.request import ExecutorFacts, PoolId

#: Weight of the newest batch.
_NEWEST = 0.05


class Pace:
    """A running mean of seconds per image and executor; executors of one device slow each other, which this sees."""

    def __init__(self, executors: Sequence[ExecutorFacts]) -> None:
        self._executors: dict[PoolId, int] = {}
        for facts in executors:
            self._executors[facts.pool] = self._executors.get(facts.pool, 0) + 1
        self._image_s: dict[PoolId, float] = {}

    def ran(self, pool: PoolId, images: int, seconds: float) -> None:
        each_s = seconds / max(1, images)
        before = self._image_s.get(pool, each_s)
        self._image_s[pool] = before + _NEWEST * (each_s - before)

    def images_per_s(self) -> float:
        """Return the rate of all pools together, if all were busy; 0 before the first batch has ended."""
        return sum(self._executors[pool] / each_s for pool, each_s in self._image_s.items() if each_s > 0.0)
