"""Sources take turns, however much waits of each."""

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from daemon.policy.fair_queue import Turns


def turns_of(*waiting: tuple[str, str, int]) -> Turns[str]:
    turns: Turns[str] = Turns()
    for source, item, size_bytes in waiting:
        turns.add((source,), item, size_bytes)
    return turns


def test_a_single_image_does_not_wait_behind_a_flood():
    turns = turns_of(*(("flood", f"f{n}", 1) for n in range(1000)), ("quiet", "q", 1))
    assert turns.take(4, 100) == ["f0", "q", "f1", "f2"]


def test_large_images_make_short_groups_and_another_source_s_small_one_goes_first():
    turns = turns_of(*(("flood", f"f{n}", 10_000_000) for n in range(3)), ("quiet", "q", 20_000))
    assert turns.take(32, 4_000_000) == ["q"]
    assert turns.take(32, 4_000_000) == ["f0"]
    assert turns.take(32, 4_000_000) == ["f1"]


@given(
    waiting=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 50))),
    max_items=st.integers(1, 6),
    max_bytes=st.integers(1, 60),
)
def test_every_image_comes_once_in_its_source_s_order_and_no_source_waits_more_than_a_round(
    waiting: list[tuple[str, int]], max_items: int, max_bytes: int
):
    turns: Turns[tuple[str, int]] = Turns()
    queues: dict[str, deque[tuple[str, int]]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for number, (source, size_bytes) in enumerate(waiting):
        turns.add((source,), (source, number), size_bytes)
        queues.setdefault(source, deque()).append((source, number))
        sizes[source, number] = size_bytes
    served: Counter[str] = Counter()
    while len(turns):
        group = turns.take(max_items, max_bytes)
        assert 1 <= len(group) <= max_items
        assert len(group) == 1 or sum(sizes[item] for item in group) <= max_bytes
        for item in group:
            assert queues[item[0]].popleft() == item
            served[item[0]] += 1
        waiting_still = [source for source, queue in queues.items() if queue]
        assert all(served[source] >= max(served.values()) - 1 for source in waiting_still)
    assert not any(queues.values())
    assert turns.take(max_items, max_bytes) == []


def test_a_source_of_small_images_gets_as_many_bytes_as_one_of_large_ones():
    turns: Turns[str] = Turns()
    for _ in range(200):
        turns.add(("large",), "large", 5_000_000)
        turns.add(("small",), "small", 20_000)
    groups = [turns.take(64, 4_000_000) for _ in range(5)]
    assert sum(group.count("large") for group in groups) <= 3
    assert sum(group.count("small") for group in groups) >= 120
