"""The whole line as a process: real sockets, a real database, real signals, simulated devices."""

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coserve_client import CameraImage, Publisher, publish_images
from daemon.wire.control import ControlError
from daemon.wire.control import ask as ask_within
from tests.contract.client import Line, Listener
from tests.lines import RULES, a_jpeg, a_line
from tests.simulated import a_service
from tests.waiting import PATIENCE_S
from tools.setup.service import Service


def rows(folder: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{folder}/inspection.db?mode=ro", uri=True)) as database:
        return database.execute(sql).fetchall()


def intake(folder: Path) -> str:
    return f"ipc://{folder}/run/intake.sock"


def control(folder: Path) -> str:
    return f"ipc://{folder}/run/control.sock"


def ask(endpoint: str, kind: str, **fields: Any) -> dict[str, Any]:
    return ask_within(endpoint, kind, timeout_s=PATIENCE_S, **fields)


def an_image(number: int, *, serial: str = "S1", component: str = "R0402", **more: Any) -> CameraImage:
    board = {"type": "open-board", "serial": serial}
    return CameraImage(f"{serial}/{number}", a_jpeg(number), board, component, {"designator": f"X{number}", **more})


def wait_until_idle(folder: Path, timeout_s: float = 120.0) -> dict[str, Any]:
    until_s = time.monotonic() + timeout_s
    while (status := ask(control(folder), "status"))["backlog"] > 0:
        assert time.monotonic() < until_s, status
        time.sleep(0.05)
    return status


@pytest.fixture
def folder(tmp_path: Path, experts_folder: Path) -> Path:
    a_line(tmp_path, experts_folder)
    return tmp_path


@pytest.fixture
def service(folder: Path) -> Iterator[Service]:
    with a_service(folder / "coserve.yaml", folder / "daemon.log") as running:
        yield running


def test_every_accepted_image_gets_one_result_although_the_daemon_is_killed_amid_them(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = Line(tmp_path, experts_folder, RULES)
    folder, config, log = tmp_path, line.config, tmp_path / "daemon.log"
    components = ("R0402", "C0603", "QFP64")
    images = [an_image(n, serial=f"S{n % 7}", component=components[n % 3]) for n in range(200)]
    first = a_service(config, log)
    first.start()
    with line.held("QFP64"):
        with Publisher(intake(folder), "camera") as publisher:
            account = publish_images(publisher, images)
        assert account.accepted == 200
        first.kill()
    done_before = rows(folder, "SELECT count(*) FROM inspections WHERE status = 'done'")[0][0]
    assert done_before < 200
    with a_service(config, log):
        wait_until_idle(folder)
    assert rows(folder, "SELECT count(*), count(DISTINCT image_id), count(verdict) FROM inspections") == [
        (200, 200, 200)
    ]
    assert rows(folder, "SELECT count(*) FROM inspections WHERE verdict = 'unknown'") == [(0,)]
    seqs = [seq for (seq,) in rows(folder, "SELECT seq FROM stream ORDER BY seq")]
    assert seqs == list(range(1, len(seqs) + 1))
    steps = rows(folder, "SELECT inspection_id, count(*) FROM stages GROUP BY inspection_id HAVING count(*) <> 2")
    assert steps == []
    assert rows(folder, "PRAGMA integrity_check") == [("ok",)]


def test_a_board_closes_with_its_verdict_on_the_stream_and_in_the_database(folder: Path, service: Service) -> None:
    parts = [("R1", "R0402"), ("R2", "R0402"), ("C1", "C0603"), ("C2", "C0603"), ("U1", "QFP64")]
    board = {"type": "mainboard-a", "serial": "A 1", "lot": "L7"}
    topics = ("board/mainboard-a/A%201/", "inspection/mainboard-a/A%201/")
    with Listener(f"ipc://{folder}/run/results.sock", *topics, "heartbeat/") as heard:
        heard.until_heartbeat()
        images = [CameraImage(f"A1/{d}", a_jpeg(n), board, c, {"designator": d}) for n, (d, c) in enumerate(parts)]
        with Publisher(intake(folder), "camera") as publisher:
            assert publish_images(publisher, images).accepted == 5
        messages: list[dict[str, Any]] = []
        while len(messages) < 6:
            topic, message = heard.take()
            messages += [message] if topic in topics else []
    closed = messages[-1]
    assert (closed["expected"], closed["inspected"], closed["reason"]) == (5, 5, "complete")
    assert closed["board"] == {**board, "attempt": 1}
    assert [message["seq"] for message in messages] == list(range(1, 7))
    assert rows(folder, "SELECT verdict, seq FROM boards") == [(closed["verdict"], 6)]
    assert closed["verdict"] == rows(folder, "SELECT verdict FROM boards")[0][0]
    with Publisher(intake(folder), "camera") as publisher:
        assert publish_images(publisher, images).duplicate == 5


def test_missing_and_corrupt_weights_cost_only_their_own_images(folder: Path) -> None:
    (folder / "experts" / "C0603.safetensors").unlink()
    damaged = (folder / "experts" / "QFP64.safetensors").read_bytes()
    (folder / "experts" / "QFP64.safetensors").unlink()
    (folder / "experts" / "QFP64.safetensors").write_bytes(damaged[:-1000] + b"\1" * 1000)
    images = [an_image(n, component=("R0402", "C0603", "QFP64")[n % 3]) for n in range(9)]
    with a_service(folder / "coserve.yaml", folder / "daemon.log"):
        with Publisher(intake(folder), "camera") as publisher:
            assert publish_images(publisher, images).accepted == 9
        status = wait_until_idle(folder)
        assert status["state"] == "degraded"
        assert "safetensors" in status["last_error"]
    verdicts = "group_concat(DISTINCT verdict || coalesce('/' || reason, ''))"
    found = dict(rows(folder, f"SELECT component, {verdicts} FROM inspections GROUP BY 1"))  # noqa: S608
    assert found["C0603"] == found["QFP64"] == "unknown/expert_failed"
    assert "unknown" not in found["R0402"]


def test_rules_reloaded_with_mistakes_leave_the_old_ones_in_force(folder: Path, service: Service) -> None:
    rules = folder / "rules.yaml"
    before = ask(control(folder), "status")["rules_version"]
    text = rules.read_text(encoding="utf-8")
    rules.write_text(text.replace("fail_on", "fail_onn"), encoding="utf-8")
    with pytest.raises(ControlError, match=r"rules\.yaml:\d+:\d+.*fail_on"):
        ask(control(folder), "reload")
    assert ask(control(folder), "status")["rules_version"] == before
    rules.write_text(text.replace("0.99", "0.98"), encoding="utf-8")
    assert ask(control(folder), "reload")["rules_version"] != before
    rules.write_text(text, encoding="utf-8")
    assert service.process is not None
    service.process.send_signal(signal.SIGHUP)
    until_s = time.monotonic() + PATIENCE_S
    while ask(control(folder), "status")["rules_version"] != before:
        assert time.monotonic() < until_s
        time.sleep(0.1)


def test_a_reload_names_the_settings_that_wait_for_a_restart(folder: Path, service: Service) -> None:
    config = folder / "coserve.yaml"
    text = config.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "tools", "reload", "--config", str(config)]
    try:
        assert ask(control(folder), "reload")["restart_for"] == []
        config.write_text(text + "retention: {images_for: 90d}\n", encoding="utf-8")
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        assert "coserve.yaml has changed: restart the daemon for retention.images_for" in done.stdout
        config.write_text(text + "retentoin: {}\n", encoding="utf-8")
        answer = ask(control(folder), "reload")
        assert answer["restart_for"] == []
        assert "retentoin" in answer["settings_problems"][0]
    finally:
        config.write_text(text, encoding="utf-8")


def test_draining_answers_busy_until_it_is_lifted(folder: Path, service: Service) -> None:
    assert ask(control(folder), "drain")["state"] == "draining"
    with Publisher(intake(folder), "camera") as publisher:
        publisher.send("a", a_jpeg(1), board={"type": "open-board", "serial": "S"}, component="R0402")
        until_s = time.monotonic() + PATIENCE_S
        while not publisher.account.busy and time.monotonic() < until_s:
            publisher.step(1.0)
        assert publisher.account.busy >= 1
        assert publisher.outstanding == 1
        ask(control(folder), "drain", off=True)
        assert publisher.finish(PATIENCE_S).accepted == 1


def test_control_changes_pins_and_budgets_while_running(folder: Path, service: Service) -> None:
    where = control(folder)
    assert ask(where, "pin", expert="R0402")["device"] == "cpu"
    with pytest.raises(ControlError, match="R0403"):
        ask(where, "pin", expert="R0403")
    assert ask(where, "unpin", expert="R0402")
    limits = ask(where, "limits", expert_memory={"cpu": 120_000_000}, backlog_images=5)
    assert limits["expert_memory"] == {"cpu": 120_000_000}
    assert limits["backlog_images"] == 5
    with pytest.raises(ControlError, match="backlog_pictures"):
        ask(where, "limits", backlog_pictures=5)
    assert "coserve_backlog_images" in ask(where, "metrics")["text"]


def test_sigterm_ends_the_daemon_with_status_0_and_what_waits_stays(folder: Path) -> None:
    service = a_service(folder / "coserve.yaml", folder / "daemon.log")
    service.start()
    with Publisher(intake(folder), "camera") as publisher:
        publish_images(publisher, [an_image(n) for n in range(80)])
    assert service.stop() == 0
    counted = rows(folder, "SELECT count(*) FROM inspections")
    assert counted == [(80,)]
    with a_service(folder / "coserve.yaml", folder / "daemon.log"):
        wait_until_idle(folder)
    assert rows(folder, "SELECT count(verdict) FROM inspections") == [(80,)]


def test_a_deadline_that_has_passed_gives_unknown_never_a_pass(folder: Path) -> None:
    service = a_service(folder / "coserve.yaml", folder / "daemon.log")
    service.start()
    with Publisher(intake(folder), "camera") as publisher:
        publish_images(publisher, [an_image(n, deadline_ms=1) for n in range(3)])
    wait_until_idle(folder)
    service.stop()
    assert rows(folder, "SELECT DISTINCT verdict, reason FROM inspections") == [("unknown", "deadline")]
