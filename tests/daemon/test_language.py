"""Memory between a language model and the images' pools, where somebody refuses, fails or takes his time."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import daemon.language
from daemon.config import Config, Device, Model
from daemon.control import ControlError
from daemon.language import Language

DEVICE, MOST, LEAST = 1000, 400, 100


class Memory:
    """A model in service, as far as its memory goes: the machine has `there_is` bytes for it."""

    is_idle = True

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.there_is = DEVICE
        self.asked: list[int] = []

    def resize(self, budget_bytes: int) -> None:
        self.asked.append(budget_bytes)
        self.budget_bytes = min(budget_bytes, self.there_is)
        if budget_bytes > self.there_is:
            raise MemoryError("there is no memory for so many experts")

    def was_changed(self) -> str | None:
        return None

    def account(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class Drive:
    """One pool of images, and an expert that waits for room in it while `lacks_room`."""

    def __init__(self) -> None:
        self.device, self.budget_bytes = "cpu", DEVICE - MOST
        self.lacks_room = False
        self.refuses = self.is_busy = False
        self.orders: list[int] = []

    @property
    def images_under_way(self) -> int:
        return int(self.lacks_room)

    def ask_later(self, kind: str, fields: Mapping[str, Any]) -> "Future[dict[str, Any]]":
        done: Future[dict[str, Any]] = Future()
        if kind == "limits":
            self.orders.append(fields["expert_memory"]["cpu"])
            if self.is_busy:
                return done
            if self.refuses:
                done.set_exception(ControlError("does_not_fit", "the largest expert does not fit"))
                return done
            self.budget_bytes = self.orders[-1]
        executors = [{"device": "cpu", "budget_bytes": self.budget_bytes, "used_bytes": self.budget_bytes}]
        experts = [{"resident": False, "bytes": 50, "queued": int(self.lacks_room)}]
        done.set_result({"executors": executors, "expert_switches": 0, "experts": experts})
        return done


class Line:
    def __init__(self, folder: Path) -> None:
        model = Model(checkpoint=folder / "none", memory=MOST, least_memory=LEAST)
        devices = {"cpu": Device(expert_memory=DEVICE)}
        config = Config(rules=folder / "rules", catalog=folder, devices=devices, models={"m": model})
        self.opened: list[Memory] = []
        self.language = Language(config, lambda _name, _model: self.open, lambda _outcome: None)
        self.drive = Drive()
        self.shared = self.language._devices[0]
        self.shared.lease._give_back_s = 0.0
        self.language.start(self.drive, [self.drive])
        self.until(lambda: self.opened)

    def open(self, budget_bytes: int, _gets_on: Callable[[], None]) -> Any:
        self.opened.append(Memory(budget_bytes))
        return self.opened[-1]

    @property
    def model(self) -> Memory:
        return self.opened[-1]

    def until(self, happened: Callable[[], Any]) -> None:
        until_s = time.monotonic() + 10
        while not happened():
            assert time.monotonic() < until_s, "it did not happen"
            time.sleep(0.005)


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    monkeypatch.setattr(daemon.language, "_LOOK_S", 0.01)
    monkeypatch.setattr(daemon.language, "_ANSWER_S", 0.05)
    found = Line(tmp_path)
    yield found
    found.language.stop(5.0)


def test_images_that_lack_room_get_what_the_model_gives_up_and_it_goes_back(line: Line) -> None:
    line.drive.lacks_room = True
    line.until(lambda: (line.model.budget_bytes, line.drive.budget_bytes) == (LEAST, DEVICE - LEAST))
    line.drive.lacks_room = False
    line.until(lambda: (line.model.budget_bytes, line.drive.budget_bytes) == (MOST, DEVICE - MOST))


def test_a_model_for_whose_growth_there_is_no_memory_keeps_what_it_has_and_holds_nobody_up(line: Line) -> None:
    line.drive.lacks_room = True
    line.until(lambda: line.model.budget_bytes == LEAST)
    line.model.there_is = 250
    line.drive.lacks_room = False
    line.until(lambda: MOST in line.model.asked)
    line.until(lambda: line.language.threads["m"].held_bytes == LEAST)
    time.sleep(0.1)
    assert line.model.asked == [LEAST, MOST, LEAST]
    assert line.model.budget_bytes == LEAST
    line.drive.lacks_room = True
    line.until(lambda: line.drive.budget_bytes == DEVICE - LEAST)


def test_a_drive_that_was_busy_once_is_asked_again(line: Line) -> None:
    line.drive.lacks_room = True
    line.until(lambda: line.drive.budget_bytes == DEVICE - LEAST)
    line.drive.lacks_room, line.drive.is_busy = False, True
    line.until(lambda: line.drive.orders[-1] == DEVICE - MOST)
    line.drive.is_busy = False
    line.until(lambda: line.model.budget_bytes == MOST)


def test_what_the_pools_refuse_is_not_asked_again_and_again(line: Line) -> None:
    line.drive.refuses = line.drive.lacks_room = True
    line.until(lambda: line.drive.orders)
    time.sleep(0.1)
    assert line.drive.orders == [DEVICE - LEAST]
