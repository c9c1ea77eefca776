"""Rounds: sides in turn, and what is said of their figures."""

from tests.bench.rounds import ratios, run_in_turn, spread


def test_every_round_has_every_side_and_begins_with_another() -> None:
    order: list[str] = []
    heard: list[str] = []

    def side(name: str):
        return lambda: order.append(name) or len(order)

    runs = run_in_turn({name: side(name) for name in "abc"}, 4, heard.append)
    assert "".join(order) == "".join(heard) == "abcbcacababc"
    assert runs == {"a": [1, 6, 8, 10], "b": [2, 4, 9, 11], "c": [3, 5, 7, 12]}


def test_a_side_that_is_not_wanted_any_more_is_left_out_of_later_rounds() -> None:
    runs = run_in_turn(
        {"slow": lambda: 9.0, "fast": lambda: 1.0},
        3,
        lambda _name: None,
        lambda name, runs: not (runs["fast"] and runs[name] and runs[name][-1] > 2 * runs["fast"][-1]),
    )
    assert runs == {"slow": [9.0], "fast": [1.0] * 3}


def test_a_spread_has_the_lowest_and_the_highest_round_and_ratios_are_of_rounds_that_both_ran() -> None:
    assert spread([3.0, 1.0, 2.0]).text(1) == "2.0 (1.0–3.0)"
    assert ratios([2.0, 9.0, 5.0], [1.0, 3.0]) == [2.0, 3.0]
