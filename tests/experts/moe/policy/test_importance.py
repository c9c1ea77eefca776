"""Who is in memory under SwapMoE: importance with a memory, swaps that keep each layer's number, turns that add up."""

import random

import pytest

from experts.moe.policy.importance import Importance, UpdateTurns, VirtualExperts

LAYERS, EXPERTS, FLOOR = 3, 8, 2


def an_importance(*, window: float = 10.0, prior_tokens: float = 0.0) -> Importance:
    return Importance(LAYERS, EXPERTS, window, prior_tokens)


def virtual_experts(slots: int, importance: Importance | None = None) -> VirtualExperts:
    """Filled as a cache would fill it."""
    virtual = VirtualExperts(importance or an_importance(), LAYERS, EXPERTS, FLOOR)
    virtual.resize(slots)
    for key in virtual.first():
        virtual.loaded(key)
    return virtual


def only(*experts: int, value: float = 1.0) -> list[float]:
    return [value if expert in experts else 0.0 for expert in range(EXPERTS)]


def test_before_the_first_token_the_prior_decides_and_a_strong_one_goes_on_deciding():
    strong, weak = an_importance(prior_tokens=1000), an_importance(prior_tokens=1)
    for importance in (strong, weak):
        importance.set_prior([only(3, value=7.0), *[only(0)] * (LAYERS - 1)])
        assert max(range(EXPERTS), key=importance.of(0).__getitem__) == 3
        importance.add(0, only(5), 5)
    assert strong.of(0)[3] > strong.of(0)[5]
    assert weak.of(0)[5] > weak.of(0)[3]


def test_a_layer_swaps_its_least_important_expert_for_the_most_important_absent_one():
    virtual = virtual_experts(9)
    assert virtual.present(1) == (0, 1, 2)
    virtual.importance.add(1, [3.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 9.0], 1)
    [swap] = virtual.plan(1, 9)
    assert (swap.load, swap.evict) == ((1, 7), (1, 1))


def test_random_importance_never_leaves_a_layer_below_its_floor_nor_the_slots_overfull():
    rng = random.Random(0)
    for slots in (7, 8, 11, 17):
        virtual = virtual_experts(slots)
        for _ in range(300):
            layer = rng.randrange(LAYERS)
            virtual.importance.add(layer, [rng.random() ** 4 for _ in range(EXPERTS)], 1 + rng.randrange(9))
            for swap in virtual.plan(layer, slots):
                if swap.evict is not None:
                    assert swap.evict[1] in virtual.present(swap.evict[0])
                    virtual.dropped(swap.evict)
                assert all(len(virtual.present(number)) >= FLOOR for number in range(LAYERS))
                assert swap.load[1] not in virtual.present(swap.load[0])
                virtual.loaded(swap.load)
            assert sum(len(virtual.present(number)) for number in range(LAYERS)) == slots


@pytest.mark.parametrize("period", [1, 2, 3, 4, 5, 7, 12])
def test_each_layer_has_one_turn_in_a_cycle(period: int):
    turns = UpdateTurns(LAYERS, period)
    firsts = []
    for _ in range(LAYERS):
        cycle = [turns.due() for _ in range(period)]
        firsts.append(cycle[0][0][0] if cycle[0] else None)
        begun = [layer for step in cycle for layer, _ in step]
        assert sorted(set(begun)) == list(range(LAYERS))
        last = [layer for step in cycle for layer, steps_left in step if steps_left == 1]
        assert sorted(last) == list(range(LAYERS)), "a turn ends once"
        if period >= LAYERS:
            assert max(len(step) for step in cycle) <= 1
    assert sorted(firsts) == list(range(LAYERS)), "each layer is first in turn"
