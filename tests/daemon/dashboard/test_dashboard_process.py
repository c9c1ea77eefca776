"""The web process beside a real line: it comes and goes, and the line goes on without waiting for it."""

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.daemon.dashboard.browser import ShownLine
from tests.daemon.dashboard.web import Stream, a_token
from tests.lines import a_jpeg, a_line
from tests.ports import free_port
from tools.setup.service import Service

#: A daemon with other times for the processes beside the line.
OTHER_TIMES = """\
import sys
from pathlib import Path
from daemon.host import children
from tests.simulated import run

{times}
sys.exit(run(Path(sys.argv[1])))
"""


def get(url: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - our own http
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def child(line: ShownLine, name: str = "dashboard") -> dict[str, Any]:
    return next(child for child in line.status()["children"] if child["name"] == name)


def with_other_times(line: ShownLine, times: str) -> Service:
    (line.folder / "other_times.py").write_text(OTHER_TIMES.format(times=times), encoding="utf-8")
    environ = {"PYTHONPATH": f"{line.folder}:{Path.cwd()}"}
    return Service(line.config, line.folder / "daemon.log", environ, command=("other_times",))


OLD, NEW = "a" * 40, "b" * 40


@dataclass(frozen=True)
class RunningLine:
    line: ShownLine
    service: Service
    token: Path

    def get(self, path: str, token: str | None = None) -> tuple[int, str]:
        secret = token or self.token.read_text(encoding="utf-8").strip()
        return get(self.line.url(path), Authorization=f"Bearer {secret}")

    def streams(self) -> list[Stream]:
        secret = self.token.read_text(encoding="utf-8").strip()
        host = self.line.http.removeprefix("http://")
        streams = [Stream(host, Authorization=f"Bearer {secret}") for _ in range(20)]
        assert {stream.event()["event"] for stream in streams} == {"line"}
        return streams


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Iterator[RunningLine]:
    folder = tmp_path_factory.mktemp("running")
    token = a_token(folder, OLD)
    line = ShownLine(folder / "line", experts_folder, security={"http_token": str(token)})
    with line.service() as service:
        line.wait_until_it_shows()
        yield RunningLine(line, service, token)


def are_ended(streams: list[Stream]) -> bool:
    ended = [stream.is_ended() for stream in streams]
    for stream in streams:
        stream.close()
    return all(ended)


@pytest.mark.promise(
    "Access, pages and reviews",
    "A web process that dies is restarted while the line continues; a stop closes every open page",
)
def test_a_killed_web_process_comes_back_and_the_line_goes_on_meanwhile(running: RunningLine) -> None:
    line = running.line
    before = child(line)
    assert before["state"] == "running"
    assert os.getpriority(os.PRIO_PROCESS, before["pid"]) >= 10
    assert os.sched_getscheduler(before["pid"]) == os.SCHED_BATCH
    streams = running.streams()
    os.kill(before["pid"], signal.SIGKILL)
    line.send(a_jpeg(1, 160, 120), board={"type": "sensor-node", "serial": "K1"}, component="R0402", designator="R1")
    line.wait(lambda: line.status()["backlog"] == 0)
    assert are_ended(streams)
    line.wait_until_it_shows()
    after = child(line)
    assert (after["restarts"], after["last_end"], after["state"]) == (1, "killed by SIGKILL", "running")
    assert "K1" in running.get("/")[1]
    # On a crowded machine the daemon may need more than a second to answer: probes ask again.
    line.wait(lambda: running.get("/readyz") == (200, "ready\n"))
    line.wait(lambda: running.get("/healthz") == (200, "alive\n"))
    line.wait(lambda: "coserve_images_accepted_total 1.0" in running.get("/metrics")[1])


@pytest.mark.promise(
    "Access, pages and reviews",
    "A web process or consumer that hangs is killed and restarted while verdicts continue; a slow one is left alone",
)
def test_processes_beside_the_line_that_hang_are_replaced_and_verdicts_go_on(
    tmp_path: Path, experts_folder: Path
) -> None:
    pytest.importorskip("paho", reason="needs the extra mqtt")
    plant = {"kind": "mqtt", "host": f"127.0.0.1:{free_port()}", "prefix": "plant"}
    line = ShownLine(tmp_path / "line", experts_folder, consumers={"plant": plant})
    log = line.folder / "daemon.log"
    with with_other_times(line, "children._HUNG_AFTER_S, children._TIMES_FOR_A_START = 5.0, 100"):
        line.wait_until_it_shows()
        line.wait(lambda: "nothing listens" in (line.status()["consumers"][0]["last_error"] or ""))
        before = [child(line, name)["pid"] for name in ("dashboard", "consumer plant")]
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        board = {"type": "sensor-node", "serial": "H1"}
        image = line.send(a_jpeg(1, 160, 120), board=board, component="R0402", designator="R1")
        line.wait(lambda: line.rows("SELECT verdict FROM inspections WHERE image_id = ?", image) == [("pass",)])
        for name, pid in zip(("dashboard", "consumer plant"), before, strict=True):
            line.wait(lambda name=name, pid=pid: child(line, name)["pid"] not in (pid, None))
            assert child(line, name)["restarts"] >= 1
            assert child(line, name)["last_end"].startswith("it hung: no sign of life for ")
        line.wait_until_it_shows()
    hung = [event for event in log.read_text(encoding="utf-8").splitlines() if "child_hung" in event]
    for pid in before:
        assert any(f"pid={pid} silent_s=5.0" in event for event in hung), "it had beaten, and then was silent"


def start(config: Path, module: str, *command: str, http: str | None = None) -> tuple[int, str]:
    """Start what cannot start, and return its exit status and errors."""
    if http is not None:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
        settings["endpoints"]["http"] = http
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    run = [sys.executable, "-m", module, *command, str(config)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    return ended.returncode, ended.stderr


def test_a_process_that_cannot_start_names_the_endpoint_or_what_is_missing(
    tmp_path: Path, experts_folder: Path
) -> None:
    config = a_line(tmp_path / "line", experts_folder)
    status, errors = start(config, "daemon.dashboard")
    assert (status, "endpoints.http is not set" in errors) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        status, errors = start(config, "tools", "run", http=endpoint)
    assert (status, f"endpoints.http {endpoint}: Address already in use" in errors) == (2, True)
