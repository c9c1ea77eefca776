"""First come, first served (`samba`): one queue per executor, bound at arrival, served strictly in order."""

from collections import OrderedDict
from collections.abc import Iterable

from daemon.policy.discipline import Evict, Want
from daemon.policy.evict import LeastRecentlyUsed
from daemon.policy.floor import Floor
from daemon.policy.request import ExecutorId, PoolId, Request, RequestId
from experts.spec import ExpertId


class FirstComeFirstServed:
    """The stream of one executor: nothing is loaded before the head of the queue needs it, nothing overtakes.

    A later step of a chain goes to the front: a detector runs right after its classifier
    (data/scenarios/README.md, `samba`).
    """

    def __init__(self, floor: Floor, executor: ExecutorId) -> None:
        self._floor = floor
        self._executor = executor
        self._pool = floor.executors[executor].pool
        self._queue: OrderedDict[RequestId, Request] = OrderedDict()
        self._running = 0
        self._lru = LeastRecentlyUsed()

    def add(self, request: Request) -> None:
        self._queue[request.request_id] = request
        if request.step > 0:
            self._queue.move_to_end(request.request_id, last=False)

    def discard(self, request: Request) -> None:
        del self._queue[request.request_id]

    def take(self, executor: ExecutorId, _now: float) -> tuple[Request, ...]:
        head = self._head()
        if executor != self._executor or head is None or not self._floor.can_run(self._pool, head.expert):
            return ()
        self._queue.popitem(last=False)
        self._running += 1
        self._lru.use(head.expert)
        return (head,)

    def ended(self, _expert: ExpertId, count: int) -> None:
        self._running -= count

    def moved(self, expert: ExpertId) -> None:
        if self._floor.ledgers[self._pool].is_ready(expert):
            self._lru.use(expert)
        else:
            self._lru.forget(expert)

    def wants(self, pool: PoolId, _now: float) -> Iterable[Want]:
        head = self._head()
        # While a classifier runs, the next expert is unknown: it may be the detector behind it.
        if pool == self._pool and head is not None and self._running == 0:
            yield Want(head.expert, "demand", "anybody")

    def granted(self, _want: Want, _pool: PoolId) -> None:
        """Loads on demand have no budget to keep."""

    def victims(self, _pool: PoolId, evict: Evict) -> Iterable[ExpertId]:
        return () if evict == "nobody" else self._lru.ordered()

    def requests_of(self, expert: ExpertId) -> tuple[Request, ...]:
        return tuple(request for request in self._queue.values() if request.expert == expert)

    def queued(self) -> dict[ExpertId, int]:
        counts: dict[ExpertId, int] = {}
        for request in self._queue.values():
            counts[request.expert] = counts.get(request.expert, 0) + 1
        return counts

    def next_turn_s(self, _now: float) -> float | None:
        return None

    def rebuild(self) -> None:
        """Nothing here is derived from facts."""

    def check(self) -> None:
        if any(request_id != request.request_id for request_id, request in self._queue.items()):
            raise AssertionError("a queued request lies under another's number")
        if self._running < 0:
            raise AssertionError("more batches ended than began")

    def _head(self) -> Request | None:
        return next(iter(self._queue.values()), None)
