"""Back-pressure: bounded in count and bytes, of each source and of all, and never for ever."""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from daemon.config.settings import Limits
from daemon.intake.backlog import Accounts, Backlog, BacklogLimits
from daemon.storage.disk_space import VERDICT_BYTES, DiskSpace


def a_backlog(images: int = 10, size: int = 1000, source_images: int = 10, source_bytes: int = 1000) -> Backlog:
    return Backlog(BacklogLimits(images, size, source_images, source_bytes))


@pytest.mark.promise(
    "Overload and hostile publishers",
    "The backlog is bounded in images and bytes, per source and in total",
)
def test_a_source_is_held_to_its_own_limits() -> None:
    backlog = a_backlog(images=100, size=10_000, source_images=2, source_bytes=500)
    assert backlog.enter("a", 1, b"a") is None
    assert backlog.enter("a", 1, b"a") is None
    assert backlog.enter("a", 1, b"a") is not None
    assert backlog.enter("b", 400, b"b") is None
    assert backlog.enter("b", 101, b"b") is not None
    assert backlog.room("a") == 0
    assert backlog.room("b") == 1


def test_a_flooding_source_leaves_room_for_one_that_sends_now_and_then() -> None:
    backlog = a_backlog(images=80, size=10**6, source_images=80, source_bytes=10**6)
    assert backlog.enter("quiet", 1, b"quiet") is None
    while backlog.enter("flood", 1, b"flood") is None:
        pass
    assert backlog.images == 70
    assert backlog.enter("quiet", 1, b"quiet") is None


def test_a_client_that_invents_a_source_for_each_image_leaves_room_for_one_that_sends_now_and_then() -> None:
    backlog = a_backlog(images=80, size=8000, source_images=80, source_bytes=8000)
    for number in range(80):
        backlog.enter(f"invented-{number}", 1, b"flood")
    assert backlog.images == 70
    assert [backlog.enter("quiet", 200, b"quiet") for _ in range(10)] == [None] * 10


def test_an_empty_backlog_takes_an_image_larger_than_any_limit() -> None:
    backlog = a_backlog(size=100, source_bytes=100)
    assert backlog.enter("a", 10_000, b"a") is None
    assert backlog.enter("a", 1, b"a") is not None
    backlog.leave("a", 10_000)
    assert backlog.enter("a", 1, b"a") is None


def test_images_of_before_a_restart_count_whatever_the_limits_are() -> None:
    backlog = a_backlog(images=2)
    for _ in range(5):
        backlog.add("a", 10)
    assert backlog.images == 5
    assert backlog.enter("a", 1, b"a") is not None
    assert backlog.room("a") == 0


def test_an_image_that_a_limit_refuses_reserves_no_room_on_the_disk() -> None:
    disk_space = DiskSpace({})
    backlog = a_backlog(images=1)
    accounts = Accounts(Limits(credit=8), backlog, disk_space)
    message = SimpleNamespace(image_id="i", source="a")
    kinds = [accounts.enter((b"a",), message, 10) for _ in range(2)]
    assert [answer and answer.kind for answer in kinds] == [None, "busy"]
    assert disk_space.admitted_bytes == 10 + VERDICT_BYTES
    assert accounts.memory.bytes == backlog.bytes == 10


class BacklogMachine(RuleBasedStateMachine):
    """Images that enter and leave in any order: the sums are right and the limits hold."""

    inside = Bundle("inside")

    def __init__(self) -> None:
        super().__init__()
        self.backlog = Backlog(BacklogLimits(8, 100, 5, 60))
        self.held: list[tuple[str, int]] = []

    @rule(
        target=inside, source=st.sampled_from("abc"), size=st.integers(1, 50), connection=st.sampled_from([b"1", b"2"])
    )
    def enter(self, source: str, size: int, connection: bytes) -> tuple[str, int]:
        full = self.backlog.enter(source, size, connection)
        if full is None:
            self.held.append((source, size))
        return (source, size if full is None else 0)

    @rule(image=consumes(inside))
    def leave(self, image: tuple[str, int]) -> None:
        if image[1]:
            self.backlog.leave(*image)
            self.held.remove(image)

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.backlog.images == len(self.held) <= 8
        assert self.backlog.bytes == sum(size for _, size in self.held) <= 100
        for source in "abc":
            mine = sum(each == source for each, _ in self.held)
            assert self.backlog.room(source) == min(5 - mine, 8 - len(self.held))


TestBacklogMachine = BacklogMachine.TestCase
TestBacklogMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
