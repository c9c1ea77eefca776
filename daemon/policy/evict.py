"""In which order residents go: least recently used (`samba`), or unwanted first, then by demand (`coserve-plus`)."""

from collections import OrderedDict
from collections.abc import Iterable

from daemon.policy.ranking import Ranking
from experts.spec import ExpertId


class LeastRecentlyUsed:
    def __init__(self) -> None:
        self._order: OrderedDict[ExpertId, None] = OrderedDict()

    def use(self, expert: ExpertId) -> None:
        self._order[expert] = None
        self._order.move_to_end(expert)

    def forget(self, expert: ExpertId) -> None:
        self._order.pop(expert, None)

    def ordered(self) -> Iterable[ExpertId]:
        return tuple(self._order)


class LeastWanted:
    """Residents without demand by ascending usage probability, then those with demand, the least wanted first."""

    def __init__(self) -> None:
        self._ranking: Ranking[ExpertId] = Ranking()

    def put(self, expert: ExpertId, demand: int, usage: float) -> None:
        self._ranking.put(expert, (demand, usage, expert))

    def forget(self, expert: ExpertId) -> None:
        self._ranking.discard(expert)

    def clear(self) -> None:
        self._ranking.clear()

    def unwanted(self) -> Iterable[ExpertId]:
        for expert in self._ranking.ordered():
            rank = self._ranking.rank(expert)
            if rank is None or rank[0] != 0:
                return
            yield expert

    def ordered(self) -> Iterable[ExpertId]:
        return self._ranking.ordered()
