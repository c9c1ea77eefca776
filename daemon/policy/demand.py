"""One demand table, late binding (`coserve-plus`, DESIGN.md §7): a free executor pulls, the loader runs ahead.

Every index here is by expert, so that an arrival costs O(log experts) whatever the number of queued requests.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from daemon.policy.age import Deadlines, Share
from daemon.policy.discipline import Evict, Want
from daemon.policy.evict import LeastWanted
from daemon.policy.floor import SHARE_UNITS, Floor
from daemon.policy.prefetch import Wanted
from daemon.policy.ranking import Ranking
from daemon.policy.request import ExecutorId, PoolId, Request, RequestId
from experts.spec import ExpertId

#: Loads that do not fit now are passed over for less wanted ones, up to this many.
LOOK_PAST = 4
#: A group of more than this many full CPU batches is worth a GPU load although it is resident on the CPU.
TAKEOVER_BATCHES = 2
#: Expected requests for which an expert that nobody waits for yet may replace another.
WORTH_EVICTING = 0.5


@dataclass(slots=True)
class _Group:
    """Queued requests of one expert, oldest first. `promised`: what preliminaries will send, in SHARE_UNITS."""

    requests: OrderedDict[RequestId, Request] = field(default_factory=OrderedDict[RequestId, Request])
    running: int = 0
    promised: int = 0

    @property
    def demand(self) -> int:
        return len(self.requests) * SHARE_UNITS + self.promised

    @property
    def head(self) -> Request | None:
        return next(iter(self.requests.values()), None)


@dataclass(slots=True)
class _Shelf:
    """The groups whose expert is resident in one pool: by size of the next batch, by age, by what may go."""

    fullest: Ranking[ExpertId] = field(default_factory=Ranking[ExpertId])
    turn: Ranking[ExpertId] = field(default_factory=Ranking[ExpertId])
    keep: LeastWanted = field(default_factory=LeastWanted)


class DemandTable:
    """Groups by expert. `max_wait_s`: a request that waited as long pulls its group forward.

    `margin_s`: so does one whose deadline is this near.
    """

    def __init__(
        self, floor: Floor, deadlines: Deadlines, *, max_wait_s: float, margin_s: float, age_share: float
    ) -> None:
        self._floor = floor
        self._deadlines = deadlines
        self._max_wait_s = max_wait_s
        self._margin_s = margin_s
        self._groups: dict[ExpertId, _Group] = {}
        self._shelves = {pool: _Shelf() for pool in floor.pools}
        self._batch_share = {pool: Share(age_share) for pool in floor.pools}
        self._load_share = {pool: Share(age_share) for pool in floor.pools}
        cpu_batch = max((facts.max_batch for facts in floor.pools.values() if facts.processor == "cpu"), default=1)
        self._wanted = Wanted(floor, TAKEOVER_BATCHES * cpu_batch)

    def add(self, request: Request) -> None:
        self._group(request.expert).requests[request.request_id] = request
        self._promise(request.expert, 1)
        self._refresh(request.expert)

    def discard(self, request: Request) -> None:
        del self._group(request.expert).requests[request.request_id]
        self._promise(request.expert, -1)
        self._refresh(request.expert)

    def take(self, executor: ExecutorId, now: float) -> tuple[Request, ...]:
        pool = self._floor.executors[executor].pool
        expert = self._choose(pool, now)
        if expert is None:
            return ()
        group = self._groups[expert]
        bound = self._floor.max_batch(pool, expert)
        near = self._deadlines.nearest(expert, now + self._margin_s, bound)
        batch = [group.requests.pop(request.request_id) for request in near]
        while group.requests and len(batch) < bound:
            batch.append(group.requests.popitem(last=False)[1])
        group.running += len(batch)
        self._refresh(expert)
        return tuple(batch)

    def ended(self, expert: ExpertId, count: int) -> None:
        self._group(expert).running -= count
        self._promise(expert, -count)

    def moved(self, expert: ExpertId) -> None:
        self._refresh(expert)

    def wants(self, pool: PoolId, now: float) -> Iterator[Want]:
        if self._load_share[pool].can_spend():
            yield from self._aged(pool, now)
        # Nothing to run and nothing coming: whoever holds the memory holds it only for requests that are yet to come.
        is_idle = self._shelves[pool].fullest.first() is None and self._floor.ledgers[pool].loading_count == 0
        looked_past = 0
        for expert in self._wanted.by_demand(pool):
            if looked_past == LOOK_PAST:
                return
            if not self._floor.fits(pool, expert) or self._floor.has_failed(expert, now):
                continue
            looked_past += 1
            group = self._groups[expert]
            if group.requests:
                yield Want(expert, "demand", "anybody" if is_idle else "unwanted")
            else:
                likely = group.promised >= WORTH_EVICTING * SHARE_UNITS
                yield Want(expert, "prefetch", "unwanted" if likely else "nobody")

    def granted(self, want: Want, pool: PoolId) -> None:
        if want.aged:
            self._load_share[pool].spend()
        else:
            self._load_share[pool].earn()

    def victims(self, pool: PoolId, evict: Evict) -> Iterable[ExpertId]:
        keep = self._shelves[pool].keep
        match evict:
            case "nobody":
                return ()
            case "unwanted":
                return keep.unwanted()
            case "anybody":
                return keep.ordered()

    def requests_of(self, expert: ExpertId) -> tuple[Request, ...]:
        group = self._groups.get(expert)
        return () if group is None else tuple(group.requests.values())

    def queued(self) -> dict[ExpertId, int]:
        return {expert: len(group.requests) for expert, group in self._groups.items() if group.requests}

    def next_turn_s(self, now: float) -> float | None:
        turns: list[float] = []
        first = self._wanted.first_turn()
        if first is not None:
            turns.append(first[1])
        for shelf in self._shelves.values():
            head = shelf.turn.first()
            if head is not None:
                turns.append(float(head[1][0]))
        return min((turn_s for turn_s in turns if turn_s > now), default=None)

    def rebuild(self) -> None:
        self._wanted.clear()
        for shelf in self._shelves.values():
            shelf.fullest.clear()
            shelf.turn.clear()
            shelf.keep.clear()
        for expert in [expert for expert, group in self._groups.items() if not group.requests and not group.running]:
            del self._groups[expert]
        for group in self._groups.values():
            group.promised = 0
        for expert, group in list(self._groups.items()):
            self._promise(expert, len(group.requests) + group.running)
        residents = [expert for ledger in self._floor.ledgers.values() for expert in ledger.resident]
        for expert in [*self._groups, *residents]:
            self._refresh(expert)

    def check(self) -> None:
        promised: dict[ExpertId, int] = {}
        for expert, group in self._groups.items():
            for subsequent, units in self._floor.then_units.get(expert, ()):
                sent = (len(group.requests) + group.running) * units
                promised[subsequent] = promised.get(subsequent, 0) + sent
        for expert, group in self._groups.items():
            if group.promised != promised.get(expert, 0) or group.running < 0:
                raise AssertionError(f"{expert}: demand {group.promised}, recounted {promised.get(expert, 0)}")
            for pool, shelf in self._shelves.items():
                if (expert in shelf.fullest) != (bool(group.requests) and self._floor.can_run(pool, expert)):
                    raise AssertionError(f"{expert}: its place on the shelf of {pool} is wrong")
                turn = shelf.turn.rank(expert)
                if turn is not None and turn[0] != self._turn_s(expert, group.head):
                    raise AssertionError(f"{expert}: its turn on {pool} is out of date")

    def _choose(self, pool: PoolId, now: float) -> ExpertId | None:
        """The fullest group, or one that is due, at its bounded share of the turns.

        The fullest group is never the one that is due: in an overload its oldest request is older than anybody's.
        """
        shelf, share = self._shelves[pool], self._batch_share[pool]
        fullest = self._first_steady(pool, shelf.fullest)
        if fullest is None:
            return None
        if share.can_spend():
            due = self._first_steady(pool, shelf.turn, fullest)
            turn = None if due is None else shelf.turn.rank(due)
            if turn is not None and float(turn[0]) <= now:
                share.spend()
                return due
        share.earn()
        return fullest

    def _first_steady(
        self, pool: PoolId, ranking: Ranking[ExpertId], besides: ExpertId | None = None
    ) -> ExpertId | None:
        """The first of `ranking` that need not become idle, other than `besides`."""
        draining = self._floor.draining[pool]
        first = ranking.first()
        if first is None or (first[0] not in draining and first[0] != besides):
            return None if first is None else first[0]
        return next((expert for expert in ranking.ordered() if expert not in draining and expert != besides), None)

    def _aged(self, pool: PoolId, now: float) -> Iterator[Want]:
        for expert in self._wanted.by_turn():
            if self._wanted.turn_s(expert) > now:
                return
            if self._floor.fits(pool, expert) and not self._floor.has_failed(expert, now):
                yield Want(expert, "demand", "anybody", aged=True)
                return

    def _group(self, expert: ExpertId) -> _Group:
        group = self._groups.get(expert)
        if group is None:
            group = self._groups[expert] = _Group()
        return group

    def _promise(self, expert: ExpertId, count: int) -> None:
        for subsequent, units in self._floor.then_units.get(expert, ()):
            self._group(subsequent).promised += count * units
            self._refresh(subsequent)

    def _refresh(self, expert: ExpertId) -> None:
        """Put `expert` where its group and its residency now belong, in every index."""
        group = self._group(expert)
        head, queued = group.head, len(group.requests)
        turn_s = self._turn_s(expert, head)
        for pool, shelf in self._shelves.items():
            if not self._floor.can_run(pool, expert):
                shelf.fullest.discard(expert)
                shelf.turn.discard(expert)
                shelf.keep.forget(expert)
                continue
            shelf.keep.put(expert, group.demand, self._floor.usage(expert))
            if head is None or turn_s is None:
                shelf.fullest.discard(expert)
                shelf.turn.discard(expert)
            else:
                images = min(queued, self._floor.max_batch(pool, expert))
                shelf.fullest.put(expert, (-images, head.arrived_s, head.request_id))
                shelf.turn.put(expert, (turn_s, head.request_id))
        self._wanted.put(expert, group.demand, queued, head, turn_s)

    def _turn_s(self, expert: ExpertId, head: Request | None) -> float | None:
        """When the group becomes urgent: its oldest request has waited `max_wait_s`, or a deadline is near."""
        if head is None:
            return None
        latest_s = self._deadlines.latest_start_s(expert)
        waited_s = head.arrived_s + self._max_wait_s
        return waited_s if latest_s is None else min(waited_s, latest_s - self._margin_s)
