"""Loads ahead of need: the fill at the start, and the experts that queued requests will need."""

from collections.abc import Iterable, Iterator, Sequence

from daemon.policy.ranking import Rank, Ranking
from daemon.policy.request import ExpertFacts, PoolFacts, PoolId
from experts.spec import ExpertId


def initial_fill(experts: Iterable[ExpertFacts], pools: Sequence[PoolFacts]) -> dict[PoolId, tuple[ExpertId, ...]]:
    """Return experts by descending usage probability, round robin over pools until the budgets are full (CoServe §4.1).

    An expert that fits its pool no more goes to the next that has room; experts that no rule uses stay out.
    """
    free_bytes = {pool.pool: pool.budget_bytes for pool in pools}
    fill: dict[PoolId, list[ExpertId]] = {pool.pool: [] for pool in pools}
    order = [pool.pool for pool in pools]
    used = [facts for facts in experts if facts.usage > 0.0]
    for facts in sorted(used, key=lambda each: (-each.usage, each.expert)):
        for turn, pool in enumerate(order):
            if facts.weights_bytes <= free_bytes[pool]:
                free_bytes[pool] -= facts.weights_bytes
                fill[pool].append(facts.expert)
                order = order[turn + 1 :] + order[: turn + 1]
                break
    return {pool: tuple(experts_of_pool) for pool, experts_of_pool in fill.items()}


class Wanted:
    """Experts with demand that no pool of a kind holds, ranked once for each way in which they could come.

    `reads`: nowhere, the most wanted first; `least_wanted`: nowhere, the least wanted first, which is what a slow
    processor takes beside a fast one; `staged`: in the RAM tier only; `copies`: on the CPU, but on no GPU; `turns`:
    where no executor is, by urgency.
    """

    def __init__(self) -> None:
        self.staged: Ranking[ExpertId] = Ranking()
        self.copies: Ranking[ExpertId] = Ranking()
        self.reads: Ranking[ExpertId] = Ranking()
        self.least_wanted: Ranking[ExpertId] = Ranking()
        self.turns: Ranking[ExpertId] = Ranking()

    def put(
        self,
        expert: ExpertId,
        *,
        demand: int,
        queued: int,
        since: Rank,
        turn_s: float | None,
        nowhere: bool,
        staged: bool,
        copyable: bool,
    ) -> None:
        """Rank `expert` anew.

        `demand` in SHARE_UNITS, `since` when the oldest request came, `turn_s` when the group becomes urgent.
        """
        most_wanted = (-demand, *since, expert)
        self.reads.place(expert, most_wanted if nowhere and demand > 0 else None)
        self.least_wanted.place(expert, (demand, *since, expert) if nowhere and queued else None)
        self.staged.place(expert, most_wanted if staged and demand > 0 else None)
        self.copies.place(expert, (-queued, *most_wanted) if copyable and demand > 0 else None)
        self.turns.place(expert, (turn_s, expert) if (nowhere or staged) and turn_s is not None else None)

    def by_turn(self, now: float) -> Iterator[ExpertId]:
        for expert in self.turns.ordered():
            rank = self.turns.rank(expert)
            if rank is None or float(rank[0]) > now:
                return
            yield expert

    def clear(self) -> None:
        for ranking in (self.staged, self.copies, self.reads, self.least_wanted, self.turns):
            ranking.clear()
