"""Memory between a language model and the images' pools, as images need it."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import daemon.language.models
from daemon.config.settings import Config, Device, Model
from daemon.language.models import LanguageModels
from tests.waiting import until

DEVICE, MAX, MIN, TEXTS = 1000, 400, 100, 50


class Memory:
    """A model in service without its texts."""

    is_idle = True
    text_tokens = 10

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes

    def resize(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes

    def was_changed(self) -> str | None:
        return None

    def account(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class Drive:
    """A full pool of images, and an expert that waits for room in it while `lacks_room`."""

    device = "cpu"
    budget_bytes = DEVICE - MAX
    lacks_room = False

    @property
    def images_under_way(self) -> int:
        return int(self.lacks_room)

    def ask_later(self, kind: str, fields: Mapping[str, Any]) -> "Future[dict[str, Any]]":
        done: Future[dict[str, Any]] = Future()
        if kind == "limits":
            self.budget_bytes = fields["expert_memory"]["cpu"]
        executors = [{"device": "cpu", "budget_bytes": self.budget_bytes, "used_bytes": self.budget_bytes}]
        experts = [{"resident": False, "bytes": 50, "queued": int(self.lacks_room)}]
        done.set_result({"executors": executors, "expert_switches": 0, "experts": experts})
        return done


class Line:
    def __init__(self, folder: Path) -> None:
        model = Model(checkpoint=folder / "none", memory=MAX, least_memory=MIN, text_memory=TEXTS)
        budget = Device(expert_memory=DEVICE + TEXTS)
        config = Config(rules=folder / "rules", catalog=folder, devices={"cpu": budget}, models={"m": model})
        self.opened: list[Memory] = []
        self.drive = Drive()
        self.language = LanguageModels(config, self.drive, [self.drive], self.open)
        for shared in self.language._devices:
            shared.lease._give_back_s = 0.0
            shared.lease._again_s = 600.0
        self.language.start(SimpleNamespace(text_finished=lambda _outcome: None))
        until(lambda: self.opened)

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
    line = Line(tmp_path)
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
