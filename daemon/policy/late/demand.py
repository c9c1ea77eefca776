"""One demand table, late binding: a free executor pulls, the loader runs ahead (docs/architecture.md)."""

from collections import Counter
from collections.abc import Iterable, Iterator

from daemon.policy.discipline import Evict, Want
from daemon.policy.late.balance import Balance, Pace
from daemon.policy.late.deadlines import Deadlines
from daemon.policy.late.groups import Group, Groups, Shelf
from daemon.policy.presets import Preset, Tuning
from daemon.policy.request import ExecutorId, PoolId, Request
from daemon.policy.residency import SHARE_UNITS, Residency
from experts.spec import ExpertId

#: At most this many loads that do not fit now are passed over for others.
LOOK_PAST = 4
#: Expected requests for which an expert without queued requests may replace another.
WORTH_EVICTING = 0.5
#: Seconds of waiting that a full batch is worth when an executor chooses.
FULL_BATCH_S = 12.0
#: Seconds of waiting that each queued image is worth when the loader chooses while executors run out of work.
IMAGE_S = 0.2
#: Loads for due groups per ordinary load: they may evict an expert that others wait for.
DUE_SHARE = 0.1


class DemandTable:
    """Groups by expert. Loader and executors rank them by waiting, and count images too: see `_reads` and `_choose`."""

    def __init__(self, residency: Residency, deadlines: Deadlines, pace: Pace, preset: Preset, tuning: Tuning) -> None:
        self._residency = residency
        self._deadlines = deadlines
        self._in_flight = preset.loads_in_flight
        self._executor_counts = Counter(facts.pool for facts in residency.executors.values())
        processors = {facts.processor for facts in residency.pools.values()}
        # Where a GPU and a CPU share the work, small batches cost more than the memory gains.
        self._makes_room = preset.makes_room and not {"gpu", "cpu"} <= processors
        self._several_hosts = len({facts.host for facts in residency.pools.values()}) > 1
        self._max_wait_s = tuning.max_wait_s
        self._margin_s = tuning.deadline_margin_s
        self._groups = Groups(residency, foresight=preset.foresight, max_lead_s=2 * tuning.max_wait_s)
        self._balance = Balance(residency, self._groups, pace, balances=preset.balances)
        #: Batches that have ended on each PC.
        self._ended: Counter[str] = Counter()
        #: True for pools that should load an expert and cannot, because every resident is wanted.
        self._blocked = dict.fromkeys(residency.pools, False)
        #: Loads that due groups may still cause in each pool.
        self._due_loads = dict.fromkeys(residency.pools, 1.0)

    # Requests

    def add(self, request: Request) -> None:
        self._groups.add(request)

    def discard(self, request: Request) -> None:
        self._groups.discard(request)

    def take(self, executor: ExecutorId, now: float) -> tuple[Request, ...]:
        pool = self._residency.executors[executor].pool
        group = self._choose(pool)
        if group is None:
            return ()
        bound = self._residency.max_batch(pool, group.expert)
        near = self._deadlines.nearest(group.expert, now + self._margin_s, bound)
        return self._groups.take(group, near, bound, now)

    def ended(self, executor: ExecutorId, expert: ExpertId, count: int) -> None:
        self._ended[self._groups.shelves[self._residency.executors[executor].pool].host] += 1
        self._groups.ended(expert, count)

    def residency_changed(self, expert: ExpertId) -> None:
        self._groups.residency_changed(expert)

    # Memory

    def wants(self, pool: PoolId, now: float) -> Iterator[Want]:
        groups, residency = self._groups, self._residency
        groups.settle()
        shelf, ledger = groups.shelves[pool], residency.ledgers[pool]
        shelf.changes_seen = self._changes(shelf)
        copying = residency.copying[pool]
        room_bytes = ledger.free_bytes + shelf.unwanted_bytes
        # Nothing to run and no load under way: the residents are kept only for requests that have not arrived.
        is_idle = not shelf.is_ram and ledger.loading_count == 0 and not shelf.ready
        has_room = is_idle or room_bytes >= residency.least_bytes
        may_be_due = self._due_loads[pool] >= 1.0
        self._blocked[pool] = False
        if shelf.is_gpu and copying < self._in_flight:
            if has_room:
                yield from self._copies(pool, room_bytes, now, is_idle=is_idle)
            if may_be_due:
                yield from self._due(pool, now, staged=True)
        if ledger.loading_count - copying >= self._in_flight:
            return
        beside_gpu = residency.has_gpu and not shelf.is_gpu and not shelf.is_ram
        if has_room:
            yield from self._reads(pool, now, room_bytes, is_idle=is_idle, expected=not beside_gpu)
        if may_be_due and not shelf.is_ram:
            yield from self._due(pool, now)
        self._blocked[pool] = bool(groups.absent) or (bool(groups.expected) and not beside_gpu)
        if beside_gpu and is_idle:
            largest = self._balance.to_help(pool)
            if largest is not None:
                yield Want(largest, "demand", "unwanted")
        if self._several_hosts and not shelf.is_ram and not beside_gpu:
            yield from self._shares(pool, now)

    def may_want(self, pool: PoolId) -> bool:
        """Return False if nothing has changed on the pool's PC, and no expert has moved, since `wants` was called.

        Always True if there is only one PC, and for a pool that lacks work.
        """
        shelf = self._groups.shelves[pool]
        return not self._several_hosts or self._lacks_work(pool) or shelf.changes_seen != self._changes(shelf)

    def granted(self, want: Want, pool: PoolId) -> None:
        change = -1.0 if want.is_due else DUE_SHARE
        self._due_loads[pool] = min(1.0, self._due_loads[pool] + change)

    def victims(self, pool: PoolId, evict: Evict) -> Iterable[ExpertId]:
        return () if evict == "none" else self._groups.victims(pool, wanted=evict == "any")

    # Reading the state

    def requests_of(self, expert: ExpertId) -> tuple[Request, ...]:
        return tuple(self._groups[expert].requests.values())

    def queued(self) -> dict[ExpertId, int]:
        return {group.expert: len(group.requests) for group in self._groups if group.requests}

    def next_turn_s(self, now: float) -> float | None:
        latest_s = self._deadlines.next_s()
        turn_s = None if latest_s is None or latest_s - self._margin_s <= now else latest_s - self._margin_s
        for waiting in (self._groups.absent, self._groups.staged):
            due_s = waiting.first_s() + self._max_wait_s if waiting else now
            if due_s > now and (turn_s is None or due_s < turn_s):
                turn_s = due_s
        return turn_s

    def rebuild(self) -> None:
        self._groups.rebuild()

    def _lacks_work(self, pool: PoolId) -> bool:
        return len(self._groups.shelves[pool].ready) < self._executor_counts[pool]

    def _changes(self, shelf: Shelf) -> int:
        return self._groups.moves + self._ended[shelf.host] + self._residency.room_changes

    # Choosing

    def _choose(self, pool: PoolId) -> Group | None:
        """Return the group that has waited longest, where a full batch counts as much as `FULL_BATCH_S` of waiting.

        If the disk is the bottleneck and no expert can be loaded, return the group that is finished soonest: its memory
        is needed. Beside a GPU the CPU prefers small batches: a full one gains the GPU more than it gains the CPU.
        """
        shelf, draining = self._groups.shelves[pool], self._residency.draining[pool]
        makes_room = self._makes_room and self._blocked[pool] and self._balance.disk_binds()
        full_s = FULL_BATCH_S if shelf.is_gpu or not self._balance.has_gpu else -FULL_BATCH_S
        has_deadlines = bool(self._deadlines)
        best: Group | None = None
        best_rank = (True, 0.0)
        for expert, (group, bound, spare, _, _, _) in shelf.ready.items():
            if draining and expert in draining:
                continue
            count = len(group.requests)
            if makes_room:
                rank = (spare, count * SHARE_UNITS + group.promised)
            else:
                since_s = self._urgent_s(group) if has_deadlines else group.since_s
                rank = (spare, since_s - (full_s * count / bound if count < bound else full_s))
            if best is None or rank < best_rank or (rank == best_rank and group.age() < best.age()):
                best, best_rank = group, rank
        return best if best is not None and self._balance.pays(pool, best) else None

    def _urgent_s(self, group: Group) -> float:
        """Return since when the group waits, or `max_wait` before its nearest deadline if that is earlier."""
        latest_s = self._deadlines.latest_start_s(group.expert)
        since_s = group.since_s
        return since_s if latest_s is None else min(since_s, latest_s - self._margin_s - self._max_wait_s)

    def _reads(self, pool: PoolId, now: float, room_bytes: int, *, is_idle: bool, expected: bool) -> Iterator[Want]:
        """Yield the groups whose expert is nowhere, the longest waiting first, then those that are `expected`.

        While fewer groups are ready than the pool has executors, each image counts as `IMAGE_S` more of waiting.
        """
        host = self._groups.shelves[pool].host
        absent: Iterable[Group] = self._groups.absent
        if self._several_hosts:
            absent = [group for group in absent if group.is_read_by(host)]
        if self._lacks_work(pool):
            absent = sorted(absent, key=lambda group: (group.since_s - IMAGE_S * len(group.requests), group.since_id))
        looked_past = 0
        for group in absent:
            if looked_past >= LOOK_PAST:
                return
            if not self._may_come(pool, group, None if is_idle else room_bytes, now):
                looked_past += self._may_come(pool, group, None, now)
                continue
            looked_past += 1
            yield Want(group.expert, "demand", "any" if is_idle else "unwanted")
        if not expected or (is_idle and self._groups.queued):
            return  # requests that preliminaries will send can wait until one of them has begun
        for group in self._groups.most_expected(host):
            if looked_past >= LOOK_PAST:
                return
            looked_past += self._may_come(pool, group, None, now)
            if self._may_come(pool, group, room_bytes, now):
                likely = group.promised >= WORTH_EVICTING * SHARE_UNITS
                yield Want(group.expert, "prefetch", "unwanted" if likely else "none")

    def _copies(self, pool: PoolId, room_bytes: int, now: float, *, is_idle: bool) -> Iterator[Want]:
        """Yield experts that only host memory has: all staged ones; of the CPU's, those it outgrew, or any if idle."""
        shelf = self._groups.shelves[pool]
        for group in self._groups.most_staged(LOOK_PAST, shelf.host):
            makes_place = is_idle and bool(group.requests)
            if self._may_come(pool, group, None if makes_place else room_bytes, now):
                cause = "demand" if group.requests else "prefetch"
                yield Want(group.expert, cause, "any" if makes_place else "unwanted")
        has_work = bool(shelf.ready)
        for group in self._groups.most_copyable(LOOK_PAST, self._balance.takeover if has_work else 0, shelf.host):
            is_worth = self._balance.outgrown(group) or (
                not has_work and self._residency.source_for(pool, group.expert) is not None
            )
            if not is_worth:
                return
            if self._may_come(pool, group, room_bytes, now):
                yield Want(group.expert, "demand", "unwanted")

    def _shares(self, pool: PoolId, now: float) -> Iterator[Want]:
        """Yield experts of other PCs if executors of this pool lack work and nothing is loading.

        From a PC that is behind one that it has; from PCs where every resident is wanted one that they cannot read now.
        """
        if not self._lacks_work(pool) or self._residency.ledgers[pool].loading_count > 0:
            return
        expert = self._balance.to_share(pool)
        if expert is not None:
            yield Want(expert, "demand", "unwanted")
        host = self._groups.shelves[pool].host
        can_read = {self._groups.shelves[other].host for other, blocked in self._blocked.items() if not blocked}
        for group in self._groups.absent:
            may_read = not group.is_read_by(host) and can_read.isdisjoint(group.readers)
            if may_read and self._may_come(pool, group, None, now):
                yield Want(group.expert, "demand", "unwanted")

    def _may_come(self, pool: PoolId, group: Group, room_bytes: int | None, now: float) -> bool:
        """Return True if `pool` may load the group's expert into `room_bytes`; None: others are evicted for it."""
        residency, expert = self._residency, group.expert
        fits = room_bytes is None or residency.bytes_of(expert) <= room_bytes
        return (
            fits
            and residency.takes(pool, expert)
            and not residency.has_failed(expert, now)
            and self._is_near(pool, group)
        )

    def _is_near(self, pool: PoolId, group: Group) -> bool:
        """Return True unless only the host memory of other PCs has the group's expert."""
        host = self._groups.shelves[pool].host
        return not group.staged or any(shelf.host == host for shelf, _ in group.homes)

    def _due(self, pool: PoolId, now: float, *, staged: bool = False) -> Iterator[Want]:
        """Yield the most urgent group that waits for memory and is due, by its oldest request or by a deadline."""
        latest_s = self._deadlines.next_s()
        if latest_s is not None and latest_s - self._margin_s <= now:
            waiting = sorted(self._groups.waiting(staged=staged), key=self._urgent_s)
        else:
            waiting = self._groups.waiting(staged=staged)
        for group in waiting:
            if self._urgent_s(group) + self._max_wait_s > now:
                return
            if self._may_come(pool, group, None, now):
                yield Want(group.expert, "demand", "any", is_due=True)
                return
