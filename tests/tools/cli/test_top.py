from pathlib import Path
from typing import Any

import pytest
import zmq
from rich.console import Console
from typer.testing import CliRunner

from daemon.wire.control import ControlServer
from tools.cli.main import app
from tools.cli.top import draw


def a_look(**changes: Any) -> dict[str, Any]:
    """Return the daemon's status, with two executors that share their memory."""
    executors = [{"name": f"cpu/{number}", "device": "cpu", "pool": "cpu", "busy_share": 0.5} for number in range(2)]
    pool = {
        "pool": "cpu",
        "executors": ["cpu/0", "cpu/1"],
        "experts": 2,
        "used_bytes": 90_000_000,
        "budget_bytes": 100_000_000,
        "queued": 3,
    }
    return {
        "state": "ready",
        "uptime_s": 12.3,
        "policy": "coserve",
        "images_per_s": 42.0,
        "backlog": 7,
        "completed": 100,
        "expert_switches": 5,
        "last_error": None,
        "executors": executors,
        "pools": [pool],
        "running": [{"executor": "cpu/1", "expert": "R0402"}],
        "queues": [{"expert": "QFP64", "queued": 7, "resident": [], "loading": ["cpu/0"]}],
    } | changes


def shown(look: dict[str, Any]) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(draw(look))
    return capture.get()


def test_a_look_says_what_runs_what_is_resident_and_what_waits() -> None:
    screen = shown(a_look())
    for part in ("42.0 images/s", "backlog 7", "cpu/1", "R0402", "cpu/0, cpu/1", "QFP64", "█"):
        assert part in screen
    assert screen.count("█ ") + screen.count("█░") == 1, "memory that two executors share is there once"


def test_an_executor_that_is_out_of_service_and_the_last_error_are_shown() -> None:
    look = a_look(last_error="executor cuda:0/0: CUDA error")
    look["executors"][0]["out_of_service"] = "CUDA error"
    screen = shown(look)
    assert "out of service" in screen
    assert "last error: executor cuda:0/0" in screen


def test_a_daemon_that_sends_no_pools_yet_is_shown_all_the_same(tmp_path: Path) -> None:
    look = a_look(version="0.0.9", rules_version="abc", accepted=100, last_seq=7)
    del look["pools"]
    control = f"ipc://{tmp_path}/control.sock"
    config = tmp_path / "coserve.yaml"
    endpoints = f"{{intake: ['ipc://{tmp_path}/in.sock'], results: 'ipc://{tmp_path}/out.sock', control: '{control}'}}"
    config.write_text(
        f"endpoints: {endpoints}\nrules: rules.yaml\ncatalog: catalog.yaml\ndevices: {{cpu: {{expert_memory: 1MB}}}}\n"
    )
    context: zmq.Context[Any] = zmq.Context()
    server = ControlServer(context, control, {"status": lambda _: look, "queues": lambda _: look})
    server.start()
    try:
        for command in ("status", "top"):
            done = CliRunner().invoke(app, [command, "--config", str(config)])
            assert done.exit_code == 0, done.output
            assert "cpu/0" in done.output
            assert "memory" not in done.output
    finally:
        server.stop()
        context.destroy(linger=0)


@pytest.mark.parametrize("count", [0, 40])
def test_any_number_of_queues_fits_the_screen(count: int) -> None:
    queues = [{"expert": f"E{n}", "queued": 2, "resident": [], "loading": []} for n in range(count)]
    screen = shown(a_look(queues=queues))
    assert len(screen.splitlines()) < 40
    assert ("25 more" in screen) == (count == 40)
