import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from daemon.serve import Notifier
from tests.contract.client import Line
from tests.daemon.host.manager import Manager, a_holdable_daemon, ended, held, until_it_stands
from tests.lines import a_jpeg

WATCHDOG_S = 0.8


def send(line: Line) -> str:
    with line.peer() as peer:
        return peer.ask(line.inspect(), a_jpeg(1))["type"]


def is_fed(manager: Manager) -> None:
    """The first ping may be for a probe that had been through before."""
    manager.from_now()
    for _ in range(2):
        manager.until("WATCHDOG", "1")


@pytest.mark.parametrize("abstract", [False, True])
def test_news_that_belong_together_come_in_one_datagram(tmp_path: Path, abstract: bool) -> None:
    with Manager(tmp_path, abstract=abstract) as manager:
        notifier = Notifier({"NOTIFY_SOCKET": manager.address})
        notifier.ready("ready;\nbacklog 0")
        assert manager.until("READY") == {"READY": "1", "STATUS": "ready; backlog 0"}
        before_usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        notifier.reloading("reloading")
        news = manager.until("RELOADING", "1")
        assert before_usec <= int(news["MONOTONIC_USEC"]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        notifier.stopping("stopping")
        assert manager.until("STOPPING", "1")["STATUS"] == "stopping"
        notifier.extend(15.0)
        assert manager.until("EXTEND_TIMEOUT_USEC") == {"EXTEND_TIMEOUT_USEC": "15000000", "WATCHDOG": "1"}


def test_a_long_start_asks_for_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daemon.serve._ASK_EVERY_S", 600.0)
    with Manager(tmp_path) as manager:
        with Notifier({"NOTIFY_SOCKET": manager.address}).patience():
            assert int(manager.until("EXTEND_TIMEOUT_USEC")["EXTEND_TIMEOUT_USEC"]) == 30_000_000
        assert manager.during(0.1) == []


@pytest.mark.promise("A service of systemd", "The watchdog is fed only while images can pass")
def test_the_watchdog_is_fed_by_images_that_can_pass_and_by_nothing_else(tmp_path: Path, experts_folder: Path) -> None:
    line = Line(tmp_path, experts_folder)
    with Manager(tmp_path) as manager, a_holdable_daemon(line.config, manager, WATCHDOG_S) as process:
        assert manager.until("READY", "1")["STATUS"].startswith(("starting", "ready"))
        assert send(line) == "accepted"
        while not manager.until("STATUS")["STATUS"].startswith("ready; backlog 0 images"):
            pass
        for thread in ("intake", "writer", "drive", "publish"):
            with held(tmp_path, thread):
                until_it_stands(tmp_path, thread)
                manager.from_now()
                pings = [news for news in manager.during(WATCHDOG_S) if "WATCHDOG" in news]
                assert len(pings) <= 1, thread  # for a probe that had been through
            manager.until("WATCHDOG", "1")
        with held(tmp_path, "executor"):
            assert send(line) == "accepted"
            until_it_stands(tmp_path, "executor")
            is_fed(manager)
        with closing(sqlite3.connect(tmp_path / "inspection.db", isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")  # a shell that keeps the database locked
            assert send(line) == "busy"
            is_fed(manager)
        process.send_signal(signal.SIGHUP)
        assert int(manager.until("RELOADING", "1")["MONOTONIC_USEC"]) > 0
        assert manager.until("READY", "1")["STATUS"].startswith(("ready", "degraded"))
        line.control("drain")
        while "draining" not in manager.until("STATUS")["STATUS"]:
            pass
        process.send_signal(signal.SIGTERM)
        assert manager.until("STOPPING", "1")["STATUS"].startswith("stopping")
        assert ended(process, tmp_path / "daemon.log") == 0


@pytest.mark.parametrize("is_cut_short", [False, True])
def test_a_stop_finishes_the_backlog_unless_a_second_signal_cuts_it_short(
    tmp_path: Path, experts_folder: Path, is_cut_short: bool
) -> None:
    line = Line(tmp_path, experts_folder, stop={"backlog_for": "1h"})
    with Manager(tmp_path) as manager, a_holdable_daemon(line.config, manager, WATCHDOG_S) as process:
        manager.until("READY", "1")
        with held(tmp_path, "executor"):
            assert [send(line) for _ in range(8)] == ["accepted"] * 8
            process.send_signal(signal.SIGTERM)
            manager.until("STOPPING", "1")
            if is_cut_short:
                process.send_signal(signal.SIGTERM)
                assert ended(process, tmp_path / "daemon.log") == 0
            else:
                assert int(manager.until("EXTEND_TIMEOUT_USEC")["EXTEND_TIMEOUT_USEC"]) > 0
                assert send(line) == "busy"
        assert ended(process, tmp_path / "daemon.log") == 0
    ((images, verdicts),) = line.rows("SELECT count(*), count(verdict) FROM inspections")
    assert images == 8
    assert is_cut_short or verdicts == 8
