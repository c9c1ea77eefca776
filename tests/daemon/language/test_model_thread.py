"""A language model's thread around steps that hang or take their time."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from daemon.language.model_thread import ModelThread
from daemon.records import Generation
from tests.waiting import until


class Steps:
    """Ends one request a step; a test may hold a step."""

    text_tokens = 100

    def __init__(self, gets_on: Callable[[], None]) -> None:
        self.gets_on = gets_on
        self.going = threading.Event()
        self.going.set()
        self.stepping = threading.Event()
        self.taken: list[Generation] = []
        self.budget_bytes = 0
        self.closed = False

    @property
    def is_idle(self) -> bool:
        return not self.taken

    def begin(self, text: Generation, arrived_s: float) -> Generation | None:
        if text.prompt == "bad":
            return replace(text, reason="bad_prompt")
        self.taken.append(text)
        return None

    def step(self) -> tuple[list[tuple[Generation, str | None]], Exception | None]:
        self.stepping.set()
        self.going.wait()
        self.stepping.clear()
        return [(replace(self.taken.pop(0), text="text"), None)], None

    def was_changed(self) -> str | None:
        return None

    def resize(self, budget_bytes: int) -> None:
        if budget_bytes < 10:
            raise ValueError("too little")
        self.budget_bytes = budget_bytes

    def account(self) -> dict[str, Any]:
        return {"used_bytes": self.budget_bytes}

    def close(self) -> None:
        self.closed = True


class Bench:
    """A thread with its outcomes and the models that it opened."""

    def __init__(self, **settings: Any) -> None:
        self.outcomes: dict[int, Generation] = {}
        self.opened: list[Steps] = []
        self.thread = ModelThread("m", self.open, 100, on_outcome=self.ended, **settings)
        self.thread.start()

    def open(self, budget_bytes: int, gets_on: Callable[[], None]) -> Steps:
        self.opened.append(Steps(gets_on))
        self.opened[-1].budget_bytes = budget_bytes
        return self.opened[-1]

    def ended(self, outcome: Generation) -> None:
        assert outcome.generation_id not in self.outcomes, "a request ends once"
        self.outcomes[outcome.generation_id] = outcome

    def ask(self, *numbers: int, prompt: str = "p") -> None:
        for number in numbers:
            at = {"accepted_s": time.monotonic()}
            self.thread.generate(Generation("s", str(number), "m", prompt, generation_id=number, **at))

    def until_open(self) -> Steps:
        """Wait for the model; return it."""
        until(lambda: self.thread.status()["state"] == "ready")
        return self.opened[-1]

    def until_held(self) -> Steps:
        """Hold the step of a first request, and return the model."""
        steps = self.until_open()
        steps.going.clear()
        self.ask(1)
        steps.stepping.wait(60)
        return steps

    def give_up(self) -> None:
        """Give up once the thread hangs."""
        until(lambda: self.thread.hangs_s() is not None)
        self.thread.give_up("it hangs")

    def reasons(self, *numbers: int) -> list[str | None]:
        until(lambda: all(number in self.outcomes for number in numbers))
        return [self.outcomes[number].reason for number in numbers]


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(**settings: Any) -> Bench:
        benches.append(Bench(**settings))
        return benches[-1]

    yield make
    for bench in benches:
        for steps in bench.opened:
            steps.going.set()
        assert bench.thread.stop(60.0)
        assert all(steps.closed for steps in bench.opened)


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    return make_bench(hang_after_s=0.1)


def test_a_request_ends_once_and_a_bad_prompt_at_once(bench: Bench) -> None:
    bench.ask(1, 2)
    bench.ask(3, prompt="bad")
    assert bench.reasons(1, 2, 3) == [None, None, "bad_prompt"]
    assert bench.thread.waiting == 0


@pytest.mark.promise("Language models", "A step that hangs costs its requests; a long step does not")
def test_a_step_that_hangs_costs_its_requests_and_later_ones_until_it_ends(bench: Bench) -> None:
    first = bench.until_open()
    first.going.clear()
    bench.ask(1, 2)
    bench.give_up()
    assert bench.reasons(1, 2) == ["model_failed"] * 2
    assert bench.thread.status()["state"] == "hanging"
    bench.ask(3)
    assert bench.reasons(3) == ["model_failed"]
    first.going.set()
    until(lambda: first.closed)
    bench.ask(4)
    assert bench.reasons(4) == [None]
    assert len(bench.opened) == 2
    assert not bench.thread.is_failing


def test_a_hung_change_of_memory_costs_its_requests_and_the_model_comes_back(bench: Bench) -> None:
    first, going = bench.until_open(), threading.Event()
    first.resize = lambda budget_bytes: going.wait() and None  # type: ignore[method-assign]
    done = bench.thread.resize(50)
    bench.give_up()
    bench.ask(1)
    assert bench.reasons(1) == ["model_failed"]
    going.set()
    assert done.result(60) == 50
    until(lambda: first.closed and bench.thread.status()["state"] != "hanging")
    bench.ask(2)
    assert bench.reasons(2) == [None]


def test_a_long_step_that_makes_progress_does_not_hang(make_bench: Callable[..., Bench]) -> None:
    now_s = 100.0
    bench = make_bench(hang_after_s=10.0, clock=lambda: now_s)
    steps = bench.until_held()
    for _ in range(10):
        now_s += 9.0
        assert bench.thread.hangs_s() is None
        steps.gets_on()
    now_s += 11.0
    assert bench.thread.hangs_s() == 11.0
    steps.going.set()
    assert bench.reasons(1) == [None]


def test_a_new_budget_counts_from_the_order_on_until_it_holds(bench: Bench) -> None:
    steps = bench.until_held()
    smaller, same = bench.thread.resize(50), bench.thread.resize(50)
    assert smaller is same
    assert bench.thread.held_bytes == 100
    steps.going.set()
    assert smaller.result(60) == 50
    assert (bench.thread.held_bytes, steps.budget_bytes) == (50, 50)
    with pytest.raises(ValueError, match="too little"):
        bench.thread.resize(5).result(60)
    assert bench.thread.held_bytes == 50
