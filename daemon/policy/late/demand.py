"""One demand table, late binding: a free executor pulls, the loader runs ahead (`coserve-plus`).

See docs/how-it-schedules.md.
"""

from collections.abc import Iterable, Iterator

from daemon.policy.discipline import Evict, Want
from daemon.policy.late.balance import Balance, Pace
from daemon.policy.late.deadlines import Deadlines
from daemon.policy.late.groups import Group, Groups
from daemon.policy.presets import Preset, Tuning
from daemon.policy.request import ExecutorId, PoolId, Request
from daemon.policy.residency import SHARE_UNITS, Residency
from experts.spec import ExpertId

#: Loads that do not fit now are passed over for others, at most so many of them.
LOOK_PAST = 4
#: Expected requests for which an expert without queued requests may replace another.
WORTH_EVICTING = 0.5
#: Seconds of waiting that a full batch is worth when an executor chooses.
FULL_BATCH_S = 12.0
#: Loads for due groups per ordinary load: they may evict an expert that others wait for.
DUE_SHARE = 0.1


class DemandTable:
    """Groups by expert. The group that has waited longest is read first; executors also count full batches."""

    def __init__(self, residency: Residency, deadlines: Deadlines, pace: Pace, preset: Preset, tuning: Tuning) -> None:
        self._residency = residency
        self._deadlines = deadlines
        self._in_flight = preset.loads_in_flight
        processors = {facts.processor for facts in residency.pools.values()}
        # Where a GPU and a CPU share the work, small batches cost more than the memory gains.
        self._makes_room = preset.makes_room and not {"gpu", "cpu"} <= processors
        self._max_wait_s = tuning.max_wait_s
        self._margin_s = tuning.deadline_margin_s
        self._groups = Groups(residency, foresight=preset.foresight, max_lead_s=2 * tuning.max_wait_s)
        self._balance = Balance(residency, self._groups, pace, balances=preset.balances)
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

    def ended(self, _executor: ExecutorId, expert: ExpertId, count: int) -> None:
        self._groups.ended(expert, count)

    def moved(self, expert: ExpertId) -> None:
        self._groups.moved(expert)

    # Memory

    def wants(self, pool: PoolId, now: float) -> Iterator[Want]:
        groups, residency = self._groups, self._residency
        groups.settle()
        shelf, ledger = groups.shelves[pool], residency.ledgers[pool]
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
        """Return when the next group that waits for memory becomes due, or the next deadline is near."""
        latest_s = self._deadlines.next_s()
        turn_s = None if latest_s is None or latest_s - self._margin_s <= now else latest_s - self._margin_s
        for waiting in (self._groups.absent, self._groups.staged):
            due_s = waiting.first_s() + self._max_wait_s if waiting else now
            if due_s > now and (turn_s is None or due_s < turn_s):
                turn_s = due_s
        return turn_s

    def rebuild(self) -> None:
        self._groups.rebuild()

    def check(self) -> None:
        self._groups.check()

    # Choosing

    def _choose(self, pool: PoolId) -> Group | None:
        """Return the group that has waited longest, where a full batch counts as much as `FULL_BATCH_S` of waiting.

        If the disk is the bottleneck and no expert can be loaded, return the group that is finished soonest: its
        memory is needed. Beside a GPU the CPU prefers small batches: a full one gains the GPU more than it gains the
        CPU.
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
        """Yield the groups whose expert is nowhere, the oldest request first, then those that are `expected`."""
        looked_past = 0
        for group in self._groups.absent:
            if looked_past >= LOOK_PAST:
                return
            if not self._may_come(pool, group, None if is_idle else room_bytes, now):
                looked_past += self._may_come(pool, group, None, now)
                continue
            looked_past += 1
            yield Want(group.expert, "demand", "any" if is_idle else "unwanted")
        if not expected or (is_idle and self._groups.queued):
            return  # requests that preliminaries will send can wait until one of them has begun
        for group in self._groups.most_expected():
            if looked_past >= LOOK_PAST:
                return
            looked_past += self._may_come(pool, group, None, now)
            if self._may_come(pool, group, room_bytes, now):
                likely = group.promised >= WORTH_EVICTING * SHARE_UNITS
                yield Want(group.expert, "prefetch", "unwanted" if likely else "none")

    def _copies(self, pool: PoolId, room_bytes: int, now: float, *, is_idle: bool) -> Iterator[Want]:
        """Yield experts that only host memory has: all staged ones; of the CPU's, those it outgrew, or any if idle."""
        for group in self._groups.most_staged(LOOK_PAST):
            makes_place = is_idle and bool(group.requests)
            if self._may_come(pool, group, None if makes_place else room_bytes, now):
                cause = "demand" if group.requests else "prefetch"
                yield Want(group.expert, cause, "any" if makes_place else "unwanted")
        has_work = bool(self._groups.shelves[pool].ready)
        for group in self._groups.most_copyable(LOOK_PAST, self._balance.takeover if has_work else 0):
            is_worth = self._balance.outgrown(group) or (
                not has_work and self._residency.source_for(pool, group.expert) is not None
            )
            if not is_worth:
                return
            if self._may_come(pool, group, room_bytes, now):
                yield Want(group.expert, "demand", "unwanted")

    def _may_come(self, pool: PoolId, group: Group, room_bytes: int | None, now: float) -> bool:
        """Return True if `pool` may load the group's expert into `room_bytes`; None: others are evicted for it."""
        residency, expert = self._residency, group.expert
        fits = room_bytes is None or residency.bytes_of(expert) <= room_bytes
        return fits and residency.takes(pool, expert) and not residency.has_failed(expert, now)

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
