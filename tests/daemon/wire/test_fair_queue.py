"""The order of messages: least served first, by source and by connection, and none waits for ever."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.wire.fair_queue import FairQueue


@pytest.mark.promise(
    "Overload and hostile publishers",
    "A hundred connections of one source count as one source, and a connection that invents sources counts as "
    "one connection: the one served least goes first",
)
@pytest.mark.parametrize(
    "name_of",
    [
        lambda number: ("connection", "flood"),
        lambda number: (f"connection-{number}", "flood"),
        lambda number: ("flood's", f"source-{number}"),
    ],
    ids=["one source", "a hundred connections of one source", "a connection that invents a source for each message"],
)
def test_a_source_that_sends_now_and_then_goes_before_one_that_floods(name_of: Callable[[int], Sequence[str]]) -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.add(tuple(name_of(number)), "flood", 20_000)
    queue.take_next()
    queue.add(("quiet's", "quiet"), "quiet", 20_000)
    assert "quiet" in (queue.take_next(), queue.take_next())


def test_two_sources_that_always_send_share_evenly_by_bytes() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(300):
        queue.add(("a",), "large", 950_000)
        queue.add(("b",), "small", 50_000)
    taken = Counter(queue.take_next() for _ in range(220))
    assert 8 <= taken["small"] / taken["large"] <= 12


def test_beyond_the_room_the_newest_of_the_flood_goes_and_the_quiet_one_stays() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add(("b", "quiet"), "quiet", 1000)
    for number in range(10):
        queue.add(("a", "flood"), f"flood {number}", 1000)
    queue.drop_payload(str.upper)
    assert queue.bytes == 10_000
    assert [queue.shed() for _ in range(3)] == ["FLOOD 9", "flood 8", "flood 7"]
    assert [queue.take_next() for _ in range(2)] == ["quiet", "flood 0"]


def test_large_messages_make_short_groups_and_another_sources_small_one_goes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.add(("flood",), f"flood {number}", 10_000_000)
    queue.add(("quiet",), "quiet", 20_000)
    groups = [queue.take_group(32, 4_000_000) for _ in range(5)]
    assert groups == [["quiet"], ["flood 0"], ["flood 1"], ["flood 2"], []]


names = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=2, unique=True)


@given(st.lists(st.tuples(st.sampled_from(["add", "add", "take", "shed", "lighten"]), names, st.integers(0, 10**6))))
def test_the_books_are_right_and_messages_of_one_name_stay_in_order(steps: list[tuple[str, list[str], int]]) -> None:
    queue: FairQueue[tuple[int, tuple[str, ...]]] = FairQueue()
    taken: list[tuple[int, tuple[str, ...]]] = []
    for number, (step, names_of_message, size_bytes) in enumerate(steps):
        if step == "add":
            queue.add(tuple(names_of_message), (number, tuple(names_of_message)), size_bytes)
        elif step == "lighten":
            queue.drop_payload(lambda item: item)
        elif len(queue) and step == "take":
            taken.append(queue.take_next())
        elif len(queue):
            queue.shed()
    for name in "abcdef":
        numbers = [number for number, names_of_message in taken if name in names_of_message]
        assert numbers == sorted(numbers)
    while len(queue):
        queue.take_next()
    assert (queue.bytes, len(queue._tags), len(queue._waiting)) == (0, 0, 0)
