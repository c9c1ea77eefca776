from pathlib import Path

import cv2
import pytest
import torch

from daemon.config.settings import load_config
from experts.catalog import CatalogFile, resolve
from experts.spec import ExpertId, ExpertSpec
from routing_rules.compile import compile_rules
from routing_rules.load import read_yaml_text
from tools.camera.render import render_board
from tools.demo.judge import PartToJudge, judge_parts, loaded_pool
from tools.demo.line import write_configuration
from tools.demo.run import COLOURS, PartVerdict, draw_board
from tools.training import fit
from tools.training.importer import import_model

torch.set_num_threads(1)


def test_the_configuration_loads_and_a_changed_one_is_kept(tmp_path: Path):
    path = write_configuration(tmp_path)
    config = load_config(path)
    assert config.rules == tmp_path / "rules.yaml"
    assert config.catalog == tmp_path / "experts" / "catalog.yaml"
    changed = path.read_text(encoding="utf-8").replace("max_batch: 8", "max_batch: 4")
    path.write_text(changed, encoding="utf-8")
    assert write_configuration(tmp_path).read_text(encoding="utf-8") == changed


def an_expert(folder: Path, name: str, says: str, logit: float) -> ExpertSpec:
    """A real network that answers `says` to every picture; logit 8 is sure of it, 1 is not."""
    network = fit.new_network("resnet18", 3)
    classes = ("ok", "missing", "shifted")
    with torch.no_grad():
        network.get_parameter("fc.weight").zero_()
        network.get_parameter("fc.bias").copy_(torch.tensor([logit * (label == says) for label in classes]))
    report = import_model(network, "resnet18", classes, 64, folder, expert=name)
    document = CatalogFile.model_validate({"experts": {name: report.entry}})
    return resolve(document, folder)[0][ExpertId(name)]


def test_parts_are_judged_along_the_routes(tmp_path: Path):
    kinds = {"sure": ("ok", 8.0), "unsure": ("ok", 1.0), "bad": ("missing", 8.0)}
    specs = [an_expert(tmp_path, name, *answer) for name, answer in kinds.items()]
    catalog = {ExpertId(spec.name): spec for spec in specs}
    rules = """\
boards: {sensor-node: {extras: allow, components: {R0402: 4}}}
classifiers:
  "R0402": {expert: bad, pass: [ok], review_below: 0.6}
  "CE6": {expert: unsure, pass: [ok], review_below: 0.6}
  "QFP32": {expert: sure, pass: [ok], review_below: 0.6, then: after}
  "*": {expert: sure, pass: [ok], review_below: 0.6}
steps:
  after: {expert: bad, pass: [ok], review_below: 0.6}
"""
    routes = compile_rules(read_yaml_text(rules, "rules.yaml"), "rules.yaml", None)
    components = ("R0402", "CE6", "QFP32", "C0603")
    placements = [p for p in render_board("sensor-node", 1, 0.0).placements if p.component in components]
    parts = [PartToJudge("sensor-node", p.component, p.pixels) for p in placements]
    verdicts = judge_parts(routes, catalog, loaded_pool(catalog), parts)
    by_component = {part.component: verdict for part, verdict in zip(parts, verdicts, strict=True)}
    assert by_component == {"R0402": "fail", "CE6": "review", "QFP32": "fail", "C0603": "pass"}


def test_a_drawn_board_is_a_png_of_the_board_with_a_header_and_frames(tmp_path: Path):
    board = render_board("sensor-node", 1, 0.0)
    first, second, *_ = board.placements
    side = first.pixels.shape[0]
    verdicts = {p.designator: PartVerdict("pass", None, ()) for p in board.placements[2:]}
    inner = (side * 0.3, side * 0.3, side * 0.6, side * 0.6)
    verdicts[first.designator] = PartVerdict("fail", "bridge", (("joint", 0.9, inner), ("bridge", 0.8, inner)))
    draw_board(board, "S1", verdicts, tmp_path / "S1.png")
    drawn = cv2.imread(str(tmp_path / "S1.png"))
    assert drawn is not None
    height, width = board.image.shape[:2]
    assert drawn.shape == (height + 34, width, 3)
    for placement, verdict in ((first, "fail"), (second, "unknown"), (board.placements[2], "pass")):
        x1, _, _, y2 = placement.box
        assert drawn[y2 + 34 - side // 3, x1].tolist() == pytest.approx(list(COLOURS[verdict]), abs=30), verdict
    left, top, _, _ = (round(value) for value in first.on_board(inner))
    assert drawn[top + 34 + 5, left].tolist() == pytest.approx(list(COLOURS["review"]), abs=30)
