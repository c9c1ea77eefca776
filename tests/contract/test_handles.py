"""A daemon with few file handles and thousands of connections that say nothing: nobody honest notices."""

import contextlib
import resource
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.contract.client import Line
from tests.contract.odd_daemons import ODD_DAEMON
from tests.contract.peer import Peer
from tests.contract.test_hostile_publishers import RULES
from tests.ports import free_port
from tests.stress.line import make_jpegs
from tests.stress.raw import RawPeer
from tests.stress.soak import StreamConsumer
from tests.stress.steady import SteadyPublisher
from tests.waiting import until

ACCEPTED = ("accepted", "duplicate")
#: The web pages accept connections slowly, and never hold more than 128.
SILENT_PAGES = 1500


@pytest.fixture
def handles() -> Iterator[int]:
    """As many handles as this process may have, for its end of the silent connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def silent(endpoint: str, count: int) -> Iterator[None]:
    """Open `count` connections as fast as the daemon accepts them; here they stay open."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            while True:
                try:
                    stack.enter_context(RawPeer(endpoint))
                except BlockingIOError:  # an ipc socket's backlog is full
                    time.sleep(0.001)
                except OSError:
                    break
                else:
                    break
        yield


def answer_of(endpoint: str, *message: Any) -> dict[str, Any] | None:
    """Ask over a new connection; None without an answer: one may be cut in the burst, and clients ask again."""
    with Peer(endpoint) as peer:
        peer.send(*message)
        return peer.take() if peer.socket.poll(5000) else None


def status_of(address: str) -> int | None:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/healthz", timeout=20) as answer:
        return int(answer.status)
    return None


@pytest.mark.test_all
def test_ten_thousand_silent_connections_cost_nobody_honest_anything(
    handles: int, tmp_path: Path, experts_folder: Path
) -> None:
    count, limits = 10_000, ("1024", str(min(65_536, handles)))
    intake, results, http = (f"127.0.0.1:{free_port()}" for _ in range(3))
    line = Line(
        tmp_path / "line",
        experts_folder,
        RULES,
        command=(ODD_DAEMON, "few-handles", *limits),
        endpoints={
            "intake": [f"tcp://{intake}", "ipc://run/intake.sock"],
            "results": f"tcp://{results}",
            "control": "ipc://run/control.sock",
            "http": f"http://{http}",
        },
    )
    control = f"ipc://{line.folder}/run/control.sock"
    with line.service() as service:
        assert service.process is not None
        daemon = psutil.Process(service.process.pid)
        before = daemon.num_fds()
        jpegs = make_jpegs(4, 10_000)
        honest = SteadyPublisher(f"tcp://{intake}", "honest", jpegs, 20)
        consumer = StreamConsumer(f"tcp://{results}", line.intake)
        honest.start()
        consumer.start()
        endpoints = dict.fromkeys((f"tcp://{intake}", line.intake, f"tcp://{results}", control), count)
        for endpoint, connections in (*endpoints.items(), (f"tcp://{http}", SILENT_PAGES)):
            with silent(endpoint, min(connections, handles - 1000)):
                image = line.inspect(board={"type": "open", "serial": "S"})
                assert until(lambda image=image: answer_of(line.intake, image, jpegs[0]))["type"] in ACCEPTED
                assert until(lambda: answer_of(control, {"type": "status"}))["state"] == "ready"
                assert until(lambda: status_of(http)) == 200
        assert honest.stop().exit_status == 0
        until(lambda: daemon.num_fds() <= before + 16, daemon.num_fds)
        consumer.stop()
        assert consumer.lost == 0
        assert service.stop() == 0
    assert "failed" not in line.log()


@pytest.mark.promise(
    "Overload and hostile publishers",
    "The soft limit of open files is raised at the start, and the connections of every socket are limited by "
    "the files that may be open (thousands at once can end the daemon where the hard limit is low; `coserve "
    "doctor` warns below 4,096)",
)
def test_the_soft_limit_of_handles_is_raised_as_far_as_the_hard_limit_allows(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = Line(tmp_path / "line", experts_folder, command=(ODD_DAEMON, "few-handles", "300", "1000"))
    with line.service() as service:
        assert service.process is not None
        assert psutil.Process(service.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (1000, 1000)
