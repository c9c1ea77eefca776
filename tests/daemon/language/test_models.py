"""Memory between a language model and the images' pools, if one of them refuses, fails or is late."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import daemon.language.models
from daemon.config.settings import Config, Device, Model
from daemon.language.models import LanguageModels
from daemon.wire.control import ControlError
from tests.waiting import until

DEVICE, MAX, MIN, TEXTS = 1000, 400, 100, 50


class Memory:
    """A model in service without its texts: the machine has `available` bytes for it."""

    is_idle = True
    text_tokens = 10

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.available = DEVICE
        self.asked: list[int] = []

    def resize(self, budget_bytes: int) -> None:
        self.asked.append(budget_bytes)
        self.budget_bytes = min(budget_bytes, self.available)
        if budget_bytes > self.available:
            raise MemoryError("there is no memory for so many experts")

    def was_changed(self) -> str | None:
        return None

    def account(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


@dataclass
class Pool:
    device: str
    budget_bytes: int = DEVICE - MAX


class Drive:
    """A pool of images on each device, full, and an expert that waits for room in one while `lacks_room`."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.pools = {device: Pool(device) for device in devices}
        self.lacks_room = self.works = False
        self.switches = 0
        self.refuses = self.is_busy = False
        self.orders: list[int] = []

    @property
    def budget_bytes(self) -> int:
        return self.pools["cpu"].budget_bytes

    @property
    def images_under_way(self) -> int:
        return int(self.lacks_room or self.works)

    def ask_later(self, kind: str, fields: Mapping[str, Any]) -> "Future[dict[str, Any]]":
        done: Future[dict[str, Any]] = Future()
        if kind == "limits":
            ((device, budget_bytes),) = fields["expert_memory"].items()
            self.orders.append(budget_bytes)
            if self.is_busy:
                return done
            if self.refuses:
                done.set_exception(ControlError("does_not_fit", "the largest expert does not fit"))
                return done
            self.pools[device].budget_bytes = budget_bytes
        executors = [
            {"device": pool.device, "budget_bytes": pool.budget_bytes, "used_bytes": pool.budget_bytes}
            for pool in self.pools.values()
        ]
        experts = [{"resident": False, "bytes": 50, "queued": int(self.lacks_room)}]
        done.set_result({"executors": executors, "expert_switches": self.switches, "experts": experts})
        return done


class Line:
    """A model on each device, `m` on the first."""

    def __init__(self, folder: Path, *devices: str) -> None:
        models = {
            name: Model(checkpoint=folder / "none", device=device, memory=MAX, least_memory=MIN, text_memory=TEXTS)
            for name, device in zip("mn", devices, strict=False)
        }
        budgets = {device: Device(expert_memory=DEVICE + TEXTS) for device in devices}
        config = Config(rules=folder / "rules", catalog=folder, devices=budgets, models=models)
        self.opened: list[Memory] = []
        self.drive = Drive(devices)
        pools = list(self.drive.pools.values())
        self.language = LanguageModels(config, self.drive, pools, self.open)
        for shared in self.language._devices:
            shared.lease._give_back_s = 0.0
            shared.lease._again_s = 600.0
        self.language.start(SimpleNamespace(text_finished=lambda _outcome: None))
        until(lambda: len(self.opened) == len(models))

    def open(self, _model: Model, budget_bytes: int, *_reports: object) -> Any:
        self.opened.append(Memory(budget_bytes))
        return self.opened[-1]

    @property
    def model(self) -> Memory:
        return self.opened[-1]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon.language.models, "_LOOK_S", 0.01)
    monkeypatch.setattr(daemon.language.models, "_ANSWER_S", 60.0)
    monkeypatch.setattr(daemon.language.models, "_REFUSED_FOR_S", 600.0)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path, "cpu")
    yield line
    line.language.stop(60.0)


def test_a_process_that_stood_still_makes_no_step_hang(line: Line) -> None:
    stood_s = 0.0
    line.language._clock = lambda: time.monotonic() + stood_s
    thread = line.language.threads["m"]
    thread._working(30.0)
    stood_s = 3600.0
    until(lambda: line.language._looked_s > time.monotonic() + 3000.0)
    assert thread.hangs_s() is None
    thread.give_up = lambda _reason: None  # type: ignore[method-assign]
    while stood_s < 3640.0:
        stood_s += 4.0
        until(lambda stood_s=stood_s: line.language._looked_s > time.monotonic() + stood_s - 1.0)
    assert (thread.hangs_s() or 0.0) > 30.0


def test_images_that_lack_room_get_memory_of_the_model_which_gets_it_back(line: Line) -> None:
    line.drive.lacks_room = True
    until(lambda: (line.model.budget_bytes, line.drive.budget_bytes) == (MIN, DEVICE - MIN))
    line.drive.lacks_room = False
    until(lambda: (line.model.budget_bytes, line.drive.budget_bytes) == (MAX, DEVICE - MAX))


def test_a_model_without_memory_to_grow_keeps_its_memory_and_does_not_hold_up_images(line: Line) -> None:
    line.drive.lacks_room = True
    until(lambda: line.model.budget_bytes == MIN)
    line.model.available = 250
    line.drive.lacks_room = False
    until(lambda: MAX in line.model.asked)
    until(lambda: line.language.threads["m"].held_bytes == MIN)
    time.sleep(0.1)
    assert line.model.asked == [MIN, MAX, MIN]
    assert line.model.budget_bytes == MIN
    line.drive.lacks_room = True
    until(lambda: line.drive.budget_bytes == DEVICE - MIN)


def test_a_drive_that_was_busy_is_asked_again(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.drive.lacks_room = True
    until(lambda: line.drive.budget_bytes == DEVICE - MIN)
    monkeypatch.setattr(daemon.language.models, "_ANSWER_S", 0.05)
    line.drive.lacks_room, line.drive.is_busy = False, True
    until(lambda: line.drive.orders[-1] == DEVICE - MAX)
    line.drive.is_busy = False
    until(lambda: line.model.budget_bytes == MAX)


def test_a_budget_that_the_pools_refused_is_asked_for_again_only_after_a_while(line: Line) -> None:
    line.drive.refuses = line.drive.lacks_room = True
    until(lambda: line.drive.orders)
    time.sleep(0.1)
    assert line.drive.orders == [DEVICE - MIN]
    line.drive.refuses = False
    line.language._devices[0].refused_until_s = 0.0
    until(lambda: line.drive.budget_bytes == DEVICE - MIN)
