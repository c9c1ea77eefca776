"""One demand table, late binding (`coserve-plus`, DESIGN.md §7): a free executor pulls, the loader runs ahead.

Every index here is by expert. What changes is noted, and indexed again only when somebody decides, so that an arrival
costs the same whatever the number of queued requests.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from daemon.policy.age import Deadlines, Share
from daemon.policy.discipline import Evict, Want
from daemon.policy.evict import LeastWanted
from daemon.policy.floor import SHARE_UNITS, Floor
from daemon.policy.pace import Pace
from daemon.policy.prefetch import Wanted
from daemon.policy.presets import Preset, Tuning
from daemon.policy.ranking import Ranking
from daemon.policy.request import ExecutorId, PoolId, Request, RequestId
from experts.spec import ExpertId

#: Loads that do not fit now are passed over for less wanted ones, up to this many.
LOOK_PAST = 4
#: A group of more than this many full CPU batches is worth a place on a GPU although the CPU has its expert.
TAKEOVER_BATCHES = 2
#: Expected requests for which an expert that nobody waits for yet may replace another.
WORTH_EVICTING = 0.5


@dataclass(slots=True)
class _Group:
    """Queued requests of one expert, oldest first. `promised`: what preliminaries will send, in SHARE_UNITS."""

    requests: OrderedDict[RequestId, Request] = field(default_factory=OrderedDict[RequestId, Request])
    running: int = 0
    promised: int = 0
    #: Queued images that count towards the GPUs' and towards the CPU's backlog, as they were last indexed.
    gpu_queued: int = 0
    cpu_queued: int = 0
    #: Queued images, and seconds of disk until the expert is somewhere, as they were last indexed.
    queued: int = 0
    read_s: float = 0.0

    @property
    def demand(self) -> int:
        return len(self.requests) * SHARE_UNITS + self.promised


@dataclass(slots=True)
class _Shelf:
    """The groups whose expert is resident in one pool: by size of the next batch, by age, by what may go."""

    is_gpu: bool
    is_ram: bool
    fullest: Ranking[ExpertId] = field(default_factory=Ranking[ExpertId])
    turn: Ranking[ExpertId] = field(default_factory=Ranking[ExpertId])
    smallest: Ranking[ExpertId] = field(default_factory=Ranking[ExpertId])
    keep: LeastWanted = field(default_factory=LeastWanted)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an expert is: recomputed only when it moves."""

    shelves: tuple[tuple[PoolId, _Shelf], ...] = ()
    on_gpu: bool = False
    on_cpu: bool = False
    on_host: bool = False
    coming: bool = False
    coming_gpu: bool = False


_NOWHERE = _Place()


