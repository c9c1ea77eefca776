"""Orders of eviction: by use, by age, or in the paper's two stages."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal

from daemon.policy.request import PoolId
from daemon.policy.residency import Residency
from experts.spec import ExpertId


class FirstInFirstOut:
    """The expert loaded longest ago leaves first (`samba-fifo`): a ledger keeps residents in that order."""

    def __init__(self, residency: Residency, pools: Sequence[PoolId]) -> None:
        del pools  # those of executors: for orders that note each use
        self._residency = residency

    def used(self, pool: PoolId, expert: ExpertId) -> None:
        """A batch of `expert` began in `pool`."""

    def residency_changed(self, expert: ExpertId) -> None:
        """`expert` has become resident somewhere, is on its way, or has left."""

    def victims(self, pool: PoolId) -> Iterable[ExpertId]:
        return self._residency.ledgers[pool].resident

    def rebuild(self) -> None:
        """Recompute everything derived from the facts: they have changed."""


class LeastRecentlyUsed(FirstInFirstOut):
    """The expert whose last batch (or load) began longest ago leaves first (`samba`)."""

    def __init__(self, residency: Residency, pools: Sequence[PoolId]) -> None:
        super().__init__(residency, pools)
        self._orders = [(pool, residency.ledgers[pool], OrderedDict[ExpertId, None]()) for pool in pools]
        self._by_pool = {pool: order for pool, _, order in self._orders}

    def used(self, pool: PoolId, expert: ExpertId) -> None:
        order = self._by_pool[pool]
        if expert in order:
            order.move_to_end(expert)

    def residency_changed(self, expert: ExpertId) -> None:
        for _, ledger, order in self._orders:
            if not ledger.is_ready(expert):
                order.pop(expert, None)
            elif expert not in order:
                order[expert] = None

    def victims(self, pool: PoolId) -> Iterable[ExpertId]:
        return tuple(self._by_pool[pool])


class TwoStages(FirstInFirstOut):
    """Dependency-aware expert management (CoServe §4.3).

    Subsequent experts without a resident preliminary expert in the pool leave first, by descending bytes; then the
    others, by ascending usage probability. Queued requests keep no expert.
    """

    def __init__(self, residency: Residency, pools: Sequence[PoolId]) -> None:
        super().__init__(residency, pools)
        self._preliminaries: dict[ExpertId, list[ExpertId]] = {}
        #: Places by ascending usage probability.
        self._places: dict[ExpertId, int] = {}
        self.rebuild()

    def victims(self, pool: PoolId) -> Iterable[ExpertId]:
        residents, places = dict.fromkeys(self._residency.ledgers[pool].resident), self._places
        # Experts that left the catalog have no reason to stay.
        yield from [expert for expert in residents if expert not in places]
        preliminaries, bytes_of = self._preliminaries, self._residency.bytes_of
        first = [
            expert
            for expert in residents
            if expert in preliminaries and residents.keys().isdisjoint(preliminaries[expert])
        ]
        yield from sorted(first, key=lambda expert: (-bytes_of(expert), expert))
        yield from sorted([expert for expert in residents if expert in places], key=places.__getitem__)

    def rebuild(self) -> None:
        self._preliminaries.clear()
        experts = self._residency.experts.values()
        for facts in experts:
            for subsequent, _ in facts.then:
                self._preliminaries.setdefault(subsequent, []).append(facts.expert)
        by_usage = sorted(experts, key=lambda facts: (facts.usage, facts.expert))
        self._places = {facts.expert: place for place, facts in enumerate(by_usage)}


ORDERS: dict[Literal["lru", "fifo", "two stages"], type[FirstInFirstOut]] = {
    "lru": LeastRecentlyUsed,
    "fifo": FirstInFirstOut,
    "two stages": TwoStages,
}
