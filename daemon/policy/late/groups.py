"""Queued requests by expert, and every index that decisions look into (`coserve-plus`).

Changes are noted, and indexed again only before a decision, so that an arrival costs the same however many requests
are queued.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from daemon.policy.evict import LeastWanted
from daemon.policy.late.age import Deadlines
from daemon.policy.prefetch import Wanted
from daemon.policy.ranking import Ranking
from daemon.policy.request import PoolId, Request, RequestId
from daemon.policy.residency import SHARE_UNITS, Residency
from experts.spec import ExpertId


@dataclass(slots=True)
class ExpertDemand:
    """Queued requests of one expert, oldest first. `promised`: what preliminaries will send, in SHARE_UNITS."""

    requests: OrderedDict[RequestId, Request] = field(default_factory=OrderedDict[RequestId, Request])
    running: int = 0
    promised: int = 0
    #: As last indexed: queued images; those of them that wait for a GPU, and for the CPU alone; seconds of disk until
    #: the expert is somewhere.
    queued: int = 0
    gpu_queued: int = 0
    cpu_queued: int = 0
    read_s: float = 0.0

    @property
    def demand(self) -> int:
        return len(self.requests) * SHARE_UNITS + self.promised


@dataclass(slots=True)
class Shelf:
    """The groups whose expert is resident in one pool, ranked for each kind of decision."""

    is_gpu: bool
    is_ram: bool
    #: By the next batch, by age, and by what is left to do.
    fullest: Ranking[ExpertId] = field(default_factory=Ranking[ExpertId])
    turn: Ranking[ExpertId] = field(default_factory=Ranking[ExpertId])
    smallest: Ranking[ExpertId] = field(default_factory=Ranking[ExpertId])
    keep: LeastWanted = field(default_factory=LeastWanted)

    def withdraw(self, expert: ExpertId) -> None:
        """Take `expert` out of the rankings: it has no requests here."""
        self.fullest.discard(expert)
        self.turn.discard(expert)
        self.smallest.discard(expert)


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """The pools that hold an expert; computed again only when it moves."""

    shelves: tuple[tuple[PoolId, Shelf], ...]
    on_gpu: bool
    on_cpu: bool
    #: In some memory of the host, the RAM tier or the CPU's pool.
    on_host: bool
    #: In the RAM tier only, and no GPU takes it from there.
    out_of_reach: bool
    coming: bool
    coming_gpu: bool


class Groups:
    """All groups, the places of their experts, and the shelves. `settle` before looking into an index."""

    def __init__(
        self,
        residency: Residency,
        deadlines: Deadlines,
        *,
        foresight: bool,
        balances: bool,
        max_wait_s: float,
        margin_s: float,
    ) -> None:
        self._residency = residency
        self._deadlines = deadlines
        self._foresight = foresight
        self._balances = balances
        self._max_wait_s = max_wait_s
        self._margin_s = margin_s
        self._groups: dict[ExpertId, ExpertDemand] = {}
        self._places: dict[ExpertId, ExpertPlace] = {}
        self._changed: dict[ExpertId, None] = {}
        devices = {facts.processor: facts.device for facts in residency.pools.values() if facts.processor != "ram"}
        #: The device whose disk loads the backlog of reads is counted in.
        self._reader = devices.get("gpu") or devices.get("cpu")
        self.shelves = {
            pool: Shelf(facts.processor == "gpu", facts.processor == "ram") for pool, facts in residency.pools.items()
        }
        self.wanted = Wanted()
        self.queued = self.gpu_queued = self.cpu_queued = 0
        self.read_s = 0.0

    def __getitem__(self, expert: ExpertId) -> ExpertDemand:
        group = self._groups.get(expert)
        if group is None:
            group = self._groups[expert] = ExpertDemand()
        return group

    def find(self, expert: ExpertId) -> ExpertDemand | None:
        return self._groups.get(expert)

    def items(self) -> Iterator[tuple[ExpertId, ExpertDemand]]:
        return iter(self._groups.items())

    def note(self, expert: ExpertId) -> None:
        """Note that the group of `expert` has changed."""
        self._changed[expert] = None

    def promise(self, expert: ExpertId, count: int) -> None:
        """Promise to its subsequent experts their shares of `count` more requests of `expert`."""
        if self._foresight:
            for subsequent, units in self._residency.then_units.get(expert, ()):
                self[subsequent].promised += count * units
                self._changed[subsequent] = None

    def moved(self, expert: ExpertId) -> None:
        self._places.pop(expert, None)
        self._changed[expert] = None

    def room_changed(self) -> None:
        """Look again at the residents of the RAM tier: GPUs may take other experts than before."""
        for pool, shelf in self.shelves.items():
            for expert in self._residency.ledgers[pool].resident if shelf.is_ram else ():
                self.moved(expert)

    def place(self, expert: ExpertId) -> ExpertPlace:
        place = self._places.get(expert)
        if place is None:
            place = self._places[expert] = self._find(expert)
        return place

    def settle(self) -> bool:
        """Update every index for the experts that changed; return True if there were any."""
        if not self._changed:
            return False
        changed, self._changed = self._changed, {}
        for expert in changed:
            self._index(expert, self[expert], self.place(expert))
        return True

    def turn_s(self, expert: ExpertId, group: ExpertDemand) -> float | None:
        """Return when the group becomes urgent: by the age of its oldest request, or by a deadline."""
        head = next(iter(group.requests.values()), None)
        if head is None:
            return None
        latest_s = self._deadlines.latest_start_s(expert)
        waited_s = head.arrived_s + self._max_wait_s
        return waited_s if latest_s is None else min(waited_s, latest_s - self._margin_s)

    def rebuild(self) -> None:
        """Compute everything again that is derived from the facts: they have changed."""
        self.wanted.clear()
        for shelf in self.shelves.values():
            shelf.fullest.clear()
            shelf.turn.clear()
            shelf.smallest.clear()
            shelf.keep.clear()
        self._groups = {expert: group for expert, group in self._groups.items() if group.requests or group.running}
        for group in self._groups.values():
            group.promised = group.queued = group.gpu_queued = group.cpu_queued = 0
            group.read_s = 0.0
        self.queued = self.gpu_queued = self.cpu_queued = 0
        self.read_s = 0.0
        self._places.clear()
        for expert, group in list(self._groups.items()):
            self.promise(expert, len(group.requests) + group.running)
        self._changed.update(dict.fromkeys(self._groups))
        for ledger in self._residency.ledgers.values():
            self._changed.update(dict.fromkeys(ledger.resident))

    def check(self) -> None:
        self.settle()
        promised: dict[ExpertId, int] = {}
        for expert, group in self._groups.items():
            for subsequent, units in self._residency.then_units.get(expert, ()) if self._foresight else ():
                sent = (len(group.requests) + group.running) * units
                promised[subsequent] = promised.get(subsequent, 0) + sent
        for expert, group in self._groups.items():
            if group.promised != promised.get(expert, 0) or group.running < 0:
                raise AssertionError(f"{expert}: demand {group.promised}, recounted {promised.get(expert, 0)}")
            for pool, shelf in self.shelves.items():
                runs_here = bool(group.requests) and self._residency.can_run(pool, expert) and not shelf.is_ram
                if (expert in shelf.fullest) != runs_here:
                    raise AssertionError(f"{expert}: its place on the shelf of {pool} is wrong")
                turn = shelf.turn.rank(expert)
                if turn is not None and turn[0] != self.turn_s(expert, group):
                    raise AssertionError(f"{expert}: its turn on {pool} is out of date")
        if self.queued != sum(len(group.requests) for group in self._groups.values()):
            raise AssertionError("the backlog is not the sum of its groups")

    def _find(self, expert: ExpertId) -> ExpertPlace:
        residency = self._residency
        shelves = tuple((pool, shelf) for pool, shelf in self.shelves.items() if residency.can_run(pool, expert))
        for pool, shelf in self.shelves.items():
            if not residency.can_run(pool, expert):
                shelf.withdraw(expert)
                shelf.keep.forget(expert)
        in_ram = bool(shelves) and all(shelf.is_ram for _, shelf in shelves)
        return ExpertPlace(
            shelves,
            on_gpu=any(shelf.is_gpu for _, shelf in shelves),
            on_cpu=any(not shelf.is_gpu and not shelf.is_ram for _, shelf in shelves),
            on_host=any(not shelf.is_gpu for _, shelf in shelves),
            out_of_reach=in_ram and not residency.is_taken(expert, "gpu"),
            coming=residency.is_coming(expert),
            coming_gpu=residency.has_gpu and residency.is_coming(expert, "gpu"),
        )

    def _index(self, expert: ExpertId, group: ExpertDemand, place: ExpertPlace) -> None:
        queued, demand, residency = len(group.requests), group.demand, self._residency
        turn_s = self.turn_s(expert, group)
        head = next(iter(group.requests.values())) if queued else None
        since = (head.arrived_s, head.request_id) if head is not None else (float("inf"), 0)
        nowhere = (not place.shelves or place.out_of_reach) and not place.coming
        self._total(expert, group, place, nowhere=nowhere)
        for pool, shelf in place.shelves:
            spare = not shelf.is_gpu and place.on_gpu  # a GPU has it too: this copy serves only to help out
            elsewhere = spare or (shelf.is_gpu and place.on_host)
            demand_here = 0 if spare else demand
            shelf.keep.put(
                expert, demand_here, residency.usage(expert), residency.bytes_of(expert), elsewhere=elsewhere
            )
            if shelf.is_ram:
                continue
            if head is None or turn_s is None:
                shelf.withdraw(expert)
                continue
            images = min(queued, residency.max_batch(pool, expert))
            # Beside a GPU the CPU takes the smallest batches: a full one gains the GPU more than it gains the CPU.
            is_beside = self._balances and residency.has_gpu and not shelf.is_gpu
            shelf.fullest.put(expert, (spare, images if is_beside else -images, *since))
            shelf.smallest.put(expert, (spare, demand, *since))
            shelf.turn.put(expert, (turn_s, head.request_id))
        self.wanted.put(
            expert,
            demand=demand,
            queued=queued,
            since=since,
            turn_s=turn_s,
            nowhere=nowhere,
            staged=place.on_host and not place.on_gpu and not place.on_cpu and not place.coming and not nowhere,
            copyable=place.on_cpu and not place.on_gpu and not place.coming_gpu,
        )

    def _total(self, expert: ExpertId, group: ExpertDemand, place: ExpertPlace, *, nowhere: bool) -> None:
        """Update the sums over all groups."""
        queued = len(group.requests)
        gpu_queued = queued if place.on_gpu else 0
        cpu_queued = queued if place.on_cpu and not place.on_gpu and not place.coming_gpu else 0
        read_s = self._disk_s(expert) if nowhere and queued else 0.0
        self.queued += queued - group.queued
        self.gpu_queued += gpu_queued - group.gpu_queued
        self.cpu_queued += cpu_queued - group.cpu_queued
        self.read_s += read_s - group.read_s
        group.queued, group.gpu_queued, group.cpu_queued, group.read_s = queued, gpu_queued, cpu_queued, read_s

    def _disk_s(self, expert: ExpertId) -> float:
        facts = self._residency.experts.get(expert)
        if facts is None or self._reader is None:
            return 0.0
        return self._residency.matrix.of(self._reader, facts.architecture).disk_s