class DemandTable:
    """Groups by expert. A request that waited `tuning.max_wait_s`, or is near its deadline, pulls its group forward."""

    def __init__(self, floor: Floor, deadlines: Deadlines, pace: Pace, preset: Preset, tuning: Tuning) -> None:
        self._floor = floor
        self._deadlines = deadlines
        self._pace = pace
        self._foresight = preset.foresight
        self._in_flight = preset.loads_in_flight
        self._max_wait_s = tuning.max_wait_s
        self._margin_s = tuning.deadline_margin_s
        self._groups: dict[ExpertId, _Group] = {}
        self._places: dict[ExpertId, _Place] = {}
        self._changed: dict[ExpertId, None] = {}
        #: The last answer to `next_turn_s`; None: it must be found again.
        self._next_turn_s: float | None = None
        self._shelves = {
            pool: _Shelf(facts.processor == "gpu", facts.processor == "ram") for pool, facts in floor.pools.items()
        }
        #: Pools into which somebody should come and cannot, because all that is resident is wanted.
        self._blocked = dict.fromkeys(floor.pools, False)
        self._batch_share = {pool: Share(preset.age_share) for pool in floor.pools}
        self._load_share = {pool: Share(preset.age_share) for pool in floor.pools}
        cpus = [facts for facts in floor.pools.values() if facts.processor == "cpu"]
        self._takeover = TAKEOVER_BATCHES * max((facts.max_batch for facts in cpus), default=0)
        self._gpu_queued = self._cpu_queued = self._queued = 0
        self._read_s = 0.0
        self._gpu = next((facts.device for facts in floor.pools.values() if facts.processor == "gpu"), None)
        self._cpu = next((facts.device for facts in cpus), None)
        self._wanted = Wanted()

    def add(self, request: Request) -> None:
        expert = request.expert
        group = self._groups.get(expert)
        if group is None:
            group = self._groups[expert] = _Group()
        group.requests[request.request_id] = request
        self._changed[expert] = None
        if self._foresight:
            self._promise(expert, 1)

    def discard(self, request: Request) -> None:
        del self._groups[request.expert].requests[request.request_id]
        self._changed[request.expert] = None
        self._promise(request.expert, -1)

    def take(self, executor: ExecutorId, now: float) -> tuple[Request, ...]:
        pool = self._floor.executors[executor].pool
        self._settle()
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
        self._changed[expert] = None
        return tuple(batch)

    def ended(self, _executor: ExecutorId, expert: ExpertId, count: int) -> None:
        self._group(expert).running -= count
        self._promise(expert, -count)

    def moved(self, expert: ExpertId) -> None:
        self._places.pop(expert, None)
        self._changed[expert] = None

    def wants(self, pool: PoolId, now: float) -> Iterator[Want]:
        self._settle()
        shelf, ledger = self._shelves[pool], self._floor.ledgers[pool]
        copying = self._floor.copying[pool]
        room_bytes = ledger.free_bytes + shelf.keep.unwanted_bytes
        self._blocked[pool] = False
        if shelf.is_gpu and copying < self._in_flight:
            yield from self._copies(pool, room_bytes, now)
            yield from self._aged(pool, now, staged=True)
        if ledger.loading_count - copying >= self._in_flight:
            return
        if not shelf.is_ram:
            yield from self._aged(pool, now)
        # Nothing to run and nothing coming: whoever holds the memory holds it only for requests that are yet to come.
        is_idle = not shelf.is_ram and ledger.loading_count == 0 and shelf.fullest.first() is None
        beside_gpu = self._floor.has_gpu and not shelf.is_gpu and not shelf.is_ram
        ranking = self._wanted.leavings if beside_gpu else self._wanted.reads
        if is_idle or room_bytes >= self._floor.least_bytes:
            yield from self._reads(pool, ranking, now, room_bytes, is_idle=is_idle)
        self._blocked[pool] = ranking.first() is not None
        if beside_gpu and is_idle:
            yield from self._helps(pool)

    def granted(self, want: Want, pool: PoolId) -> None:
        if want.aged:
            self._load_share[pool].spend()
        else:
            self._load_share[pool].earn()

    def victims(self, pool: PoolId, evict: Evict) -> Iterable[ExpertId]:
        self._settle()
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
        self._settle()
        if self._next_turn_s is not None and self._next_turn_s > now:
            return self._next_turn_s
        rankings = [self._wanted.turns, *(shelf.turn for shelf in self._shelves.values())]
        heads = [head for head in (ranking.first() for ranking in rankings) if head is not None]
        self._next_turn_s = min((float(rank[0]) for _, rank in heads if float(rank[0]) > now), default=None)
        return self._next_turn_s

    def rebuild(self) -> None:
        self._wanted.clear()
        for shelf in self._shelves.values():
            shelf.fullest.clear()
            shelf.turn.clear()
            shelf.smallest.clear()
            shelf.keep.clear()
        for expert in [expert for expert, group in self._groups.items() if not group.requests and not group.running]:
            del self._groups[expert]
        for group in self._groups.values():
            group.promised = group.gpu_queued = group.cpu_queued = group.queued = 0
            group.read_s = 0.0
        self._gpu_queued = self._cpu_queued = self._queued = 0
        self._read_s = 0.0
        self._places.clear()
        for expert, group in list(self._groups.items()):
            self._promise(expert, len(group.requests) + group.running)
        self._changed.update(dict.fromkeys(self._groups))
        for ledger in self._floor.ledgers.values():
            self._changed.update(dict.fromkeys(ledger.resident))

    def check(self) -> None:
        self._settle()
        promised: dict[ExpertId, int] = {}
        for expert, group in self._groups.items():
            for subsequent, units in self._floor.then_units.get(expert, ()) if self._foresight else ():
                sent = (len(group.requests) + group.running) * units
                promised[subsequent] = promised.get(subsequent, 0) + sent
        for expert, group in self._groups.items():
            if group.promised != promised.get(expert, 0) or group.running < 0:
                raise AssertionError(f"{expert}: demand {group.promised}, recounted {promised.get(expert, 0)}")
            for pool, shelf in self._shelves.items():
                runs_here = bool(group.requests) and self._floor.can_run(pool, expert) and not shelf.is_ram
                if (expert in shelf.fullest) != runs_here:
                    raise AssertionError(f"{expert}: its place on the shelf of {pool} is wrong")
                turn = shelf.turn.rank(expert)
                if turn is not None and turn[0] != self._turn_s(expert, group):
                    raise AssertionError(f"{expert}: its turn on {pool} is out of date")
        if self._gpu_queued != sum(group.gpu_queued for group in self._groups.values()):
            raise AssertionError("the GPUs' backlog is not the sum of its groups")

    # Choosing

    def _choose(self, pool: PoolId, now: float) -> ExpertId | None:
        """The fullest group, or one that is due, at its bounded share of the turns.

        The fullest group is never the one that is due: in an overload its oldest request is older than anybody's.
        """
        shelf, share = self._shelves[pool], self._batch_share[pool]
        makes_room = self._blocked[pool] and self._disk_binds()
        fullest = self._first_steady(pool, shelf.smallest if makes_room else shelf.fullest)
        if fullest is None or not self._pays(pool, shelf, fullest):
            return None
        if share.can_spend():
            due = self._first_steady(pool, shelf.turn, fullest)
            turn = None if due is None else shelf.turn.rank(due)
            if turn is not None and float(turn[0]) <= now:
                share.spend()
                return due
        share.earn()
        return fullest

    def _disk_binds(self) -> bool:
        """Whether reading what is nowhere takes longer than computing what waits: then memory must be freed early."""
        images_per_s = self._pace.images_per_s()
        return images_per_s > 0.0 and self._read_s * images_per_s > self._queued

    def _pays(self, pool: PoolId, shelf: _Shelf, expert: ExpertId) -> bool:
        """Whether a CPU should help with a group that a GPU has too: only where the GPU would come to it later."""
        if shelf.is_gpu or self._gpu is None or not self._place(expert).on_gpu:
            return True
        architecture = self._floor.experts[expert].architecture
        here = self._floor.matrix.of(self._floor.pools[pool].device, architecture)
        images = min(len(self._groups[expert].requests), self._floor.max_batch(pool, expert))
        there = self._floor.matrix.of(self._gpu, architecture)
        return self._gpu_queued * there.k_s > here.k_s * images + here.b_s

    def _outgrown(self, expert: ExpertId) -> bool:
        """Whether a group that only the CPU has should go to a GPU: the CPU would need longer than the GPU's queue."""
        if self._gpu is None or self._cpu is None or len(self._groups[expert].requests) <= self._takeover:
            return False
        architecture = self._floor.experts[expert].architecture
        here, there = self._floor.matrix.of(self._cpu, architecture), self._floor.matrix.of(self._gpu, architecture)
        return self._cpu_queued * here.k_s > self._gpu_queued * there.k_s

    def _first_steady(
        self, pool: PoolId, ranking: Ranking[ExpertId], besides: ExpertId | None = None
    ) -> ExpertId | None:
        """The first of `ranking` that need not become idle, other than `besides`."""
        draining = self._floor.draining[pool]
        first = ranking.first()
        if first is None or (first[0] not in draining and first[0] != besides):
            return None if first is None else first[0]
        return next((expert for expert in ranking.ordered() if expert not in draining and expert != besides), None)

    def _reads(
        self, pool: PoolId, ranking: Ranking[ExpertId], now: float, room_bytes: int, *, is_idle: bool
    ) -> Iterator[Want]:
        """Groups that are nowhere, in the order of `ranking`."""
        looked_past = 0
        for expert in ranking.ordered():
            if looked_past == LOOK_PAST:
                return
            if not self._floor.fits(pool, expert) or self._floor.has_failed(expert, now):
                continue
            group = self._groups[expert]
            if is_idle and not group.requests and self._queued:
                continue  # what preliminaries will send can wait until one of them has begun
            looked_past += 1
            if is_idle and group.requests:
                yield Want(expert, "demand", "anybody")
            elif self._floor.bytes_of(expert) <= room_bytes:
                likely = bool(group.requests) or group.promised >= WORTH_EVICTING * SHARE_UNITS
                yield Want(expert, "demand" if group.requests else "prefetch", "unwanted" if likely else "nobody")

    def _copies(self, pool: PoolId, room_bytes: int, now: float) -> Iterator[Want]:
        """What host memory has and no GPU: all that is staged; of the CPU's what it outgrew, or any for an idle GPU."""
        if room_bytes < self._floor.least_bytes:
            return
        looked_past = 0
        for expert in self._wanted.staged.ordered():
            if looked_past == LOOK_PAST:
                break
            looked_past += 1
            if self._may_come(pool, expert, room_bytes, now):
                yield Want(expert, "demand" if self._groups[expert].requests else "prefetch", "unwanted")
        has_work = self._shelves[pool].fullest.first() is not None
        looked_past = 0
        for expert in self._wanted.copies.ordered():
            if looked_past == LOOK_PAST:
                return
            if not self._outgrown(expert) and (has_work or self._floor.source_for(pool, expert) is None):
                return
            looked_past += 1
            if self._may_come(pool, expert, room_bytes, now):
                yield Want(expert, "demand", "unwanted")

    def _may_come(self, pool: PoolId, expert: ExpertId, room_bytes: int, now: float) -> bool:
        floor = self._floor
        return floor.bytes_of(expert) <= room_bytes and floor.fits(pool, expert) and not floor.has_failed(expert, now)

    def _helps(self, pool: PoolId) -> Iterator[Want]:
        """The largest group that only GPUs have, where an idle CPU would have it read and a batch done before them."""
        groups = self._groups
        largest = max(
            (
                expert
                for shelf in self._shelves.values()
                if shelf.is_gpu
                for expert in shelf.fullest.ordered()
                if not self._place(expert).on_cpu and self._floor.fits(pool, expert)
            ),
            key=lambda expert: len(groups[expert].requests),
            default=None,
        )
        if largest is None or self._gpu is None or len(groups[largest].requests) <= self._takeover:
            return
        architecture = self._floor.experts[largest].architecture
        here = self._floor.matrix.of(self._floor.pools[pool].device, architecture)
        there = self._floor.matrix.of(self._gpu, architecture)
        batch_s = here.k_s * self._floor.max_batch(pool, largest) + here.b_s
        if self._gpu_queued * there.k_s > here.disk_s + batch_s:
            yield Want(largest, "demand", "unwanted")

    def _aged(self, pool: PoolId, now: float, *, staged: bool = False) -> Iterator[Want]:
        """The most urgent group that waits for memory, while its share of the loads is not spent."""
        for expert in self._wanted.by_turn(now) if self._load_share[pool].can_spend() else ():
            if staged and expert not in self._wanted.staged:
                continue
            if self._floor.fits(pool, expert) and not self._floor.has_failed(expert, now):
                yield Want(expert, "demand", "anybody", aged=True)
                return

    # Indexes

    def _group(self, expert: ExpertId) -> _Group:
        group = self._groups.get(expert)
        if group is None:
            group = self._groups[expert] = _Group()
        return group

    def _promise(self, expert: ExpertId, count: int) -> None:
        if not self._foresight:
            return
        for subsequent, units in self._floor.then_units.get(expert, ()):
            self._group(subsequent).promised += count * units
            self._changed[subsequent] = None

    def _place(self, expert: ExpertId) -> _Place:
        place = self._places.get(expert)
        if place is None:
            floor = self._floor
            here = tuple((pool, shelf) for pool, shelf in self._shelves.items() if floor.can_run(pool, expert))
            place = _Place(
                here,
                on_gpu=any(shelf.is_gpu for _, shelf in here),
                on_cpu=any(not shelf.is_gpu and not shelf.is_ram for _, shelf in here),
                on_host=any(not shelf.is_gpu for _, shelf in here),
                coming=floor.is_coming(expert),
                coming_gpu=floor.has_gpu and floor.is_coming(expert, "gpu"),
            )
            self._places[expert] = place
            for pool, shelf in self._shelves.items():
                if not floor.can_run(pool, expert):
                    shelf.fullest.discard(expert)
                    shelf.turn.discard(expert)
                    shelf.smallest.discard(expert)
                    shelf.keep.forget(expert)
        return place

    def _settle(self) -> None:
        """Put every expert that changed where its group and its residency now belong, in every index."""
        if not self._changed:
            return
        self._next_turn_s = None
        changed, self._changed = self._changed, {}
        for expert in changed:
            self._index(expert, self._group(expert), self._place(expert))

    def _index(self, expert: ExpertId, group: _Group, place: _Place) -> None:
        queued, demand = len(group.requests), group.demand
        turn_s = self._turn_s(expert, group)
        head = next(iter(group.requests.values())) if queued else None
        since = (head.arrived_s, head.request_id) if head is not None else (float("inf"), 0)
        gpu_queued = queued if place.on_gpu else 0
        cpu_queued = queued if place.on_cpu and not place.on_gpu and not place.coming_gpu else 0
        self._gpu_queued += gpu_queued - group.gpu_queued
        self._cpu_queued += cpu_queued - group.cpu_queued
        group.gpu_queued, group.cpu_queued = gpu_queued, cpu_queued
        nowhere = not place.shelves and not place.coming
        read_s = self._disk_s(expert) if nowhere and queued else 0.0
        self._queued += queued - group.queued
        self._read_s += read_s - group.read_s
        group.queued, group.read_s = queued, read_s
        for pool, shelf in place.shelves:
            spare = not shelf.is_gpu and place.on_gpu  # a GPU has it too: this copy serves only to help out
            shelf.keep.put(
                expert,
                0 if spare else demand,
                self._floor.usage(expert),
                self._floor.bytes_of(expert),
                elsewhere=spare or (shelf.is_gpu and place.on_host),
            )
            if shelf.is_ram:
                continue
            if head is None or turn_s is None:
                shelf.fullest.discard(expert)
                shelf.turn.discard(expert)
                shelf.smallest.discard(expert)
            else:
                shelf.smallest.put(expert, (spare, demand, *since))
                images = min(queued, self._floor.max_batch(pool, expert))
                # Beside a GPU the CPU takes the smallest batches: a full one gains the GPU more than it gains the CPU.
                is_beside = self._floor.has_gpu and not shelf.is_gpu
                shelf.fullest.put(expert, (spare, images if is_beside else -images, *since))
                shelf.turn.put(expert, (turn_s, head.request_id))
        self._wanted.put(
            expert,
            demand=demand,
            queued=queued,
            since=since,
            turn_s=turn_s,
            nowhere=nowhere,
            staged=place.on_host and not place.on_gpu and not place.on_cpu and not place.coming,
            copyable=place.on_cpu and not place.on_gpu and not place.coming_gpu,
        )

    def _disk_s(self, expert: ExpertId) -> float:
        facts = self._floor.experts.get(expert)
        device = self._gpu or self._cpu
        return 0.0 if facts is None or device is None else self._floor.matrix.of(device, facts.architecture).disk_s

    def _turn_s(self, expert: ExpertId, group: _Group) -> float | None:
        """When the group becomes urgent: its oldest request has waited `max_wait_s`, or a deadline is near."""
        head = next(iter(group.requests.values()), None)
        if head is None:
            return None
        latest_s = self._deadlines.latest_start_s(expert)
        waited_s = head.arrived_s + self._max_wait_s
        return waited_s if latest_s is None else min(waited_s, latest_s - self._margin_s)
