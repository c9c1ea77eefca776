"""A small line that has judged images in every way: chains, boxes, deadlines, experts that fail, bad images."""

from pathlib import Path
from typing import Any

import yaml

from tests.contract.client import ANY, Line
from tests.experts.pictures import a_chunk, a_png
from tests.lines import a_jpeg

#: Weights are random, so a label is anybody's guess and boxes are barely there; `broken` has no weights.
RULES = f"""\
boards:
  any: {{extras: allow, components: {{P: 1000}}}}
  named: {{components: {{P: [P1], F: [F1]}}}}
  quick: {{time_limit: 1s, components: {{P: [P1, P2]}}}}
classifiers:
  P: {{expert: R0402, pass: {ANY}, review_below: 0.0}}
  V: {{expert: C0603, pass: {ANY}, review_below: 1.0}}
  F: {{expert: QFP64, pass: {ANY}, review_below: 0.0, then: solder}}
  X: {{expert: broken, pass: {ANY}}}
  "L*": {{expert: C0603, pass: [ok], review_below: 0.0}}
  "M?":
    expert: QFP64
    pass: [ok]
    review_below: 0.33
    then: {{ok: placed, odd: again, bad: placed}}
  DF: {{expert: R0402, pass: {ANY}, review_below: 0.0, then: strict}}
  DU: {{expert: R0402, pass: {ANY}, review_below: 0.0, then: unsure}}
  DR: {{expert: R0402, pass: {ANY}, review_below: 0.0, then: careful}}
  DM: {{expert: R0402, pass: {ANY}, review_below: 0.0, then: elsewhere}}
  "*": {{expert: R0402, pass: {ANY}, review_below: 0.0, then: placed}}
steps:
  again: {{expert: C0603, pass: [ok, odd], review_below: 0.34, then: placed}}
detectors:
  solder: {{expert: yolo-solder, require: {{void: {{min: 64}}}}}}
  strict: {{expert: yolo-solder, fail_on: {{"*": 0.0001}}}}
  unsure: {{expert: yolo-solder, fail_on: {{"*": 0.0001}}, review_below: 0.5}}
  careful: {{expert: yolo-solder, review_on: {{bridge: 0.0001}}}}
  placed:
    expert: yolo-solder
    fail_on: {{void: 0.9}}
    require:
      bridge:
        - {{min: 1, position: {{at: [0.5, 0.5], tolerance: 0.9}}}}
        - {{max: 250, region: [0.0, 0.0, 0.5, 1.0]}}
  elsewhere: {{expert: yolo-solder, require: {{bridge: {{position: {{at: [0.01, 0.01], tolerance: 0.01}}}}}}}}
defects: {{missing_void: D301, bad: D1, odd: D2, misplaced_bridge: D9}}
"""
#: Component types, each judged in another way.
COMPONENTS = ("P", "V", "F", "L1", "L2", "MA", "MB", "DF", "DU", "DR", "DM", "other")
#: What a spreadsheet, a browser, a shell and a file system would make something else of.
SERIALS = ("=1+1", "<script>alert(1)</script>", "../../etc/passwd", "'; DROP TABLE boards; --", "Ünï/~ x")


def undecodable_png() -> bytes:
    """A PNG of sound structure whose compressed pixels are none."""
    return a_png(80, 60, 2, a_chunk(b"IDAT", b"\x78\x9c" + bytes(400)))


def judged_line(folder: Path, experts: Path, images: int = 3, **settings: Any) -> Line:
    """The line's folder after a run: everything judged, kept pictures copied, the daemon stopped."""
    line = Line(folder, experts, RULES, **settings)
    catalog = folder / "experts" / "catalog.yaml"
    entries = yaml.safe_load(catalog.read_text(encoding="utf-8"))
    entries["experts"]["yolo-solder"]["confidence_floor"] = 0.0  # random weights see boxes everywhere, barely
    entries["experts"]["broken"] = entries["experts"]["R0402"] | {"file": "broken.safetensors", "sha256": "0" * 64}
    catalog.write_text(yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")
    with line.service():
        send_everything(line, images)
        line.idle()
        line.wait(lambda: line.rows("SELECT count(*) FROM pending") == [(0,)])
    return line


def send_everything(line: Line, images: int) -> None:
    board: dict[str, Any] = {"type": "any", "serial": "S1", "lot": "L1", "station": "ST1"}
    for number in range(images):
        for component in COMPONENTS:
            line.send(board=board, component=component, designator=f"{component}-{number}")
    line.send(board=board, component="X", designator="X1")
    line.send(undecodable_png(), board=board, component="P", designator="bad")
    raw = {"encoding": "raw", "dtype": "uint8", "shape": [60, 80, 1]}
    line.send(bytes(80 * 60), board=board, component="DM", designator="raw", **raw)
    for number in range(3):
        line.send(board=board, component="F", designator=f"hasty-{number}", deadline_ms=1)
    for serial in SERIALS:
        for component, designator in (("P", "P1"), ("F", "F1")):
            line.send(
                board={"type": "named", "serial": serial, "lot": "L1"}, component=component, designator=designator
            )
    for _ in range(2):  # the second time is another attempt
        for component, designator in (("P", "P1"), ("F", "F1")):
            image = line.send(
                a_jpeg(99),
                board={"type": "named", "serial": "S2", "lot": "L2"},
                component=component,
                designator=designator,
            )
            line.result(image)
    line.send(board={"type": "quick", "serial": "Q1", "lot": "L2"}, component="P", designator="P1")
    line.boards("Q1")
    line.send(board={"type": "quick", "serial": "Q1", "lot": "L2", "attempt": 1}, component="P", designator="P2")
