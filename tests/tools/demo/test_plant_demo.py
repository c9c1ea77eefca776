"""`coserve plant demo`: three real lines, their hub on a real PostgreSQL, a decision at a line that the hub shows."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tests import ROOT
from tests.daemon.storage.database.postgresql_server import WANTED, programs
from tests.waiting import PATIENCE_S, until
from tools.cli.main import app
from tools.demo.plant import run_plant_demo
from tools.terminal.console import CommandError

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the user of PostgreSQL can reach, and with a short name, for sockets."""
    with tempfile.TemporaryDirectory(prefix="pd") as name:
        Path(name).chmod(0o755)
        yield Path(name) / "plant"


@pytest.fixture
def free_ports() -> int:
    """The first of four free ports in a row."""
    for first in range(21_700 + os.getpid() % 1000 * 4, 32_000, 4):
        with ExitStack() as stack:
            try:
                for port in range(first, first + 4):
                    stack.enter_context(closing(socket.create_server(("127.0.0.1", port))))
            except OSError:
                continue
        return first
    raise AssertionError("no four free ports in a row")


def page(address: str) -> str:
    request = urllib.request.Request(address, headers={"Accept": "text/html"})  # noqa: S310 - our own http
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310
            return answer.read().decode()
    except urllib.error.HTTPError:  # the hub has not heard of the board yet
        return ""


def ways(log: Path) -> list[str]:
    """Return the addresses of the boards that go through all lines."""
    return re.findall(r"goes through all lines: (\S+)", log.read_text())


def test_a_server_that_does_not_start_is_said_before_any_line_is_made(folder: Path, free_ports: int) -> None:
    (folder / "postgresql/data").mkdir(parents=True)  # not a database
    with pytest.raises(CommandError, match="PostgreSQL did not start: "):
        run_plant_demo(folder, free_ports)
    assert [path.name for path in folder.iterdir()] == ["postgresql"]


@pytest.mark.test_all
def test_a_board_goes_through_three_lines_and_the_hub_shows_its_way_and_the_decisions(
    tmp_path: Path, folder: Path, free_ports: int
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tools", "plant", "demo", "--dir", str(folder), "--port", str(free_ports)]
    with log.open("wb") as output:
        demo = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        for news in ("hub: ", "line-1: ", "line-2: ", "line-3: ", "goes through all lines: "):
            until(lambda news=news: news in log.read_text() or demo.poll() is not None, log.read_text)
            assert demo.poll() is None, log.read_text()
        (way,) = ways(log)[:1]
        plant = way.partition("/serial/")[0]
        until(lambda: all(page(way).count(f"line-{number}") for number in (1, 2, 3)))
        # Not every board has a part to decide about; another one comes every few seconds.
        until(lambda: any("demo" in page(each).partition("</header>")[2] for each in ways(log)))
        assert all(name in page(plant) for name in ("line-1", "line-2", "line-3"))
        found = CliRunner().invoke(
            app, ["results", "--plant", str(folder / "plant.yaml"), "--verdict", "pass", "--json"]
        )
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)
        processes = psutil.Process(demo.pid).children(recursive=True)
        assert len(processes) > 4
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(PATIENCE_S) == 0, log.read_text()
        assert psutil.wait_procs(processes, PATIENCE_S)[1] == []
        assert log.read_text().rstrip().endswith(f"goes on with what {folder} has.")
    finally:
        for process in (demo, *(psutil.Process(demo.pid).children(recursive=True) if demo.poll() is None else ())):
            process.kill()
        demo.wait(PATIENCE_S)
