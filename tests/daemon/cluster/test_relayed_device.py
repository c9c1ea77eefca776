"""The Ray driver's side of a device: who is to blame for an order that failed, the device or the expert's file."""

import json
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.cluster import __main__ as relaying
from daemon.cluster.__main__ import RelayedDevice
from daemon.cluster.messages import code_version, plain_spec
from daemon.cluster.worker import CACHE, CACHE_SIZE, DeviceWorker
from experts.spec import ExpertSpec
from tests.experts.samples import an_expert_file

SETTINGS = {"executors": 1, "threads": 1, "activation_memory": None, "expert_memory": 1}


class RayError(Exception):
    """Ray's errors."""


class RayTaskError(RayError):
    """An exception in the worker's code."""


class RayActorError(RayError):
    """The end of a worker."""


class GetTimeoutError(RayError):
    """An answer that did not come in time."""


class Ray:
    """Ray on one PC and in one thread: a call runs when it is made, and its reference is its outcome."""

    exceptions = SimpleNamespace(
        RayError=RayError, RayTaskError=RayTaskError, RayActorError=RayActorError, GetTimeoutError=GetTimeoutError
    )

    def __init__(self, actors: Callable[[], Any] = lambda: None) -> None:
        self._actors = actors

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        actor_class = SimpleNamespace(remote=self._actors)
        return lambda _class: SimpleNamespace(options=lambda **_: actor_class)

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references, []

    def kill(self, actor: Any) -> None: ...

    def get(self, outcome: Any, timeout: float | None = None) -> Any:
        if isinstance(outcome, list):
            return [*map(self.get, outcome)]
        if isinstance(outcome, threading.Event) and not outcome.wait(timeout):
            raise GetTimeoutError
        if isinstance(outcome, RayActorError):
            raise outcome
        if isinstance(outcome, Exception):
            raise RayTaskError(f"{type(outcome).__name__}: {outcome}") from outcome
        return outcome


class Actor:
    """A worker as Ray offers it."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            try:
                return getattr(self.worker, name)(*arguments)
            except Exception as error:  # noqa: BLE001  as Ray does
                return error

        method = SimpleNamespace(remote=remote)
        method.options = lambda **_: method
        return method


class Relay:
    """A device with its worker, and the answers that the daemon gets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec = an_expert_file(folder / "weights")
        monkeypatch.setenv(CACHE, str(folder / "cache"))
        monkeypatch.setenv(CACHE_SIZE, str(1 << 30))
        about = {"device": "cpu", "settings": SETTINGS, "max_pixels": 1 << 20, "host": "pc2"}
        about |= {"pools": {"p": self.spec.weights_bytes}, "executors": {"p/0": "p"}}
        self.worker = DeviceWorker()
        self.worker.open(json.dumps(about))
        self.answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.device = RelayedDevice("pc2-cpu", about, Ray(), self.answers.put)
        self.device._actor, self.device._life = Actor(self.worker), "first"

    def load(self) -> dict[str, Any]:
        spec: ExpertSpec = self.spec
        files = {spec.sha256: str(spec.file)}
        arguments = ["p", json.dumps(plain_spec(spec))]
        order = {"do": "load", "arguments": arguments, "files": files, "life": "first", "call": 1}
        self.device.carry_out(order, b"")
        return self.answers.get(timeout=60)


@pytest.fixture
def relay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Relay:
    return Relay(tmp_path, monkeypatch)


def test_a_cached_file_that_was_cut_is_sent_again(relay: Relay):
    assert "bytes" in relay.load()
    relay.worker.unload("p", relay.spec.expert)
    os.truncate(relay.worker._cache.folder / relay.spec.sha256, 5000)
    assert relay.load()["bytes"] == relay.spec.weights_bytes


def test_an_order_that_is_none_calls_nothing(relay: Relay):
    with pytest.raises(ValueError, match="unknown order: take"):
        relay.device.carry_out({"do": "take", "arguments": ["digest", 1, 0], "life": "first"}, b"x")


@pytest.mark.parametrize("left", [0, 5000])
def test_a_file_of_the_line_that_was_cut_is_the_experts_error(relay: Relay, left: int):
    os.truncate(relay.spec.file, left)
    answer = relay.load()
    assert "restore the weights file" in answer["error"]
    assert answer["is_device_error"] is False


def test_a_worker_that_does_not_open_its_device_is_given_up_and_started_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relaying, "_OPEN_WITHIN_S", 0.05)
    monkeypatch.setattr(relaying, "_RETRY_S", 0.0)
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    frozen = SimpleNamespace(hello=code_version, open=lambda _about: threading.Event(), ping=threading.Event)
    device = RelayedDevice("pc2-cpu", {"executors": {}, "host": "pc2"}, Ray(lambda: Actor(frozen)), answers.put)
    threading.Thread(target=device.keep, daemon=True).start()
    for _ in range(2):
        answer = answers.get(timeout=60)
        assert answer["say"] == "lost"
        assert answer["reason"] == "its worker on pc2 has not opened its device within 0.05 s"
