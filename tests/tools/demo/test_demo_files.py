import dataclasses
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml

from daemon.config.settings import load_config
from experts.catalog import CatalogFile, resolve
from experts.spec import ExpertId, ExpertSpec
from experts.vision.slot import SlotPool
from routing_rules.compile import ExpertLabels, compile_rules
from routing_rules.load import read_yaml, read_yaml_text
from routing_rules.routes import Routes
from tests.lines import a_line
from tools.camera.render import board_types, part_types, render_board
from tools.demo import prepare
from tools.demo.boards import COLOURS, PartVerdict, draw_board, part_verdicts
from tools.demo.files import write_configuration, write_rules
from tools.demo.judge import PartToJudge, Quality, choose_threshold, judge_parts
from tools.demo.prepare import PREPARED, PrepareReport, code_key
from tools.demo.training import DETECTORS, PARTS_PER_PANEL, SolderSampler, render_panels, split
from tools.training import fit
from tools.training.importer import import_model

torch.set_num_threads(1)


def some_limits() -> dict[str, dict[str, float]]:
    return {d.expert: {label: 0.5 for label in d.labels if label != "joint"} for d in DETECTORS}


def stand_in_experts() -> dict[str, ExpertLabels]:
    """Return the labels of the trained demo's experts, as its catalog has them."""
    classifiers = {name: ExpertLabels("classify", part.labels) for name, part in part_types().items()}
    return classifiers | {d.expert: ExpertLabels("detect", d.labels) for d in DETECTORS}


def the_routes(folder: Path) -> Routes:
    path = write_rules(folder, some_limits(), 0.6)
    return compile_rules(read_yaml(path), str(path), stand_in_experts())


def test_the_rules_fit_the_demos_experts_and_boards(tmp_path: Path):
    routes = the_routes(tmp_path)
    assert set(routes.recipes) == set(board_types())
    assert set(routes.experts) == set(stand_in_experts())
    for board in board_types().values():
        recipe = routes.recipes[board.name]
        assert recipe.expected == len(board.places)
        assert recipe.time_limit_s == 60
        for place in board.places:
            assert place.designator in recipe.positions[place.component].designators
            step = routes.first_step(board.name, place.component)
            assert step is not None
            assert step.expert == place.component


def test_every_part_that_passes_goes_on_to_the_detector_trained_on_its_family(tmp_path: Path):
    followers = the_routes(tmp_path).successors
    for name, part in part_types().items():
        (detector,) = (d.expert for d in DETECTORS if d.covers(part))
        assert [expert for expert, _ in followers[name]] == [detector]


def test_the_configuration_loads_and_a_changed_one_is_kept(tmp_path: Path):
    path = write_configuration(tmp_path)
    config = load_config(path)
    assert config.rules == tmp_path / "rules.yaml"
    assert config.catalog == tmp_path / "experts" / "catalog.yaml"
    changed = path.read_text(encoding="utf-8").replace("max_batch: 8", "max_batch: 4")
    path.write_text(changed, encoding="utf-8")
    assert write_configuration(tmp_path).read_text(encoding="utf-8") == changed


def test_rules_name_the_thresholds_that_were_chosen(tmp_path: Path):
    limits = some_limits()
    limits["solder-leaded"]["bridge"] = 0.41
    document = yaml.safe_load(write_rules(tmp_path, limits, 0.8).read_text(encoding="utf-8"))
    assert document["detectors"]["solder-leaded"]["fail_on"]["bridge"] == 0.41
    assert "joint" not in document["detectors"]["solder-chip"]["fail_on"]
    assert {rule["review_below"] for rule in document["classifiers"].values()} == {0.8}


