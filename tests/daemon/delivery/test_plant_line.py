"""A whole line with a consumer: what goes out, what `status` says, and that a broker's trouble is never the line's."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("paho")

from tests.broker import Broker, Subscriber, mosquitto
from tests.contract.client import Line
from tests.ports import free_port

pytestmark = pytest.mark.skipif(mosquitto() is None, reason="needs mosquitto: make system-tools")


def consumer(line: Line) -> dict[str, Any]:
    (row,) = line.status()["consumers"]
    return row


def child(line: Line) -> dict[str, Any]:
    return next(row for row in line.status()["children"] if row["name"] == "consumer plant")


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # if no parent reaps it
    except psutil.NoSuchProcess:
        return True


def published(line: Line, mes: Subscriber) -> bool:
    return mes.seqs == {message["seq"] for message in line.stream()}


@pytest.mark.promise(
    "Delivery to the plant",
    "A broker that is dead or late delays no image and does not affect the line; killed brokers, consumers and "
    "daemons lose no result",
)
def test_verdicts_reach_the_plant_whatever_happens_to_broker_consumer_and_daemon(
    tmp_path: Path, experts_folder: Path
) -> None:
    port = free_port()
    plant = {"kind": "mqtt", "host": f"127.0.0.1:{port}", "prefix": "plant"}
    line = Line(tmp_path / "line", experts_folder, consumers={"plant": plant})
    broker = Broker(tmp_path / "broker", port=port)
    with line.service() as service:
        # No broker yet: the line judges, and names the broker that it waits for.
        line.wait(lambda: "nothing listens" in (consumer(line)["last_error"] or ""))
        for number in range(6):
            line.send(board={"type": "pair", "serial": f"A{number // 2}"})
        line.idle()
        output = subprocess.run(
            [sys.executable, "-m", "tools", "status", "--config", str(line.config)],
            env=os.environ | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "Consumers" in output
        assert "Processes beside the line" in output
        assert f"nothing listens at 127.0.0.1:{port}" in output
        assert line.status()["state"] == "ready"
        assert line.status()["last_error"] is None
        expected = {"name": "plant", "kind": "mqtt", "position": 0, "behind": 9, "missed": 0, "state": "waiting"}
        assert consumer(line) | {"last_error": None} == expected | {"last_error": None}
        # It must not publish before the subscriber has subscribed: nothing of it is retained.
        waiting = child(line)["pid"]
        os.kill(waiting, signal.SIGSTOP)
        with broker, Subscriber(port, "plant/#") as mes:
            os.kill(waiting, signal.SIGCONT)
            line.wait(lambda: published(line, mes))
            line.wait(lambda: consumer(line)["state"] == "connected" and consumer(line)["behind"] == 0)
            boards = {body["board"]["serial"]: body["verdict"] for body in mes.bodies("/board/")}
            assert boards == {"A0": "pass", "A1": "pass", "A2": "pass"}
            # The consumer is killed: the broker says so, and it comes back where it was.
            before = child(line)["pid"]
            os.kill(before, signal.SIGKILL)
            line.wait(lambda: {"state": "offline"} in mes.bodies("status"))  # it may be back by now
            for number in range(2):
                line.send(board={"type": "pair", "serial": "B0"}, id=f"b{number}")
            line.idle()
            line.wait(lambda: child(line)["restarts"] == 1 and published(line, mes))
            assert child(line)["pid"] != before
            # The daemon is killed: so is the consumer, and the next one goes on.
            pid = child(line)["pid"]
            line.send(board={"type": "pair", "serial": "C0"}, id="c0")
            service.kill()
            line.wait(lambda: has_ended(pid))
            service.start()
            line.send(board={"type": "pair", "serial": "C0"}, id="c1")
            line.idle()
            line.wait(lambda: published(line, mes))
            # A stop ends it in order: what was judged last is delivered, and the goodbye says up to where.
            last = line.status()["last_seq"]
            assert service.stop() == 0
            line.wait(lambda: mes.bodies("status")[-1] == {"state": "offline", "position": last})
    position = (line.folder / "consumers" / "plant.position").read_text(encoding="utf-8")
    assert json.loads(position.splitlines()[0])["position"] == last
