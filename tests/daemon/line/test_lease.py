"""The lease of a device's memory: images first, and never more than there is."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from daemon.line.lease import Grant, Held, Lease, ModelShare, next_step_s

MIB = 2**20


class Device:
    """Carries grants out in steps: what is given up is free only once it was carried out."""

    def __init__(self, total_bytes: int, *shares: ModelShare) -> None:
        self.lease = Lease(total_bytes, shares)
        first = self.lease.first_grant()
        #: Bytes by model; None stands for the images.
        self.bytes: dict[str | None, int] = {None: first.images_bytes, **first.models_bytes}
        self.pending: Grant | None = None
        self.now = 0.0

    def held(self) -> Held:
        sizes = dict(self.bytes)
        if self.pending is not None:
            sizes[self.pending.model] = max(sizes[self.pending.model], self.pending.budget_bytes)
        return Held(sizes.pop(None), sizes)

    def look(self, *, under_way: bool, lack_room: bool) -> None:
        grant = self.lease.next_grant(self.held(), self.now, images_under_way=under_way, images_lack_room=lack_room)
        self.pending = grant or self.pending
        held = self.held()
        assert held.images_bytes + sum(held.models_bytes.values()) <= self.lease.total_bytes

    def carry_out(self) -> None:
        if self.pending is not None:
            self.bytes[self.pending.model] = self.pending.budget_bytes
        self.pending = None

    def settle(self, *, under_way: bool = False, lack_room: bool = False) -> None:
        for _ in range(10):
            self.look(under_way=under_way, lack_room=lack_room)
            self.carry_out()


def a_device() -> Device:
    return Device(100 * MIB, ModelShare("a", 40 * MIB, 10 * MIB), ModelShare("b", 20 * MIB, 5 * MIB))


def test_models_have_their_most_and_give_it_up_when_images_lack_room() -> None:
    device = a_device()
    device.settle(under_way=True)
    assert device.held() == Held(40 * MIB, {"a": 40 * MIB, "b": 20 * MIB})
    device.settle(under_way=True, lack_room=True)
    assert device.held() == Held(85 * MIB, {"a": 10 * MIB, "b": 5 * MIB})


def test_a_model_shrinks_before_the_images_grow() -> None:
    device = a_device()
    device.look(under_way=True, lack_room=True)
    assert device.pending == Grant(10 * MIB, "a")
    device.look(under_way=True, lack_room=False)
    assert device.pending == Grant(10 * MIB, "a")
    assert device.bytes[None] == 40 * MIB


def test_it_goes_back_once_no_image_has_been_under_way_for_a_while() -> None:
    device = a_device()
    device.settle(under_way=True, lack_room=True)
    device.settle(under_way=True)
    assert device.bytes["a"] == 10 * MIB
    device.settle()
    device.now = 4.9
    device.settle()
    assert device.bytes["a"] == 10 * MIB
    device.now = 5.0
    device.settle()
    assert device.held() == Held(40 * MIB, {"a": 40 * MIB, "b": 20 * MIB})


def test_a_model_that_cannot_shrink_keeps_what_it_has_and_the_others_give_theirs() -> None:
    device = a_device()
    device.lease.cannot_shrink("a", 40 * MIB)
    device.settle(under_way=True, lack_room=True)
    assert device.held() == Held(55 * MIB, {"a": 40 * MIB, "b": 5 * MIB})


def test_a_model_that_could_not_grow_is_offered_memory_again_only_after_a_while() -> None:
    device = a_device()
    device.settle(under_way=True, lack_room=True)
    device.now = 10.0
    device.settle()
    device.now = 20.0
    device.bytes["a"] = 10 * MIB
    device.lease.cannot_grow("a", device.now)
    device.settle()
    assert (device.bytes["a"], device.pending) == (10 * MIB, None)
    device.now = 50.0
    device.settle()
    assert device.bytes["a"] == 40 * MIB


def test_another_budget_of_the_device_is_kept_too() -> None:
    device = a_device()
    device.settle(under_way=True, lack_room=True)
    device.lease.total_bytes = 120 * MIB
    device.settle(under_way=True)
    assert device.bytes[None] == 105 * MIB


@pytest.mark.promise(
    "Language models",
    "Images get memory from a model when they need it, and both together never exceed the device's budget",
)
@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.floats(0, 3)), max_size=60),
    least=st.integers(0, 40),
)
def test_the_sum_never_exceeds_the_device(steps: list[tuple[bool, bool, bool, float]], least: int) -> None:
    device = Device(100 * MIB, ModelShare("a", 40 * MIB, least * MIB), ModelShare("b", 20 * MIB, 5 * MIB))
    for under_way, lack_room, done, passed_s in steps:
        device.now += passed_s
        if done or device.pending is None:
            device.carry_out()
            device.look(under_way=under_way, lack_room=under_way and lack_room)


def test_a_model_takes_a_tenth_of_the_time_while_images_are_under_way_and_all_of_it_otherwise() -> None:
    assert next_step_s(10.0, 0.5, images_under_way=False) == 10.0
    assert next_step_s(10.0, 0.5, images_under_way=True) == 14.5
