"""Groups: the queued requests of each expert, and the pools that hold it (`coserve-plus`).

Arrivals outnumber loads and batches, so an arrival changes one group and a few sums; decisions do the searching.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from daemon.policy.request import PoolId, Request, RequestId
from daemon.policy.residency import SHARE_UNITS, Residency
from experts.spec import ExpertId


@dataclass(slots=True, eq=False)
class Group:
    """Queued requests of one expert, oldest first. `promised`: what preliminaries will send, in SHARE_UNITS."""

    expert: ExpertId
    requests: OrderedDict[RequestId, Request] = field(default_factory=OrderedDict[RequestId, Request])
    running: int = 0
    promised: int = 0
    #: When the oldest request arrived; at the earliest `max_lead_s` before the last batch: a flood delays no others.
    since_s: float = 0.0
    #: The oldest request at that time. It orders groups that wait equally long, also after it has left.
    since_id: int = 0
    homes: "tuple[tuple[Shelf, Home], ...]" = ()
    on_gpu: bool = False
    on_cpu: bool = False
    #: True if no memory holds the expert from which it can be run or copied, and none is loading it.
    absent: bool = True
    #: True if only the RAM tier holds it.
    staged: bool = False
    #: True if the CPU holds it, and no GPU holds or loads it.
    copyable: bool = False
    #: The PCs that have read the expert (`Residency.readers`).
    readers: dict[str, None] = field(default_factory=dict[str, None])
    read_s: float = 0.0

    @property
    def demand(self) -> int:
        return len(self.requests) * SHARE_UNITS + self.promised

    def is_read_by(self, host: str) -> bool:
        """Return True if no PC has read the expert yet, or if `host` has and so need not load it over the network."""
        return not self.readers or host in self.readers

    def age(self) -> tuple[float, int]:
        return self.since_s, self.since_id


class Home(NamedTuple):
    """A group in a pool that holds its expert and runs it in batches of at most `bound`.

    `spare`: a GPU has the expert too, and this copy only helps out; `elsewhere`: another pool can give it back cheaply.
    """

    group: Group
    bound: int
    spare: bool
    elsewhere: bool
    usage: float
    weights_bytes: int


@dataclass(slots=True)
class Shelf:
    """The residents of one pool; `ready` are those with requests. `unwanted_bytes`: of residents without demand."""

    is_gpu: bool
    is_ram: bool
    host: str
    residents: dict[ExpertId, Home] = field(default_factory=dict[ExpertId, Home])
    ready: dict[ExpertId, Home] = field(default_factory=dict[ExpertId, Home])
    unwanted_bytes: int = 0
    #: The count of changes (DemandTable._changes) when the pool was last asked for loads.
    changes_seen: int = -1


class Waiting:
    """Groups with requests that no executor can run now, the longest waiting first."""

    def __init__(self) -> None:
        self._groups: dict[ExpertId, Group] = {}
        self._sorted = True
        self.read_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[Group]:
        if not self._sorted:
            self._groups = {group.expert: group for group in sorted(self._groups.values(), key=Group.age)}
            self._sorted = True
        return iter(self._groups.values())

    def first_s(self) -> float:
        """Return since when the first group waits. StopIteration if there is none."""
        return next(iter(self)).since_s

    def add(self, group: Group, *, is_newest: bool = False) -> None:
        self._groups[group.expert] = group
        self._sorted = self._sorted and is_newest
        self.read_s += group.read_s

    def remove(self, group: Group) -> None:
        if self._groups.pop(group.expert, None) is not None:
            self.read_s = self.read_s - group.read_s if self._groups else 0.0


class Groups:
    """All groups, the places of their experts, and the sums that decisions need. `settle` before each decision."""

    def __init__(self, residency: Residency, *, foresight: bool, max_lead_s: float) -> None:
        self._residency = residency
        self._foresight = foresight
        #: When a batch of a group starts, the wait of what is left counts as no longer than this.
        self._max_lead_s = max_lead_s
        self._groups: dict[ExpertId, Group] = {}
        devices = {facts.processor: facts.device for facts in residency.pools.values() if facts.processor != "ram"}
        #: The device whose disk loads the backlog of reads is counted in.
        self._reader = devices.get("gpu") or devices.get("cpu")
        self.shelves = {
            pool: Shelf(facts.processor == "gpu", facts.processor == "ram", facts.host)
            for pool, facts in residency.pools.items()
        }
        self.absent, self.staged = Waiting(), Waiting()
        #: Groups without requests whose preliminaries will send some: of experts that are absent, or staged.
        self.expected: dict[ExpertId, Group] = {}
        self.queued = self.gpu_queued = self.cpu_queued = 0
        #: How often experts changed places, and groups began to wait for memory.
        self.moves = 0
        #: The residency's `room_changes` when the groups were last updated.
        self._room_changes = residency.room_changes

    def __getitem__(self, expert: ExpertId) -> Group:
        group = self._groups.get(expert)
        if group is None:
            group = self._groups[expert] = Group(expert)
            group.read_s = self._disk_s(expert)
            self._place(group)
        return group

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    # Requests

    def add(self, request: Request) -> None:
        group = self[request.expert]
        if not group.requests:
            group.since_s, group.since_id = request.arrived_s, request.request_id
            group.requests[request.request_id] = request
            self._filled(group)
        else:
            group.requests[request.request_id] = request
        self._count(group, 1)
        self._promise(group.expert, 1)

    def discard(self, request: Request) -> None:
        group = self._groups[request.expert]
        del group.requests[request.request_id]
        self._count(group, -1)
        self._left(group)
        self._promise(group.expert, -1)

    def take(self, group: Group, first: Sequence[Request], limit: int, now: float) -> tuple[Request, ...]:
        """Remove and return a batch of at most `limit` requests of `group`: `first` of them, then the oldest."""
        batch = [group.requests.pop(request.request_id) for request in first]
        while group.requests and len(batch) < limit:
            batch.append(group.requests.popitem(last=False)[1])
        group.running += len(batch)
        oldest = next(iter(group.requests.values()), None)
        if oldest is not None:
            group.since_s = max(oldest.arrived_s, now - self._max_lead_s)
            group.since_id = oldest.request_id
        self._count(group, -len(batch))
        self._left(group)
        return tuple(batch)

    def ended(self, expert: ExpertId, count: int) -> None:
        self[expert].running -= count
        self._promise(expert, -count)

    def _promise(self, expert: ExpertId, count: int) -> None:
        """Promise to its subsequent experts their shares of `count` more requests of `expert`."""
        if not self._foresight:
            return
        for subsequent, units in self._residency.then_units.get(expert, ()):
            group = self[subsequent]
            before = group.promised
            group.promised = before + count * units
            if not group.requests and (not before) != (not group.promised):
                self._want(group, wanted=not before)

    def _count(self, group: Group, count: int) -> None:
        self.queued += count
        if group.on_gpu:
            self.gpu_queued += count
        elif group.copyable:
            self.cpu_queued += count

    def _filled(self, group: Group) -> None:
        if not group.promised:
            self._want(group, wanted=True)
        self.expected.pop(group.expert, None)
        for shelf, home in group.homes:
            if not shelf.is_ram:
                shelf.ready[group.expert] = home
        if group.absent:
            self.moves += 1
            self.absent.add(group, is_newest=True)
        elif group.staged:
            self.moves += 1
            self.staged.add(group, is_newest=True)

    def _left(self, group: Group) -> None:
        if group.requests:
            return
        for shelf, _ in group.homes:
            shelf.ready.pop(group.expert, None)
        self.absent.remove(group)
        self.staged.remove(group)
        if not group.promised:
            self._want(group, wanted=False)
        elif group.absent:
            self.expected[group.expert] = group

    def _want(self, group: Group, *, wanted: bool) -> None:
        """Count the group's bytes and place it anew: its demand is no longer zero, or is zero again."""
        for shelf, home in group.homes:
            if not home.spare:
                shelf.unwanted_bytes -= home.weights_bytes if wanted else -home.weights_bytes
        if not group.requests:
            if wanted and group.absent:
                self.moves += 1
                self.expected[group.expert] = group
            else:
                self.expected.pop(group.expert, None)

    # Places

    def residency_changed(self, expert: ExpertId) -> None:
        group = self._groups.get(expert)
        if group is None:
            self[expert]
        else:
            self._place(group)

    def settle(self) -> None:
        """Place residents of the RAM tier anew where budgets, pins or refusals have changed."""
        if self._room_changes != self._residency.room_changes:
            self._room_changes = self._residency.room_changes
            for pool, shelf in self.shelves.items():
                for expert in self._residency.ledgers[pool].resident if shelf.is_ram else ():
                    self.residency_changed(expert)

    def rebuild(self) -> None:
        self.absent, self.staged, self.expected = Waiting(), Waiting(), {}
        for shelf in self.shelves.values():
            shelf.residents.clear()
            shelf.ready.clear()
            shelf.unwanted_bytes = 0
        self.queued = self.gpu_queued = self.cpu_queued = 0
        old, self._groups = self._groups, {}
        for expert, group in old.items():
            if group.requests or group.running:
                self._groups[expert] = Group(
                    expert,
                    group.requests,
                    group.running,
                    since_s=group.since_s,
                    since_id=group.since_id,
                    read_s=self._disk_s(expert),
                )
        for group in tuple(self._groups.values()):
            self.queued += len(group.requests)
            self._place(group)
        for ledger in self._residency.ledgers.values():
            for expert in ledger.resident:
                self[expert]
        for group in tuple(self._groups.values()):
            self._promise(group.expert, len(group.requests) + group.running)

    def _place(self, group: Group) -> None:
        """Find the pools that hold the group's expert, and correct every sum and list that depends on them."""
        self.moves += 1
        residency, expert, queued = self._residency, group.expert, len(group.requests)
        wanted = queued > 0 or group.promised > 0
        for shelf, home in group.homes:
            del shelf.residents[expert]
            shelf.ready.pop(expert, None)
            if home.spare or not wanted:
                shelf.unwanted_bytes -= home.weights_bytes
        self.absent.remove(group)
        self.staged.remove(group)
        self.expected.pop(expert, None)
        self._count(group, -queued)

        shelves = [(pool, shelf) for pool, shelf in self.shelves.items() if residency.can_run(pool, expert)]
        on_gpu = group.on_gpu = any(shelf.is_gpu for _, shelf in shelves)
        group.on_cpu = any(not shelf.is_gpu and not shelf.is_ram for _, shelf in shelves)
        on_host = any(not shelf.is_gpu for _, shelf in shelves)
        usage, weights_bytes = residency.usage(expert), residency.bytes_of(expert)
        group.readers = residency.readers.get(expert, {})
        group.homes = tuple(
            (
                shelf,
                Home(
                    group,
                    residency.max_batch(pool, expert),
                    not shelf.is_gpu and on_gpu,
                    on_host if shelf.is_gpu else on_gpu,
                    usage,
                    weights_bytes,
                ),
            )
            for pool, shelf in shelves
        )
        in_ram = bool(shelves) and not on_gpu and not group.on_cpu
        coming = residency.is_coming(expert)
        group.absent = not coming and (not shelves or (in_ram and not residency.is_taken(expert, "gpu")))
        group.staged = in_ram and not coming and not group.absent
        group.copyable = group.on_cpu and not on_gpu and not (coming and residency.is_coming(expert, "gpu"))

        self._count(group, queued)
        for shelf, home in group.homes:
            shelf.residents[expert] = home
            if queued and not shelf.is_ram:
                shelf.ready[expert] = home
            if home.spare or not wanted:
                shelf.unwanted_bytes += weights_bytes
        if queued and (group.absent or group.staged):
            (self.absent if group.absent else self.staged).add(group)
        elif group.promised and group.absent:
            self.expected[expert] = group

    def _disk_s(self, expert: ExpertId) -> float:
        facts = self._residency.experts.get(expert)
        if facts is None or self._reader is None:
            return 0.0
        return self._residency.matrix.of(self._reader, facts.architecture).disk_s

    # Choices

    def waiting(self, *, staged: bool) -> Iterator[Group]:
        if staged or not self.absent:
            return iter(self.staged)
        return iter(self.absent) if not self.staged else iter(sorted([*self.absent, *self.staged], key=Group.age))

    def most_expected(self, host: str) -> list[Group]:
        return sorted((group for group in self.expected.values() if group.is_read_by(host)), key=_by_demand)

    def of_host(self, host: str) -> Iterator[Shelf]:
        return (shelf for shelf in self.shelves.values() if shelf.host == host)

    def most_staged(self, count: int, host: str) -> list[Group]:
        homes = (home for shelf in self.of_host(host) if shelf.is_ram for home in shelf.residents.values())
        return sorted((home.group for home in homes if home.group.staged and home.group.demand), key=_by_demand)[:count]

    def most_copyable(self, count: int, more_than: int, host: str) -> Iterator[Group]:
        groups = [
            home.group
            for shelf in self.of_host(host)
            if not shelf.is_gpu
            for home in shelf.ready.values()
            if len(home.group.requests) > more_than and home.group.copyable
        ]
        if groups:
            yield min(groups, key=_by_requests)
            yield from sorted(groups, key=_by_requests)[1:count]

    def victims(self, pool: PoolId, *, wanted: bool) -> Iterator[ExpertId]:
        """Yield the residents of `pool` without demand, then those with demand if `wanted`: the least wanted first.

        Among equals those that another pool has too, cheap to bring back, then by ascending usage probability.
        """
        ranks = [
            (0 if home.spare else home.group.demand, not home.elsewhere, home.usage, expert)
            for expert, home in self.shelves[pool].residents.items()
            if wanted or home.spare or not (home.group.requests or home.group.promised)
        ]
        ranks.sort()
        return (expert for *_, expert in ranks)


def _by_demand(group: Group) -> tuple[int, float, ExpertId]:
    return -group.demand, group.since_s, group.expert


def _by_requests(group: Group) -> tuple[int, float, ExpertId]:
    return -len(group.requests), group.since_s, group.expert
