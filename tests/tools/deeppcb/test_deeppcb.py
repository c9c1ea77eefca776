"""Bare boards: drawn defects, the data set's measure by hand, classifiers, the rules example, and a whole small run."""

import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from daemon.check import check_line
from experts.vision.architectures import ARCHITECTURES
from experts.vision.networks import build_original
from routing_rules.compile import ExpertLabels, compile_rules
from routing_rules.load import read_yaml
from tests import ROOT
from tools.deeppcb.classifiers import Locator, TileSampler, as_resnet, cell_loss, choose_evidence, mark_cells
from tools.deeppcb.command import register
from tools.deeppcb.crops import CropSampler, turn
from tools.deeppcb.line import ANY_PATTERN, DETECTOR, render_rules
from tools.deeppcb.measure import (
    Found,
    average_precisions,
    choose_threshold,
    count,
    hits,
    mean_average_precision,
    overlaps,
)
from tools.deeppcb.report import print_report
from tools.deeppcb.run import load_detector, run
from tools.deeppcb.synthetic import draw_defect, mine_shapes
from tools.deeppcb.tiles import LABELS, Boxes, DataError, Defect, Pair, Tile, is_copper, read_split

EXAMPLE = ROOT / "routing_rules/examples/deeppcb/rules.yaml"
NO_BOXES: Boxes = np.zeros((0, 5), np.float32)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def a_tile(size: int = 640) -> Tile:
    """Vertical traces 24 pixels wide with gaps of 24, and a copper plane and a bare plane at the right."""
    tile = np.full((size, size), 255, np.uint8)
    for x in range(24, size // 2, 48):
        tile[:, x : x + 24] = 0
    tile[: size // 2, size // 2 + 40 :] = 0
    return tile


def a_pair(pattern: str = "group00001") -> Pair:
    """Its tested tile has a pin-hole and a spur."""
    template = a_tile()
    test = template.copy()
    test[100:110, 500:508] = 255
    test[300:308, 48:56] = 0
    boxes = np.array([[490, 90, 518, 120, Defect.PIN_HOLE], [38, 290, 66, 318, Defect.SPUR]], np.float32)
    return Pair(f"{pattern}/0", pattern, template, test, boxes, Path("temp.jpg"), Path("test.jpg"))


def found(*rows: tuple[float, float, float, float, int, float]) -> Found:
    """Rows of x1 y1 x2 y2 class confidence."""
    table = np.array(rows, np.float32).reshape(-1, 6)
    return Found(table[:, :4], table[:, 4].astype(np.int64), table[:, 5])


def a_data_folder(folder: Path) -> Path:
    """Four training pairs of two patterns and one to report on."""
    names = [f"{pattern}/{number}" for pattern in ("group1", "group2") for number in (1, 2)]
    pair = a_pair()
    for name in [*names, "group1/3"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{name}_temp.jpg"), pair.template)
        cv2.imwrite(str(folder / f"{name}_test.jpg"), pair.test)
        rows = [f"{int(x1)} {int(y1)} {int(x2)} {int(y2)} {int(kind) + 1}" for x1, y1, x2, y2, kind in pair.boxes]
        (folder / f"{name}.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "train.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    (folder / "val.txt").write_text("group1/3\n", encoding="utf-8")
    return folder


# Drawn defects


@pytest.mark.parametrize("defect", list(Defect))
def test_a_drawn_defect_adds_or_removes_copper_inside_its_box_only(defect: Defect) -> None:
    shapes, rng, drawn = mine_shapes([a_pair()]), np.random.default_rng(3), 0
    for _ in range(60):
        tile = a_tile()
        before = is_copper(tile)
        row = draw_defect(tile, NO_BOXES, defect, shapes, rng)
        if row is None:
            assert np.array_equal(is_copper(tile), before)
            continue
        drawn += 1
        changed = is_copper(tile) ^ before
        adds = defect in {Defect.SHORT, Defect.SPUR, Defect.COPPER}
        assert (is_copper(tile)[changed] == adds).all()
        rows, columns = np.nonzero(changed)
        x1, y1, x2, y2, kind = row
        assert kind == defect
        assert 0 <= x1 <= columns.min() <= columns.max() < x2 <= 640
        assert 0 <= y1 <= rows.min() <= rows.max() < y2 <= 640
    assert drawn >= 10


def test_an_open_parts_a_trace_and_a_short_joins_two() -> None:
    shapes = mine_shapes([a_pair()])
    tile = a_tile(320)
    traces, _ = cv2.connectedComponents(is_copper(tile).astype(np.uint8), connectivity=4)
    for defect, parts in ((Defect.OPEN, traces + 1), (Defect.SHORT, traces - 1)):
        counts = []
        rng = np.random.default_rng(0)
        while len(counts) < 20:
            drawn = tile.copy()
            if draw_defect(drawn, NO_BOXES, defect, shapes, rng) is not None:
                counts.append(cv2.connectedComponents(is_copper(drawn).astype(np.uint8), connectivity=4)[0])
        assert counts.count(parts) >= 12


def test_a_defect_is_never_drawn_on_another() -> None:
    shapes, rng = mine_shapes([a_pair()]), np.random.default_rng(4)
    everywhere = np.array([[0, 0, 640, 640, 0]], np.float32)
    assert all(draw_defect(a_tile(), everywhere, defect, shapes, rng) is None for defect in Defect for _ in range(5))


def test_shapes_are_mined_where_the_tiles_of_a_pair_differ() -> None:
    shapes = mine_shapes([a_pair()])
    assert [shape.shape for shape in shapes.plane] == [(10, 8)]
    assert [shape.shape for shape in shapes.edge] == [(8, 8)]


def test_windows_are_square_with_boxes_inside_and_repeat_with_their_seed() -> None:
    pair = a_pair()
    sampler = CropSampler([pair], mine_shapes([pair]), 320)
    first, second = np.random.default_rng(7), np.random.default_rng(7)
    for _ in range(30):
        (tile, boxes), (same, same_boxes) = sampler(first), sampler(second)
        assert tile.shape == (320, 320)
        assert tile.dtype == np.uint8
        assert np.array_equal(tile, same)
        assert np.array_equal(boxes, same_boxes)
        assert (boxes[:, :4] >= 0).all()
        assert (boxes[:, :4] <= 320).all()
        assert (boxes[:, 2:4] > boxes[:, :2]).all()
        assert set(boxes[:, 4]) <= set(range(len(LABELS)))


def test_boxes_turn_with_their_tile() -> None:
    rng = np.random.default_rng(0)
    for _ in range(16):
        tile = np.zeros((64, 64), np.uint8)
        tile[10:20, 30:34] = 255
        turned, boxes = turn(tile, np.array([[30, 10, 34, 20, 2]], np.float32), rng)
        x1, y1, x2, y2 = (int(value) for value in boxes[0, :4])
        assert (turned[y1:y2, x1:x2] == 255).all()
        assert turned.sum() == tile.sum()


# The measure


def test_overlaps_are_those_computed_by_hand() -> None:
    left = np.array([[0, 0, 10, 10]], np.float32)
    right = np.array([[5, 0, 15, 10], [0, 0, 10, 10], [20, 20, 30, 30], [0, 0, 0, 0]], np.float32)
    assert overlaps(left, right)[0].tolist() == pytest.approx([1 / 3, 1.0, 0.0, 0.0])


def test_a_hit_needs_the_class_and_the_overlap_and_each_defect_counts_once() -> None:
    truth = np.array([[0, 0, 10, 10, 1], [50, 50, 60, 60, 2]], np.float32)
    answer = found(
        (0, 0, 10, 10, 1, 0.6),  # the same defect, less sure than the next
        (1, 0, 10, 10, 1, 0.9),
        (50, 50, 60, 60, 3, 0.8),  # another class
        (56, 50, 66, 60, 2, 0.7),  # an IoU of .25
    )
    assert hits(answer, truth).tolist() == [False, True, False, False]


def test_counts_and_f_score_are_those_computed_by_hand() -> None:
    truth = np.array([[0, 0, 10, 10, 1], [50, 50, 60, 60, 2], [80, 80, 90, 90, 2]], np.float32)
    answer = found((0, 0, 10, 10, 1, 0.9), (50, 50, 60, 60, 2, 0.4), (20, 20, 30, 30, 0, 0.6))
    counts = count([answer, found()], [truth, NO_BOXES], 0.5)
    assert (counts.hits, counts.false, counts.missed) == (1, 1, 2)
    assert (counts.precision, counts.recall) == (0.5, pytest.approx(1 / 3))
    assert counts.f_score == pytest.approx(0.4)


def test_average_precision_sums_the_precision_at_each_hit() -> None:
    truth = np.array([[0, 0, 10, 10, 0], [20, 0, 30, 10, 0], [40, 0, 50, 10, 0]], np.float32)
    answer = found((0, 0, 10, 10, 0, 0.9), (60, 0, 70, 10, 0, 0.8), (20, 0, 30, 10, 0, 0.7))
    precisions = average_precisions([answer], [truth], 2)
    assert precisions == [pytest.approx((1 / 1 + 2 / 3) / 3), None]
    assert mean_average_precision(precisions) == pytest.approx(5 / 9)


def test_the_threshold_lies_in_the_middle_of_the_best() -> None:
    truth = np.array([[0, 0, 10, 10, 0]], np.float32)
    answer = found((0, 0, 10, 10, 0, 0.80), (60, 0, 70, 10, 0, 0.30))
    assert choose_threshold([answer], [truth]) == pytest.approx(0.55, abs=0.03)


# Classifiers


def test_cells_are_marked_by_the_centres_of_boxes() -> None:
    boxes = np.array([[0, 0, 20, 20, 0], [60, 100, 90, 120, 1]], np.float32)
    marks = mark_cells(boxes, 320, 5)
    assert marks.tolist() == [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_a_template_without_drawn_defects_has_no_marks() -> None:
    pair = a_pair()
    sampler, rng = TileSampler([pair], mine_shapes([pair]), 5), np.random.default_rng(2)
    examples = [sampler(rng) for _ in range(40)]
    assert all(tile.shape == (160, 160) and marks.shape == (5, 5) for tile, marks in examples)
    assert any(marks.any() for _, marks in examples)
    assert any(not marks.any() for _, marks in examples)


def test_evidence_where_the_defect_is_costs_less_than_elsewhere() -> None:
    marks = torch.tensor([[[1, 0], [0, 2]]])
    hints = torch.zeros(1, 2, 2)
    right, wrong = torch.tensor([[[3.0, 0.0], [0.0, 3.0]]]), torch.tensor([[[0.0, 3.0], [0.0, 0.0]]])
    assert cell_loss(right, hints, marks) < cell_loss(wrong, hints, marks)


def test_the_resnet_says_what_the_cells_add_up_to() -> None:
    torch.manual_seed(0)
    network = build_original(ARCHITECTURES["resnet18"], 2)
    locator = Locator(network).eval()
    images = torch.rand(2, 3, 320, 320)
    resnet = build_original(ARCHITECTURES["resnet18"], 2)
    resnet.load_state_dict(as_resnet(locator, 1.5))
    with torch.inference_mode():
        sums = locator(images)[0].sum((1, 2))
        logits = resnet(images)
    assert (logits[:, 1] - logits[:, 0]).tolist() == pytest.approx((4 * (sums - 1.5)).tolist(), rel=1e-3)


def test_the_evidence_threshold_parts_clean_from_suspect() -> None:
    clean, suspect = np.array([0.01, 0.2]), np.array([1.0, 9.0])
    assert choose_evidence(clean, suspect) == pytest.approx(np.sqrt(0.2 * 1.0), rel=0.05)
    assert choose_evidence(np.array([0.2, 0.9]), np.array([0.8, 9.0])) < 0.8  # a miss is worse than a false call


# The data set, the rules and the whole run


def test_a_bad_line_of_the_data_set_names_file_and_line(tmp_path: Path) -> None:
    folder = a_data_folder(tmp_path)
    (folder / "group1/1.txt").write_text("1 2 3 4 5\n9 9 3 4 5\n", encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(f"{folder / 'group1/1.txt'}:2: expected x1 < x2")):
        read_split(folder, "train")
    (folder / "train.txt").write_text("group1/9\n", encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(f"{folder / 'train.txt'}:1: {folder / 'group1/9_temp.jpg'}")):
        read_split(folder, "train")
    with pytest.raises(DataError, match="name the folder that holds it"):
        read_split(tmp_path / "nowhere", "train")


def test_the_rules_example_is_what_the_run_writes_and_compiles() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    patterns = re.findall(r"^  (group\d+): +\{expert", text, re.MULTILINE)
    threshold = re.search(r"fail_on: \{open: ([\d.]+)", text)
    assert len(patterns) == 7
    assert threshold is not None
    assert text == render_rules(patterns, float(threshold[1]))
    labels = {name: ExpertLabels("classify", ("clean", "suspect")) for name in (*patterns, ANY_PATTERN)}
    routes = compile_rules(read_yaml(EXAMPLE), str(EXAMPLE), {**labels, DETECTOR: ExpertLabels("detect", LABELS)})
    assert routes.first_step("group00041", "group00041").expert == "group00041"  # type: ignore[union-attr]
    assert routes.first_step("bare-board", "group12300").expert == ANY_PATTERN  # type: ignore[union-attr]


def test_patterns_named_in_digits_stay_text_in_the_rules() -> None:
    routes = compile_rules(render_rules(["00041"], 0.4))
    assert routes.first_step("00041", "00041").expert == "00041"  # type: ignore[union-attr]


def test_a_file_that_holds_no_detector_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data, file = a_data_folder(tmp_path / "data"), tmp_path / "detector"
    file.write_bytes(b"damaged")
    with pytest.raises(DataError, match="holds no yolov8n of 6 classes"):
        run(data, tmp_path / "line", 0.01, detector=file, threads=1)
    assert not (tmp_path / "line").exists()


def test_a_run_makes_a_line_that_the_check_accepts_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = a_data_folder(tmp_path / "data"), tmp_path / "line"
    seen: list[tuple[str, float]] = []
    trained = run(data, out, 0.03, threads=1, on_progress=lambda name, share: seen.append((name, share)))
    problems, facts = check_line(trained.config)
    assert problems == []
    assert facts["experts"] == 4
    assert {name for name, _ in seen} == {"detector", ANY_PATTERN, "group1", "group2"}
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert (report["tiles"], report["defects"]) == (1, 2)
    assert report["detector"]["hits"] + report["detector"]["missed"] == 2
    assert set(report["classifiers"]) == {"group1", ANY_PATTERN}
    assert load_detector(out / "detector.training").state_dict()
    print_report(trained.report)
    assert "the authors of DeepPCB" in capsys.readouterr().out


def test_the_command_says_what_is_wrong_with_the_folder(tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    result = CliRunner().invoke(app, ["deeppcb", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "line")])
    assert result.exit_code == 1
    assert "name the folder that holds it" in result.output
    assert not (tmp_path / "line").exists()
