"""Alarms of the rules on a running line: status, metrics, log, MQTT; over a review, a reload, a kill and a replay."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.broker import Broker, Subscriber, mosquitto
from tests.contract.client import RULES, Line
from tests.lines import a_jpeg
from tests.ports import free_port
from tests.sql import sql
from tests.tools.run_commands import coserve

SAME_PLACE = "  same-place: {count: 2, same: [defect, designator], within: 3 boards}\n"
ALARMS = f"{RULES}alarms:\n{SAME_PLACE}  blind: {{verdict: unknown, count: 2, within: 2s}}\n"
TEXT = "named: missing_void at F1 on 2 of the last 2 boards"


def send_board(line: Line, serial: str) -> None:
    for designator in ("P1", "F1", "P2"):
        line.send(board={"type": "named", "serial": serial}, designator=designator, component=designator[0])
    line.boards(serial)


def texts(line: Line) -> list[str]:
    return [row["text"] for row in line.status().get("alarms", ())]


def gauges(line: Line) -> dict[str, float]:
    samples = line.control("metrics")["text"].splitlines()
    pairs = (text.rsplit(" ", 1) for text in samples if text.startswith("coserve_alarm_active{"))
    return {name.split('"')[1]: float(value) for name, value in pairs}


def events(line: Line, event: str) -> list[str]:
    return [text for text in line.log().splitlines() if f"event={event} " in text]


def test_an_alarm_begins_is_seen_everywhere_and_ends_with_a_review_that_is_a_false_call(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = Line(tmp_path / "line", experts_folder, ALARMS)
    service = line.service()
    service.start()
    send_board(line, "A1")
    line.wait(lambda: gauges(line) == {"same-place": 0.0, "blind": 0.0})
    assert texts(line) == []
    send_board(line, "A2")
    line.wait(lambda: texts(line) == [TEXT])
    (row,) = line.status()["alarms"]
    second = line.rows("SELECT completed_at FROM inspections WHERE designator = 'F1' ORDER BY seq")[1][0]
    assert (row["alarm"], row["since"], row["count"]) == ("same-place", second, 2)
    assert [image["board"]["serial"] for image in row["images"]] == ["A1", "A2"]
    assert gauges(line) == {"same-place": 1.0, "blind": 0.0}
    assert f"alarm same-place: {TEXT}" in coserve("status", "--config", line.config, COLUMNS="200").stdout
    assert line.status()["state"] == "ready", "an alarm says something of the boards, not of the line"

    # Rules that leave this alarm as it is keep it; a new one counts the rows that are there.
    line.write_rules(f"{ALARMS}  any: {{count: 1, same: [defect], within: 20 boards}}\n")
    assert line.control("reload")["type"] == "ok"
    line.wait(lambda: texts(line) == ["missing_void on 2 images of the last 2 boards", TEXT])
    assert len(events(line, "alarm_began")) == 2

    # A kill: the state is made again from the rows, and images that come back do not count twice.
    service.kill()
    line.write_rules(ALARMS)
    coserve("reload", "--config", line.config)
    later = "2099-01-01T00:00:00.000Z"
    sql(line.folder, "UPDATE boards SET completed_at = ? WHERE seq = (SELECT max(seq) FROM boards)", values=(later,))
    with line.service():
        line.wait(lambda: texts(line) == [TEXT])
        assert line.status()["alarms"] == [row]
        # The newest result is later than now: the clock was set back.
        assert "and there are results of 2099-01-01 00:00:00 UTC" in line.status()["clock"]
        assert len(events(line, "clock_set_back")) == 1
        first = line.stream()[0]
        header = line.inspect(id=first["id"], board={"type": "named", "serial": "A1"}, designator="P1")
        with line.peer() as peer:
            assert peer.ask(header, a_jpeg(1))["type"] == "duplicate"
        ((image,),) = line.rows("SELECT inspection_id FROM inspections WHERE designator = 'F1' ORDER BY seq LIMIT 1")
        line.review(inspection_id=image, verdict="pass", reviewer="Eva")
        line.wait(lambda: texts(line) == [] and gauges(line)["same-place"] == 0.0)
        assert TEXT in events(line, "alarm_ended")[-1]
        send_board(line, "A3")
        line.wait(lambda: texts(line) == [TEXT.replace("last 2", "last 3")])


@pytest.mark.skipif(mosquitto() is None, reason="needs mosquitto: make system-tools")
def test_the_plant_hears_which_alarms_are_up_also_one_that_comes_later(tmp_path: Path, experts_folder: Path) -> None:
    pytest.importorskip("paho")
    port = free_port()
    plant = {"kind": "mqtt", "host": f"127.0.0.1:{port}", "prefix": "plant"}
    line = Line(tmp_path / "line", experts_folder, ALARMS, consumers={"plant": plant})

    def heard(mes: Subscriber) -> list[list[str]]:
        return [[row["text"] for row in body["alarms"]] for body in mes.bodies("alarms")]

    with line.service(), Broker(tmp_path / "broker", port=port) as broker, Subscriber(port, "plant/alarms") as mes:
        line.wait(lambda: heard(mes) == [[]])
        send_board(line, "A1")
        send_board(line, "A2")
        line.wait(lambda: heard(mes)[-1] == [TEXT])
        with Subscriber(port, "plant/alarms", name="late", keeps_session=False) as late:
            line.wait(lambda: heard(late) == [[TEXT]])
            assert late.messages[0].retain
        told: dict[str, Any] = json.loads((line.folder / "consumers" / "alarms.json").read_text(encoding="utf-8"))
        assert told["alarms"] == line.status()["alarms"]
        broker.end()
        broker.start()  # without persistence: it has forgotten everything
        with Subscriber(port, "plant/alarms", name="new", keeps_session=False) as new:
            line.wait(lambda: heard(new) == [[TEXT]])
        line.write_rules(RULES)
        line.control("reload")
        line.wait(lambda: heard(mes)[-1] == [])
