"""Memory between a language model and the images' pools, where somebody refuses, fails or takes his time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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

DEVICE, MOST, LEAST, TEXTS = 1000, 400, 100, 50


class Memory:
    """A model in service, as far as its memory goes: the machine has `there_is` bytes for it."""

    is_idle = True
    text_tokens = 10

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


@dataclass
class Pool:
    device: str
    budget_bytes: int = DEVICE - MOST


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
            name: Model(checkpoint=folder / "none", device=device, memory=MOST, least_memory=LEAST, text_memory=TEXTS)
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
        self.until(lambda: len(self.opened) == len(models))

    def open(self, _model: Model, budget_bytes: int, *_reports: object) -> Any:
        self.opened.append(Memory(budget_bytes))
        return self.opened[-1]

    @property
    def model(self) -> Memory:
        return self.opened[-1]

    def until(self, happened: Callable[[], Any]) -> None:
        until_s = time.monotonic() + 60
        while not happened():
            assert time.monotonic() < until_s, "it did not happen"
            time.sleep(0.005)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon.language.models, "_LOOK_S", 0.01)
    monkeypatch.setattr(daemon.language.models, "_ANSWER_S", 60.0)
    monkeypatch.setattr(daemon.language.models, "_REFUSED_FOR_S", 600.0)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    found = Line(tmp_path, "cpu")
    yield found
    found.language.stop(60.0)


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


def test_a_drive_that_was_busy_once_is_asked_again(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.drive.lacks_room = True
    line.until(lambda: line.drive.budget_bytes == DEVICE - LEAST)
    monkeypatch.setattr(daemon.language.models, "_ANSWER_S", 0.05)
    line.drive.lacks_room, line.drive.is_busy = False, True
    line.until(lambda: line.drive.orders[-1] == DEVICE - MOST)
    line.drive.is_busy = False
    line.until(lambda: line.model.budget_bytes == MOST)


def test_what_the_pools_refuse_is_not_asked_again_and_again(line: Line) -> None:
    line.drive.refuses = line.drive.lacks_room = True
    line.until(lambda: line.drive.orders)
    time.sleep(0.1)
    assert line.drive.orders == [DEVICE - LEAST]


def test_what_the_pools_refused_is_asked_again_later(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon.language.models, "_REFUSED_FOR_S", 0.05)
    line.drive.refuses = line.drive.lacks_room = True
    line.until(lambda: line.drive.orders)
    line.drive.refuses = False
    line.until(lambda: line.drive.budget_bytes == DEVICE - LEAST)


def test_a_switch_of_experts_is_noticed_for_every_device_with_models(tmp_path: Path) -> None:
    line = Line(tmp_path, "cpu", "cuda:0")
    line.drive.works = True
    line.drive.switches = 1
    line.until(lambda: all(pool.budget_bytes == DEVICE - LEAST for pool in line.drive.pools.values()))
    assert [model.budget_bytes for model in line.opened] == [LEAST, LEAST]
    line.language.stop(60.0)
