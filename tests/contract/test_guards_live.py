"""Guards of acceptance from the wire to `status`, once, end to end: it starts a daemon, with simulated devices."""

from pathlib import Path

from tests.contract.client import ANY, Line
from tests.lines import a_jpeg

RULES = f"""\
boards:
  any: {{components: {{P: 100, F: 100}}}}
  tiny: {{components: {{P: [P1]}}}}
classifiers:
  F: {{expert: R0402, pass: {ANY}, review_below: 0.0, then: all}}
  "*": {{expert: R0402, pass: {ANY}, review_below: 0.0}}
detectors:
  all: {{expert: yolo-solder, require: {{void: {{min: 64}}}}}}
"""


def test_a_frozen_camera_and_one_that_triggers_twice_pass_nothing_and_are_alarms(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = Line(tmp_path / "line", experts_folder, RULES, guards={})
    frozen, board = a_jpeg(1), {"type": "any", "serial": "A"}
    with line.service():
        for number in range(4):
            message = line.result(line.send(frozen, board=board, component="P", designator=f"P{number}"))
            found = (message["verdict"], message["reason"], len(message["stages"]))
            assert found == (("review", "repeated_picture", 1) if number else ("pass", None, 1))
            failing = {"source": "failing", "board": board, "component": "F", "designator": f"F{number}"}
            assert line.result(line.send(frozen, **failing))["verdict"] == "fail"
        for serial in ("B", "C", "D"):
            tiny = {"board": {"type": "tiny", "serial": serial}, "component": "P", "designator": "P1"}
            line.send(a_jpeg(ord(serial)), **tiny)
            line.boards(serial)
            again = line.result(line.send(a_jpeg(ord(serial)), **tiny))
            assert (again["board"]["attempt"], again["late"]) == (1, True)
        expected = {"repeated-picture", "boards-sent-twice"}
        line.wait(lambda: {row["alarm"] for row in line.status()["alarms"]} == expected)
        assert sum("failing sent the same picture" in row["text"] for row in line.status()["alarms"]) == 1
    assert line.rows("SELECT count(*), max(attempt) FROM boards WHERE board_type = 'tiny'") == [(3, 1)]
