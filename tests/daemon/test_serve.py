"""The main thread: whatever fails there or in a start, the process hears its signals, or ends and says why."""

import signal
from pathlib import Path
from typing import Any

import pytest
import zmq

from daemon.errors import StartError
from daemon.wire.control import ask
from daemon.wire.sockets import ServerKeys, bind
from tests.daemon.host.manager import Manager, a_holdable_daemon, ended, held
from tests.lines import a_line

#: Of TEST-NET-1, which no machine has (RFC 5737).
NOT_HERE = "tcp://192.0.2.1:5555"


def test_a_reload_that_waits_or_fails_holds_up_neither_the_watchdog_nor_a_stop(
    tmp_path: Path, experts_folder: Path
) -> None:
    config, log = a_line(tmp_path, experts_folder), tmp_path / "daemon.log"
    with Manager(tmp_path) as manager, a_holdable_daemon(config, manager, 0.8) as process:
        manager.until("READY", "1")
        (tmp_path / "reload.defect").touch()
        process.send_signal(signal.SIGHUP)
        manager.until("RELOADING", "1")
        manager.until("READY", "1")
        assert "reload_failed" in log.read_text()
        (tmp_path / "reload.defect").unlink()
        with held(tmp_path, "reload"):
            process.send_signal(signal.SIGHUP)
            manager.until("RELOADING", "1")
            for _ in range(5):
                assert "READY" not in manager.until("WATCHDOG", "1")
            assert ask(f"ipc://{tmp_path}/run/control.sock", "status", timeout_s=60.0)["state"] != "draining"
            process.send_signal(signal.SIGTERM)
            assert ended(process, log) == 0


def test_a_defect_of_the_main_thread_ends_the_process_in_order(tmp_path: Path, experts_folder: Path) -> None:
    config, log = a_line(tmp_path, experts_folder), tmp_path / "daemon.log"
    with Manager(tmp_path) as manager, a_holdable_daemon(config, manager, 0.8) as process:
        manager.until("READY", "1")
        (tmp_path / "watch.defect").touch()
        assert ended(process, log) == 1
    said = log.read_text()
    assert "watchdog_failed" in said
    assert said.index("watchdog_failed") < said.index("stopped")


def test_a_stop_that_fails_half_way_ends_the_process_all_the_same(tmp_path: Path, experts_folder: Path) -> None:
    config, log = a_line(tmp_path, experts_folder), tmp_path / "daemon.log"
    with Manager(tmp_path) as manager, a_holdable_daemon(config, manager, 0.8) as process:
        manager.until("READY", "1")
        (tmp_path / "stop.defect").touch()
        process.send_signal(signal.SIGTERM)
        assert ended(process, log) == 1
    assert "stop_defect" in log.read_text()
    assert "threads_left_behind" in log.read_text()


def test_a_stop_does_not_give_what_hangs_the_time_that_the_backlog_did_not_need(
    tmp_path: Path, experts_folder: Path
) -> None:
    config = a_line(tmp_path, experts_folder, stop={"backlog_for": "1h"})
    with Manager(tmp_path) as manager, a_holdable_daemon(config, manager, 5.0) as process:
        manager.until("READY", "1")
        with held(tmp_path, "drive"):
            process.send_signal(signal.SIGTERM)
            assert ended(process, tmp_path / "daemon.log") == 0


def test_a_start_that_fails_for_whatever_reason_ends_with_status_2_and_one_line(
    tmp_path: Path, experts_folder: Path
) -> None:
    config, log = a_line(tmp_path, experts_folder), tmp_path / "daemon.log"
    (tmp_path / "start.defect").touch()
    with Manager(tmp_path) as manager, a_holdable_daemon(config, manager, 0.8) as process:
        assert ended(process, log) == 2
    why = [line for line in log.read_text().splitlines() if "cannot start" in line]
    assert why == [f"coserve: cannot start: {config}: RuntimeError: a defect of start"]


def test_an_address_that_is_not_there_yet_is_said_so() -> None:
    context: zmq.Context[Any] = zmq.Context()
    public, secret = zmq.curve_keypair()
    try:
        with (
            context.socket(zmq.ROUTER) as router,
            pytest.raises(StartError, match=r"192\.0\.2\.1.*no network card of this machine has that address"),
        ):
            bind(router, [NOT_HERE], ServerKeys(public, secret))
    finally:
        context.destroy(linger=0)
