"""One demand table, late binding: a free executor pulls, the loader runs ahead (`coserve-plus`).

See docs/how-it-schedules.md.
"""

from collections.abc import Iterable, Iterator

from daemon.policy.discipline import Evict, Want
from daemon.policy.late.age import Deadlines, UrgentShare
from daemon.policy.late.balance import Balance
from daemon.policy.late.groups import Groups
from daemon.policy.late.pace import Pace
from daemon.policy.presets import Preset, Tuning
from daemon.policy.ranking import Ranking
from daemon.policy.request import ExecutorId, PoolId, Request
from daemon.policy.residency import SHARE_UNITS, Residency
from experts.spec import ExpertId

#: Loads that do not fit now are passed over for less wanted ones, up to this many.
LOOK_PAST = 4
#: Expected requests for which an expert without queued requests may replace another.
WORTH_EVICTING = 0.5


class DemandTable:
    """Groups by expert. A request that waited `tuning.max_wait_s`, or is near its deadline, pulls its group forward."""

    def __init__(self, residency: Residency, deadlines: Deadlines, pace: Pace, preset: Preset, tuning: Tuning) -> None:
        self._residency = residency
        self._deadlines = deadlines
        self._in_flight = preset.loads_in_flight
        self._makes_room = preset.makes_room
        self._margin_s = tuning.deadline_margin_s
        self._groups = Groups(
            residency,
            deadlines,
            foresight=preset.foresight,
            balances=preset.balances,
            max_wait_s=tuning.max_wait_s,
            margin_s=tuning.deadline_margin_s,
        )
        self._balance = Balance(residency, self._groups, pace, balances=preset.balances)
        #: Pools that should load an expert and cannot, because every resident is wanted.
        self._blocked = dict.fromkeys(residency.pools, False)
        self._batch_share = {pool: UrgentShare(preset.age_share) for pool in residency.pools}
        self._load_share = {pool: UrgentShare(preset.age_share) for pool in residency.pools}
        #: The residency's `room_changes` when the groups were last updated.
        self._room_changes = residency.room_changes
        #: The last answer to `next_turn_s`, while nothing changed and its time has not come.
        self._next_turn_s: float | None = None
        self._turn_is_known = False

    # Requests

    def add(self, request: Request) -> None:
        self._groups[request.expert].requests[request.request_id] = request
        self._groups.note(request.expert)
        self._groups.promise(request.expert, 1)

    def discard(self, request: Request) -> None:
        del self._groups[request.expert].requests[request.request_id]
        self._groups.note(request.expert)
        self._groups.promise(request.expert, -1)

    def take(self, executor: ExecutorId, now: float) -> tuple[Request, ...]:
        pool = self._residency.executors[executor].pool
        self._settle()
        expert = self._choose(pool, now)
        if expert is None:
            return ()
        group = self._groups[expert]
        bound = self._residency.max_batch(pool, expert)
        near = self._deadlines.nearest(expert, now + self._margin_s, bound)
        batch = [group.requests.pop(request.request_id) for request in near]
        while group.requests and len(batch) < bound:
            batch.append(group.requests.popitem(last=False)[1])
        group.running += len(batch)
        self._groups.note(expert)
        return tuple(batch)

    def ended(self, _executor: ExecutorId, expert: ExpertId, count: int) -> None:
        self._groups[expert].running -= count
        self._groups.promise(expert, -count)

    def moved(self, expert: ExpertId) -> None:
        self._groups.moved(expert)

    # Memory

    def wants(self, pool: PoolId, now: float) -> Iterator[Want]:
        self._settle()
        shelf, ledger = self._groups.shelves[pool], self._residency.ledgers[pool]
        copying = self._residency.copying[pool]
        room_bytes = ledger.free_bytes + shelf.keep.unwanted_bytes
        self._blocked[pool] = False
        may_age = self._load_share[pool].can_spend()
        # Nothing to run and no load under way: the residents are kept only for requests that have not arrived.
        is_idle = not shelf.is_ram and ledger.loading_count == 0 and shelf.fullest.first() is None
        if shelf.is_gpu and copying < self._in_flight:
            if is_idle or room_bytes >= self._residency.least_bytes:
                yield from self._copies(pool, room_bytes, now, is_idle=is_idle)
            if may_age:
                yield from self._aged(pool, now, staged=True)
        if ledger.loading_count - copying >= self._in_flight:
            return
        if may_age and not shelf.is_ram:
            yield from self._aged(pool, now)
        beside_gpu = self._residency.has_gpu and not shelf.is_gpu and not shelf.is_ram
        ranking = self._groups.wanted.least_wanted if beside_gpu else self._groups.wanted.reads
        if is_idle or room_bytes >= self._residency.least_bytes:
            yield from self._reads(pool, ranking, now, room_bytes, is_idle=is_idle)
        self._blocked[pool] = ranking.first() is not None
        if beside_gpu and is_idle:
            largest = self._balance.to_help(pool)
            if largest is not None:
                yield Want(largest, "demand", "unwanted")

    def granted(self, want: Want, pool: PoolId) -> None:
        if want.aged:
            self._load_share[pool].spend()
        else:
            self._load_share[pool].earn()

    def victims(self, pool: PoolId, evict: Evict) -> Iterable[ExpertId]:
        self._settle()
        keep = self._groups.shelves[pool].keep
        match evict:
            case "none":
                return ()
            case "unwanted":
                return keep.unwanted()
            case "any":
                return keep.ordered()

    # Looking in

    def requests_of(self, expert: ExpertId) -> tuple[Request, ...]:
        group = self._groups.find(expert)
        return () if group is None else tuple(group.requests.values())

    def queued(self) -> dict[ExpertId, int]:
        return {expert: len(group.requests) for expert, group in self._groups.items() if group.requests}

    def next_turn_s(self, now: float) -> float | None:
        self._settle()
        if not self._turn_is_known or (self._next_turn_s is not None and self._next_turn_s <= now):
            self._turn_is_known = True
            rankings = [self._groups.wanted.turns, *(shelf.turn for shelf in self._groups.shelves.values())]
            heads = [head for head in (ranking.first() for ranking in rankings) if head is not None]
            self._next_turn_s = min((float(rank[0]) for _, rank in heads if float(rank[0]) > now), default=None)
        return self._next_turn_s

    def rebuild(self) -> None:
        self._groups.rebuild()

    def check(self) -> None:
        self._groups.check()

    # Choosing

    def _settle(self) -> None:
        if self._room_changes != self._residency.room_changes:
            self._room_changes = self._residency.room_changes
            self._groups.room_changed()
        if self._groups.settle():
            self._turn_is_known = False

    def _choose(self, pool: PoolId, now: float) -> ExpertId | None:
        """Return the fullest group, or one that is due, at its bounded share of the turns.

        The fullest group never counts as due: in an overload it has the oldest request of all. If the disk is the
        bottleneck and no expert can be loaded, return the group that is finished soonest: its memory is needed.
        """
        shelf, share = self._groups.shelves[pool], self._batch_share[pool]
        makes_room = self._makes_room and self._blocked[pool] and self._balance.disk_binds()
        fullest = self._first_steady(pool, shelf.smallest if makes_room else shelf.fullest)
        if fullest is None or not self._balance.pays(pool, fullest):
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
        """Return the first of `ranking` that need not become idle, other than `besides`."""
        draining = self._residency.draining[pool]
        return next((expert for expert in ranking.ordered() if expert not in draining and expert != besides), None)

    def _reads(
        self, pool: PoolId, ranking: Ranking[ExpertId], now: float, room_bytes: int, *, is_idle: bool
    ) -> Iterator[Want]:
        """Yield the groups whose expert is nowhere, in the order of `ranking`."""
        looked_past = 0
        for expert in ranking.ordered():
            if looked_past >= LOOK_PAST:
                return
            if not self._residency.takes(pool, expert) or self._residency.has_failed(expert, now):
                continue
            group = self._groups[expert]
            if is_idle and not group.requests and self._groups.queued:
                continue  # requests that preliminaries will send can wait until one of them has begun
            looked_past += 1
            if is_idle and group.requests:
                yield Want(expert, "demand", "any")
            elif self._residency.bytes_of(expert) <= room_bytes:
                likely = bool(group.requests) or group.promised >= WORTH_EVICTING * SHARE_UNITS
                yield Want(expert, "demand" if group.requests else "prefetch", "unwanted" if likely else "none")

    def _copies(self, pool: PoolId, room_bytes: int, now: float, *, is_idle: bool) -> Iterator[Want]:
        """Yield experts that only host memory has: all staged ones; of the CPU's, those it outgrew, or any if idle."""
        for place, expert in enumerate(self._groups.wanted.staged.ordered()):
            if place == LOOK_PAST:
                break
            has_requests = bool(self._groups[expert].requests)
            makes_place = is_idle and has_requests
            if self._may_come(pool, expert, None if makes_place else room_bytes, now):
                cause = "demand" if has_requests else "prefetch"
                yield Want(expert, cause, "any" if makes_place else "unwanted")
        has_work = self._groups.shelves[pool].fullest.first() is not None
        for place, expert in enumerate(self._groups.wanted.copies.ordered()):
            is_worth = self._balance.outgrown(expert) or (
                not has_work and self._residency.source_for(pool, expert) is not None
            )
            if place == LOOK_PAST or not is_worth:
                return
            if self._may_come(pool, expert, room_bytes, now):
                yield Want(expert, "demand", "unwanted")

    def _may_come(self, pool: PoolId, expert: ExpertId, room_bytes: int | None, now: float) -> bool:
        """Return True if `pool` may load `expert` into `room_bytes`; None: others are evicted for it."""
        residency = self._residency
        fits = room_bytes is None or residency.bytes_of(expert) <= room_bytes
        return fits and residency.takes(pool, expert) and not residency.has_failed(expert, now)

    def _aged(self, pool: PoolId, now: float, *, staged: bool = False) -> Iterator[Want]:
        """Yield the most urgent group that waits for memory."""
        ranked = self._groups.wanted
        for expert in ranked.by_turn(now):
            if staged and expert not in ranked.staged:
                continue
            if self._residency.takes(pool, expert) and not self._residency.has_failed(expert, now):
                yield Want(expert, "demand", "any", aged=True)
                return
