from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.policy.late.ranking import Ranking

STEPS = st.lists(st.tuples(st.integers(0, 20), st.none() | st.integers(-50, 50)), max_size=300)


@settings(deadline=None)
@given(STEPS)
def test_a_ranking_orders_as_sorting_would(steps: list[tuple[int, int | None]]):
    ranking: Ranking[int] = Ranking()
    ranks: dict[int, tuple[int, int]] = {}
    for item, rank in steps:
        if rank is None:
            ranking.discard(item)
            ranks.pop(item, None)
        else:
            ranking.put(item, (rank, item))
            ranks[item] = (rank, item)
        expected = sorted(ranks, key=lambda item: ranks[item])
        assert list(ranking.ordered()) == expected
        first = ranking.first()
        assert (None if first is None else first[0]) == (expected[0] if expected else None)


def test_an_item_whose_rank_changes_often_is_there_once():
    ranking: Ranking[str] = Ranking()
    for step in range(10_000):
        ranking.put("a", (step, "a"))
    assert list(ranking.ordered()) == ["a"]
    assert ranking.first() == ("a", (9_999, "a"))