@pytest.mark.parametrize(
    ("good", "bad", "between"),
    [
        pytest.param([0.2, 0.1], [0.9, 0.95], (0.3, 0.6), id="apart"),
        pytest.param([0.6, 0.1], [0.4, 0.9], (0.4, 0.4), id="mixed"),
        pytest.param([], [0.9], (0.3, 0.5), id="no good parts"),
        pytest.param([0.3, 0.1], [], (0.3, 0.75), id="no bad parts"),
        pytest.param([0.0] * 50, [0.01] * 50, (0.15, 0.75), id="nothing to be had: within the limits"),
        pytest.param([0.99, *[0.1] * 499], [0.9] * 100, (0.3, 0.5), id="one mistake in 500 is tolerated"),
    ],
)
def test_a_threshold_lies_between_mistakes_and_hits(good: list[float], bad: list[float], between: tuple[float, float]):
    assert between[0] <= choose_threshold(good, bad) <= between[1]


def test_panels_are_the_same_each_time_and_hold_good_and_bad_parts():
    samples = render_panels([3])
    assert len(samples) == PARTS_PER_PANEL
    assert {sample.component for sample in samples} == set(part_types())
    assert {sample.truth == "ok" for sample in samples} == {True, False}
    again = render_panels([3])
    assert all(np.array_equal(sample.pixels, same.pixels) for sample, same in zip(samples, again, strict=True))
    for sample in samples:
        labels = part_types()[sample.component].labels
        assert sample.placement_label == (sample.truth if sample.truth in labels else "ok")
    training, calibration = split(samples)
    assert [*training, *calibration] == samples
    assert len(calibration) == 6


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda d: d.expert)
def test_pictures_for_a_detector_carry_boxes_of_its_labels_inside_them(detector):
    sampler, rng = SolderSampler(render_panels([4, 5]), detector), np.random.default_rng(0)
    counts = []
    for _ in range(40):
        pixels, boxes = sampler(rng)
        counts.append(len(boxes))
        assert pixels.shape == (detector.input_size, detector.input_size, 3)
        assert (boxes[:, :4] >= 0).all()
        assert (boxes[:, :4] <= detector.input_size).all()
        assert (boxes[:, 2:4] > boxes[:, :2]).all()
        assert set(boxes[:, 4].astype(int)) <= set(range(len(detector.labels)))
    assert min(counts) == 0, "good parts are among the pictures"
    assert max(counts) > 0


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
    pool = SlotPool("cpu", sum(spec.weights_bytes for spec in specs))
    for spec in specs:
        pool.load(spec)
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
    shares: list[float] = []
    verdicts = judge_parts(routes, {spec.expert: spec for spec in specs}, pool.slot, parts, shares.append)
    by_component = {part.component: verdict for part, verdict in zip(parts, verdicts, strict=True)}
    assert by_component == {"R0402": "fail", "CE6": "review", "QFP32": "fail", "C0603": "pass"}
    assert len(shares) == 3, "parts of one expert are asked together, those behind others too"
    assert shares[-1] == 1.0


def test_rates_of_no_parts_are_zero():
    nothing = Quality(0, 0, 0, 0, 0, {})
    assert (nothing.catch_rate, nothing.false_call_rate) == (0, 0)


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


def test_a_line_that_has_seen_nothing_has_no_verdicts(tmp_path: Path, experts_folder: Path):
    assert part_verdicts(a_line(tmp_path / "line", experts_folder), "S1") == {}


def a_prepared_folder(folder: Path) -> PrepareReport:
    report = PrepareReport(code_key(), 3.5, Quality(24, 100, 98, 900, 2, {"shifted": 2}))
    (folder / "experts").mkdir(parents=True)
    (folder / "experts" / "catalog.yaml").write_text("experts: {}\n", encoding="utf-8")
    (folder / "rules.yaml").write_text("boards: {}\n", encoding="utf-8")
    (folder / PREPARED).write_text(json.dumps(dataclasses.asdict(report)), encoding="utf-8")
    return report


def test_a_line_made_by_the_same_code_is_used_again(tmp_path: Path):
    report = a_prepared_folder(tmp_path / "demo")
    earlier = prepare.prepare(tmp_path / "demo")
    assert earlier == dataclasses.replace(report, cached=True)
    assert "98 of 100 (0.980; missed: 2 shifted)" in earlier.summary()
    assert "trained in an earlier run" in earlier.summary()
