"""The web process beside a real line: it comes and goes, and the line neither waits for it nor stops."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.extras import install_with
from tests.dashboard.browser import ShownLine, free_port
from tests.dashboard.web import Stream
from tests.lines import a_jpeg, a_line
from tools.service import Service

pytest.importorskip("fastapi", reason="needs the extra dashboard")

#: A Python that has the line's packages and not those of the extra.
WITHOUT_EXTRA = """\
import sys
from importlib.abc import MetaPathFinder


class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("fastapi", "uvicorn", "starlette", "jinja2", "python_multipart"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocker())
from tools.cli import main
sys.argv[1:1] = ["run"]
main()
"""


def get(url: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - our own http
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def child(line: ShownLine) -> dict[str, Any]:
    (found,) = (one for one in line.status()["children"] if one["name"] == "dashboard")
    return found


OLD, NEW = "a" * 40, "b" * 40


@dataclass(frozen=True)
class Running:
    line: ShownLine
    service: Service
    token: Path

    def get(self, path: str, token: str | None = None) -> tuple[int, str]:
        secret = self.token.read_text(encoding="utf-8") if token is None else token
        return get(self.line.url(path), Authorization=f"Bearer {secret}")

    def streams(self) -> list[Stream]:
        """Twenty pages that are open."""
        secret = self.token.read_text(encoding="utf-8")
        host = self.line.http.removeprefix("http://")
        streams = [Stream(host, Authorization=f"Bearer {secret}") for _ in range(20)]
        assert {stream.event()["event"] for stream in streams} == {"line"}
        return streams


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, experts_folder: Path) -> Iterator[Running]:
    """A line behind a token, with its web process."""
    folder = tmp_path_factory.mktemp("running")
    token = folder / "token"
    token.write_text(OLD, encoding="utf-8")
    token.chmod(0o600)
    line = ShownLine(folder / "line", experts_folder, security={"http_token": str(token)})
    with line.service() as service:
        line.wait_until_it_shows()
        yield Running(line, service, token)


def are_ended(streams: list[Stream]) -> bool:
    ended = [stream.is_ended() for stream in streams]
    for stream in streams:
        stream.close()
    return all(ended)


def test_a_killed_web_process_comes_back_and_the_line_goes_on_meanwhile(running: Running) -> None:
    line = running.line
    before = child(line)
    assert before["state"] == "running"
    assert os.getpriority(os.PRIO_PROCESS, before["pid"]) >= 10
    assert os.sched_getscheduler(before["pid"]) == os.SCHED_BATCH
    streams = running.streams()
    os.kill(before["pid"], signal.SIGKILL)
    line.send(a_jpeg(1, 160, 120), board={"type": "sensor-node", "serial": "K1"}, component="R0402")
    line.idle()
    assert are_ended(streams)
    line.wait_until_it_shows()
    after = child(line)
    assert (after["restarts"], after["last_end"], after["state"]) == (1, "killed by SIGKILL", "running")
    assert "K1" in running.get("/")[1]
    assert running.get("/readyz") == (200, "ready\n")
    assert running.get("/healthz") == (200, "alive\n")
    assert "coserve_images_accepted_total 1.0" in running.get("/metrics")[1]


def test_where_the_web_process_ends_again_and_again_the_daemon_answers_probes_meanwhile(
    tmp_path: Path, experts_folder: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(OLD, encoding="utf-8")
    token.chmod(0o600)
    line = ShownLine(tmp_path / "line", experts_folder, security={"http_token": str(token)})
    with line.service():
        line.wait_until_it_shows()
        for _ in range(4):  # after the fourth it waits four seconds
            line.wait(lambda: child(line)["state"] == "running")
            pid = child(line)["pid"]
            os.kill(pid, signal.SIGKILL)
            line.wait(lambda pid=pid: child(line)["pid"] != pid)
        for path, said in (("/readyz", "ready\n"), ("/healthz", "alive\n")):
            assert get(line.url(path), Authorization=f"Bearer {OLD}") == (200, said)
        assert "coserve_images_accepted_total" in get(line.url("/metrics"), Authorization=f"Bearer {OLD}")[1]
        assert get(line.url("/metrics"))[0] == 401
        status, said = get(line.url("/boards"))
        assert (status, "The web pages end again and again" in said) == (503, True)
        assert child(line)["state"] == "waiting", "the answers are to come before its next start"
        line.wait(lambda: get(line.url("/boards"), Authorization=f"Bearer {OLD}")[0] == 200)
        assert child(line)["state"] == "running"


def test_a_reload_gives_the_web_process_its_new_token(running: Running) -> None:
    restarts = child(running.line)["restarts"]
    assert get(running.line.url("/boards"))[0] == 401
    assert running.get("/boards", OLD)[0] == 200
    running.token.write_text("short", encoding="utf-8")
    assert "holds no token" in running.line.control("keys")["problems"][0]
    assert running.get("/boards", OLD)[0] == 200
    running.token.write_text(NEW, encoding="utf-8")
    assert running.line.control("keys")["problems"] == []
    running.line.wait(lambda: running.get("/boards", NEW)[0] == 200)
    assert running.get("/boards", OLD)[0] == 401
    assert child(running.line)["restarts"] == restarts


def test_a_daemon_stops_in_time_with_twenty_pages_open(running: Running) -> None:
    """The last that is asked of this line."""
    streams = running.streams()
    began_s = time.monotonic()
    assert running.service.stop() == 0
    assert time.monotonic() - began_s < 20
    assert are_ended(streams)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(running.line.http.rsplit(":", 1)[1])), timeout=5)
    log = (running.line.folder / "daemon.log").read_text(encoding="utf-8")
    assert "Traceback" not in log
    assert OLD not in log


def test_a_port_in_use_ends_the_start_with_the_endpoint(tmp_path: Path, experts_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        config = a_line(tmp_path / "line", experts_folder)
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
        settings["endpoints"]["http"] = endpoint
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-m", "tools", "run", str(config)], capture_output=True, text=True, timeout=60, check=False
        )
    assert ended.returncode == 2
    assert f"endpoints.http {endpoint}: Address already in use" in ended.stderr


def test_without_the_extra_the_daemon_answers_probes_itself_and_says_once_what_is_missing(
    tmp_path: Path, experts_folder: Path
) -> None:
    (tmp_path / "without_extra.py").write_text(WITHOUT_EXTRA, encoding="utf-8")
    line = ShownLine(tmp_path / "line", experts_folder)
    log = line.folder / "daemon.log"
    with Service(line.config, log, {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}, command=("without_extra",)):
        assert get(line.url("/readyz")) == (200, "ready\n")
        assert get(line.url("/healthz")) == (200, "alive\n")
        assert "coserve_images_accepted_total" in get(line.url("/metrics"))[1]
        assert get(line.url("/"))[0] == 404
        assert "children" not in line.status()
    said = log.read_text(encoding="utf-8")
    assert said.count("no_web_pages") == 1
    assert install_with("dashboard") in said
    assert "fastapi" in said


def test_the_web_process_never_imports_torch() -> None:
    code = "import daemon.dashboard.app, sys; sys.exit('torch' in sys.modules or 'cv2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_by_hand_it_says_what_is_missing(tmp_path: Path, experts_folder: Path) -> None:
    config = a_line(tmp_path / "line", experts_folder)
    run = [sys.executable, "-m", "daemon.dashboard", str(config)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert (ended.returncode, "endpoints.http is not set" in ended.stderr) == (2, True)
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    settings["endpoints"]["http"] = f"http://127.0.0.1:{free_port()}"
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)
    assert (ended.returncode, "there is no database" in ended.stderr) == (2, True)
