"""What is loaded before it is needed: the fill at the start, and the experts that queued requests will want."""

from collections.abc import Iterable, Iterator, Sequence

from daemon.policy.floor import Floor
from daemon.policy.ranking import Rank, Ranking
from daemon.policy.request import ExpertFacts, PoolFacts, PoolId, Request
from experts.spec import ExpertId


def initial_fill(experts: Iterable[ExpertFacts], pools: Sequence[PoolFacts]) -> dict[PoolId, tuple[ExpertId, ...]]:
    """Experts by descending usage probability, round robin over pools until the budgets are full (CoServe §4.1).

    An expert that fits its pool no more goes to the next that has room; experts that no rule uses stay out.
    """
    free_bytes = {pool.pool: pool.budget_bytes for pool in pools}
    fill: dict[PoolId, list[ExpertId]] = {pool.pool: [] for pool in pools}
    order = [pool.pool for pool in pools]
    used = [facts for facts in experts if facts.usage > 0.0]
    for facts in sorted(used, key=lambda known: (-known.usage, known.expert)):
        for turn, pool in enumerate(order):
            if facts.weights_bytes <= free_bytes[pool]:
                free_bytes[pool] -= facts.weights_bytes
                fill[pool].append(facts.expert)
                order = order[turn + 1 :] + order[: turn + 1]
                break
    return {pool: tuple(chosen) for pool, chosen in fill.items()}


class Wanted:
    """Experts with demand that are resident nowhere, by demand; one ranking per kind of processor.

    Beside a GPU the CPU's pool takes the least wanted, so that a GPU load buys many images. A group that
    has outgrown the CPU (`takeover` requests queued) may come to a GPU although it is resident on the CPU.
    """

    def __init__(self, floor: Floor, takeover: int) -> None:
        self._floor = floor
        self._takeover = takeover
        self._gpu: Ranking[ExpertId] = Ranking()
        self._cpu: Ranking[ExpertId] = Ranking()
        self._turn: Ranking[ExpertId] = Ranking()

    def put(self, expert: ExpertId, demand: int, queued: int, head: Request | None, turn_s: float | None) -> None:
        """`demand` in SHARE_UNITS; `head` is the oldest queued request; `turn_s` when the group becomes urgent."""
        homes = self._floor.homes(expert)
        is_nowhere = not homes and not self._floor.is_coming(expert)
        since: Rank = (head.arrived_s, head.request_id) if head is not None else (float("inf"), 0)
        on_gpu = any(self._floor.pools[pool].processor == "gpu" for pool in homes)
        outgrown = not on_gpu and not self._floor.is_coming(expert, "gpu") and queued > self._takeover
        _place(self._gpu, expert, (-demand, *since, expert), wanted=demand > 0 and (is_nowhere or outgrown))
        if self._floor.has_gpu:
            _place(self._cpu, expert, (demand, *since, expert), wanted=queued > 0 and is_nowhere)
        else:
            _place(self._cpu, expert, (-demand, *since, expert), wanted=demand > 0 and is_nowhere)
        _place(self._turn, expert, (turn_s or 0.0, expert), wanted=turn_s is not None and is_nowhere)

    def by_demand(self, pool: PoolId) -> Iterator[ExpertId]:
        ranking = self._gpu if self._floor.pools[pool].processor == "gpu" else self._cpu
        return ranking.ordered()

    def first_turn(self) -> tuple[ExpertId, float] | None:
        """The group, resident nowhere, that becomes urgent first, and when."""
        first = self._turn.first()
        return None if first is None else (first[0], float(first[1][0]))

    def by_turn(self) -> Iterator[ExpertId]:
        return self._turn.ordered()

    def turn_s(self, expert: ExpertId) -> float:
        rank = self._turn.rank(expert)
        return float("inf") if rank is None else float(rank[0])

    def clear(self) -> None:
        for ranking in (self._gpu, self._cpu, self._turn):
            ranking.clear()


def _place(ranking: Ranking[ExpertId], expert: ExpertId, rank: Rank, *, wanted: bool) -> None:
    if wanted:
        ranking.put(expert, rank)
    else:
        ranking.discard(expert)
