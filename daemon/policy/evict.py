"""In which order residents go: by use, by age, in the paper's two stages, or unwanted first (`coserve-plus`)."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from daemon.policy.ranking import Ranking
from daemon.policy.request import PoolId
from daemon.policy.residency import Residency
from experts.spec import ExpertId


class Order(Protocol):
    """Whom a full pool gives up first, where requests are bound at their arrival."""

    def used(self, pool: PoolId, expert: ExpertId) -> None: ...

    def moved(self, expert: ExpertId) -> None:
        """`expert` has become resident somewhere, is on its way, or has left."""
        ...

    def victims(self, pool: PoolId) -> Iterable[ExpertId]: ...

    def rebuild(self) -> None:
        """The facts have changed."""
        ...


class LeastRecentlyUsed:
    """The one whose last batch (or load) began longest ago (`samba`)."""

    def __init__(self, residency: Residency, pools: Sequence[PoolId]) -> None:
        self._orders = [(pool, residency.ledgers[pool], OrderedDict[ExpertId, None]()) for pool in pools]
        self._by_pool = {pool: order for pool, _, order in self._orders}

    def used(self, pool: PoolId, expert: ExpertId) -> None:
        order = self._by_pool[pool]
        if expert in order:
            order.move_to_end(expert)

    def moved(self, expert: ExpertId) -> None:
        for _, ledger, order in self._orders:
            if not ledger.is_ready(expert):
                order.pop(expert, None)
            elif expert not in order:
                order[expert] = None

    def victims(self, pool: PoolId) -> Iterable[ExpertId]:
        return tuple(self._by_pool[pool])

    def rebuild(self) -> None:
        """Nothing here comes from facts."""


class FirstInFirstOut:
    """The one that was loaded longest ago (`samba-fifo`): the order in which a ledger keeps its residents."""

    def __init__(self, residency: Residency, _pools: Sequence[PoolId]) -> None:
        self._residency = residency

    def used(self, pool: PoolId, expert: ExpertId) -> None:
        """Use changes nothing."""

    def moved(self, expert: ExpertId) -> None:
        """The ledger knows."""

    def victims(self, pool: PoolId) -> Iterable[ExpertId]:
        return self._residency.ledgers[pool].resident

    def rebuild(self) -> None:
        """Nothing here comes from facts."""


class TwoStages:
    """Dependency-aware expert management (CoServe §4.3).

    First subsequent experts none of whose preliminary experts is resident in the pool, by descending bytes; then
    the others by ascending usage probability. Queued requests keep nobody.
    """

    def __init__(self, residency: Residency, _pools: Sequence[PoolId]) -> None:
        self._residency = residency
        self._preliminaries: dict[ExpertId, list[ExpertId]] = {}
        #: Places by ascending usage probability.
        self._places: dict[ExpertId, int] = {}
        self.rebuild()

    def used(self, pool: PoolId, expert: ExpertId) -> None:
        """Use changes nothing."""

    def moved(self, expert: ExpertId) -> None:
        """The ledger knows."""

    def victims(self, pool: PoolId) -> Iterable[ExpertId]:
        ledger, residency = self._residency.ledgers[pool], self._residency
        residents, places = ledger.resident, self._places
        # Not in the catalog any more: nothing speaks for them.
        yield from [expert for expert in residents if expert not in places]
        first = [
            expert
            for expert in residents
            if expert in self._preliminaries and not any(map(ledger.is_ready, self._preliminaries[expert]))
        ]
        yield from sorted(first, key=lambda expert: (-residency.bytes_of(expert), expert))
        yield from sorted([expert for expert in residents if expert in places], key=places.__getitem__)

    def rebuild(self) -> None:
        self._preliminaries.clear()
        known = self._residency.experts.values()
        for facts in known:
            for subsequent, _ in facts.then:
                self._preliminaries.setdefault(subsequent, []).append(facts.expert)
        by_usage = sorted(known, key=lambda facts: (facts.usage, facts.expert))
        self._places = {facts.expert: place for place, facts in enumerate(by_usage)}


ORDERS: dict[
    Literal["lru", "fifo", "two stages"], type[LeastRecentlyUsed] | type[FirstInFirstOut] | type[TwoStages]
] = {"lru": LeastRecentlyUsed, "fifo": FirstInFirstOut, "two stages": TwoStages}


class LeastWanted:
    """Residents without demand by ascending usage probability, then those with demand, the least wanted first."""

    def __init__(self) -> None:
        self._ranking: Ranking[ExpertId] = Ranking()
        self._spare_bytes: dict[ExpertId, int] = {}
        #: Bytes of all that nobody waits for.
        self.unwanted_bytes = 0

    def put(self, expert: ExpertId, demand: int, usage: float, weights_bytes: int, *, elsewhere: bool = False) -> None:
        """`elsewhere`: another pool has it too, so that it is cheap to bring back."""
        self._ranking.put(expert, (demand, not elsewhere, usage, expert))
        self._count(expert, 0 if demand else weights_bytes)

    def forget(self, expert: ExpertId) -> None:
        self._ranking.discard(expert)
        self._count(expert, 0)

    def clear(self) -> None:
        self._ranking.clear()
        self._spare_bytes.clear()
        self.unwanted_bytes = 0

    def unwanted(self) -> Iterable[ExpertId]:
        for expert in self._ranking.ordered():
            rank = self._ranking.rank(expert)
            if rank is None or rank[0] != 0:
                return
            yield expert

    def ordered(self) -> Iterable[ExpertId]:
        return self._ranking.ordered()

    def _count(self, expert: ExpertId, spare_bytes: int) -> None:
        before = self._spare_bytes.pop(expert, 0)
        if spare_bytes:
            self._spare_bytes[expert] = spare_bytes
        self.unwanted_bytes += spare_bytes - before
