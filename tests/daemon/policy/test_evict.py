"""The order in which experts leave a full pool: by use, by age, or in the two stages of CoServe §4.3."""

from tests.daemon.policy.line import a_pool, an_expert
from tests.daemon.policy.queue_parts import some_parts

CHAINS = [
    an_expert("a", 10, 0.5, then=[("d", 0.9)]),
    an_expert("b", 10, 0.3, then=[("d", 0.9), ("e", 0.1)]),
    an_expert("c", 10, 0.2),
    an_expert("d", 20, 0.8),
    an_expert("e", 30, 0.1),
]
ONE = [a_pool("cpu", 1000)]


def test_first_go_subsequent_experts_without_a_preliminary_the_biggest_first_then_the_least_used():
    """Figure 10: c is nobody's subsequent expert, so it waits for the second stage."""
    parts = some_parts(CHAINS, ONE)
    parts.hold("cpu", "c", "d", "e")
    assert list(dict.fromkeys(parts.victims("cpu"))) == ["e", "d", "c"]
    parts.hold("cpu", "a")
    assert list(dict.fromkeys(parts.victims("cpu"))) == ["e", "c", "a", "d"]
    parts.hold("cpu", "b")
    assert list(dict.fromkeys(parts.victims("cpu"))) == ["e", "c", "b", "a", "d"]


def test_a_preliminary_in_another_executors_memory_does_not_count():
    parts = some_parts(CHAINS, [a_pool("cuda:0/0", 100), a_pool("cuda:0/1", 100)])
    parts.hold("cuda:0/0", "a")
    parts.hold("cuda:0/1", "c", "d")
    assert parts.victims("cuda:0/1")[0] == "d"


def test_the_least_recently_used_goes_first_and_a_load_is_a_use():
    parts = some_parts(CHAINS, ONE, "samba")
    parts.hold("cpu", "a", "b", "c")
    parts.add("a")
    parts.take("cpu")
    assert parts.victims("cpu") == ["b", "c", "a"]
    parts.drop("cpu", "b")
    assert parts.victims("cpu") == ["c", "a"]


def test_the_first_that_came_goes_first_and_use_does_not_matter():
    parts = some_parts(CHAINS, ONE, "samba-fifo")
    parts.hold("cpu", "b", "a", "c")
    parts.add("b")
    parts.take("cpu")
    assert parts.victims("cpu") == ["b", "a", "c"]
