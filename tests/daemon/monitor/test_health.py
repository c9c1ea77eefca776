"""/healthz and /readyz of a real line that is well, drains, lacks an expert, starts, or hangs."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import daemon.operations
from daemon.app import App
from daemon.dispatch.simulated import SimulatedMemory
from daemon.line.line import load_line
from daemon.operations import Vitals
from tests.contract.client import Line
from tests.simulated import SimulatedDevices
from tests.simulated import answer as answer_of
from tests.waiting import until

PATHS = ("/healthz", "/readyz")
NO_ANSWER = "stuck: the writer thread has not answered for 12 s; the log says more"


@contextmanager
def an_app(line: Line) -> Iterator[App]:
    """The line in this process, so that one of its threads can be made to hang."""
    app = App(load_line(line.config), line.config, devices=SimulatedDevices(answer_of))
    app.start()
    try:
        yield app
    finally:
        app.stop()


def answers(app: App) -> dict[str, tuple[int, str]]:
    health = app.operations.health()
    parts = zip(PATHS, (health["alive"], health["ready"]), strict=True)
    return {path: (200 if part["ok"] else 503, part["text"]) for path, part in parts}


@pytest.mark.promise(
    "Access, pages and reviews",
    "Health and counters are served while a thread hangs, and name the thread",
)
def test_starting_ready_draining_and_a_hung_thread_are_told_apart(
    tmp_path: Path, experts_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon.operations, "STUCK_AFTER_S", 0.3)
    going, load = threading.Event(), SimulatedMemory.load

    def load_later(*arguments: Any, **named: Any) -> Any:
        going.wait(60)
        return load(*arguments, **named)

    monkeypatch.setattr(SimulatedMemory, "load", load_later)
    line = Line(tmp_path / "line", experts_folder, limits={"hang_after": "10m"})
    with an_app(line) as app:
        assert answers(app)["/healthz"] == (200, "alive")
        assert answers(app)["/readyz"][0] == 503
        assert answers(app)["/readyz"][1].startswith("starting")
        going.set()
        until(lambda: answers(app)["/readyz"] == (200, "ready"))

        line.control("drain")
        assert answers(app)["/readyz"][0] == 503
        assert answers(app)["/readyz"][1].startswith("draining: takes no images: the line is draining")
        assert answers(app)["/healthz"] == (200, "alive")
        line.control("drain", off=True)
        assert answers(app)["/readyz"] == (200, "ready")

        release = threading.Event()
        app._writer.run(lambda _store: release.wait(60))
        app.probe.send()
        until(lambda: answers(app)["/healthz"][0] == 503)
        for path in PATHS:
            assert answers(app)[path][0] == 503
            assert re.match(r"stuck: the writer thread has not answered for \d+ s", answers(app)[path][1])
        control = line.control("health")
        assert control["alive"]["ok"] is False
        assert float(scraped(line, "coserve_probe_held_seconds")) >= 0.3
        assert scraped(line, "coserve_ready") == "0.0"
        release.set()
        until(lambda: answers(app)["/healthz"] == (200, "alive"))
        assert answers(app)["/readyz"] == (200, "ready")


def test_a_web_process_that_cannot_start_is_said_wherever_a_person_looks(
    tmp_path: Path, experts_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health probes get no answer then."""
    trouble = "the process dashboard cannot start (exit status 1), so the pages do not answer: the log says why"
    line = Line(tmp_path / "line", experts_folder)
    with an_app(line) as app:
        until(lambda: app.operations.state == "ready")
        monkeypatch.setattr(app._children, "troubles", lambda: [trouble])
        assert answers(app)["/readyz"] == (200, f"ready: {trouble}")
        assert app.operations.sentence() == f"ready, {trouble}; backlog 0 images"
        assert line.status()["last_error"] == trouble


def scraped(line: Line, series: str) -> str:
    match = re.search(rf"^{re.escape(series)} (\S+)$", line.control("metrics")["text"], re.MULTILINE)
    assert match is not None
    return match[1]


def test_a_scheduler_that_hangs_keeps_neither_counters_nor_health_from_being_told(
    tmp_path: Path, experts_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(tmp_path / "line", experts_folder)
    with an_app(line) as app:
        until(lambda: app.operations.state == "ready")
        line.send()
        until(lambda: scraped(line, "coserve_verdict_latency_seconds_count") == "1.0")
        hangs, release = threading.Event(), threading.Event()

        def hang(_fields: Any) -> dict[str, Any]:
            hangs.set()
            release.wait(60)
            return {}

        monkeypatch.setitem(app._drive._control.handlers, "queues", hang)
        app._drive.ask_later("queues", {})
        assert hangs.wait(60)
        text = line.control("metrics")["text"]
        assert "coserve_images_accepted_total 1.0" in text
        assert 'coserve_resident_experts{device="cpu"}' in text  # as it was when the scheduler last spoke
        assert line.control("health")["alive"]["ok"] is True  # no probe is under way
        release.set()


@pytest.mark.parametrize(
    ("vitals", "is_ready", "ready"),
    [
        (Vitals("starting"), False, "starting: the first experts are being loaded"),
        (Vitals("draining"), False, "draining"),
        (Vitals("draining", refuses=["it is draining"]), False, "draining: takes no images: it is draining"),
        (Vitals("ready"), True, "ready"),
        (Vitals("degraded", troubles=["A cannot be loaded"]), True, "degraded: A cannot be loaded"),
        (Vitals("degraded", refuses=["the disk is full"]), False, "degraded: takes no images: the disk is full"),
        (Vitals("degraded", unjudged=["no rows"], troubles=["x"]), False, "degraded: images get no verdict: no rows"),
        (Vitals("ready", held_by=("writer", 9.9)), True, "ready"),
        (Vitals("ready", held_by=("writer", 12.3)), False, NO_ANSWER),
        (Vitals(""), False, ""),
    ],
)
def test_health_is_that_an_image_can_pass_and_readiness_that_images_are_taken_and_judged(
    vitals: Vitals, is_ready: bool, ready: str
) -> None:
    told = daemon.operations.health(vitals)
    hung = ready == NO_ANSWER
    assert told["alive"] == {"ok": not hung, "text": NO_ANSWER if hung else "alive"}
    assert told["ready"] == {"ok": is_ready, "text": ready}
