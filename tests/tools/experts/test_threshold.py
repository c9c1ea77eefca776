"""`coserve experts threshold`: databases whose cheapest threshold is known, and what it says that it cannot know."""

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from daemon.storage.database.store import Store
from experts.spec import ExpertId
from tests.contract.client import Line
from tests.lines import COSERVE_RUN, a_jpeg
from tests.tools.run_commands import coserve
from tools.experts.line import entries_in_force, open_line
from tools.experts.measure import answers_of, images_in

RULES = """\
boards: {board: {components: {R0402: 1}}}
classifiers: {"R*": {expert: R0402, pass: [ok, odd], review_below: 0.8, then: solder}}
detectors: {solder: {expert: yolo-solder, fail_on: {bridge: 0.5, void: 0.9}}}
defects: {bridge: D207}
"""
#: Of these tests: confidence, number of images, decision (None: nobody decided), and whether the part is good.
GOOD_SHOWN, BAD_SHOWN = [(0.70, 50, "pass"), (0.60, 30, "pass")], [(0.55, 20, "fail")]
PASSED = [(0.95, 200, "pass"), (0.85, 20, "pass"), (0.90, 5, "fail")]


class Answers:
    """The rows of a line whose experts answered; each image has a board of its own unless `board` says another."""

    def __init__(self, line: Line) -> None:
        self.line = line
        opened = open_line(line.config)
        self.catalog, _ = opened.catalog(entries_in_force(opened.experts()))
        self.file = line.folder / "inspection.db"
        Store(f"sqlite:///{self.file}").close()
        self.count = 0

    def add(self, rows: Iterable[tuple[float, int, str | None]], verdict: str, **more: Any) -> None:
        with closing(sqlite3.connect(self.file)) as database, database:
            for confidence, number, decision in rows:
                for _ in range(number):
                    self.count += 1
                    self._image(database, confidence, verdict, decision, **more)

    def _image(
        self, database: sqlite3.Connection, confidence: float, verdict: str, decision: str | None, *,
        expert: str = "R0402", label: str | None = "ok", box: str | None = None, defect: str | None = None,
        board: int | None = None, version: str | None = None,
    ) -> None:  # fmt: skip
        spec, number, at = self.catalog[ExpertId(expert)], self.count, "2026-11-25T00:00:00.000Z"
        board = number if board is None else board
        database.execute(
            "INSERT OR IGNORE INTO boards (board_id, board_type, serial, attempt, first_seen_at, expected, inspected,"
            " rules_version, edition) VALUES (?, 'board', ?, 1, ?, 1, 1, 'r', 1)",
            (board, f"S{board}", at))  # fmt: skip
        database.execute(
            "INSERT INTO inspections (inspection_id, source, image_id, board_id, component, designator, accepted_at,"
            " completed_at, image_bytes, status, verdict, rules_version, image_sha256, edition)"
            " VALUES (?, 'cam', ?, ?, 'R0402', ?, ?, ?, 1, 'done', ?, 'r', '0', 1)",
            (number, f"i{number}", board, f"R{number}", at, at, verdict))  # fmt: skip
        database.execute(
            "INSERT INTO stages VALUES (?, 0, ?, ?, ?, ?, 'cpu', 'cpu/0', 1, 1, 0, 0, 0, ?)",
            (number, expert, version or spec.version, label, None if box else confidence, spec.settings_digest),
        )
        if box:
            for sure in (confidence, 0.3):
                database.execute("INSERT INTO detections VALUES (NULL, ?, 0, ?, ?, 0, 0, 1, 1)", (number, box, sure))
        if decision:
            database.execute(
                "INSERT INTO reviews (inspection_id, at, reviewer, verdict, defect) VALUES (?, ?, 'Eva', ?, ?)",
                (number, at, decision, defect))  # fmt: skip


@pytest.fixture
def answers(tmp_path: Path, experts_folder: Path) -> Answers:
    return Answers(Line(tmp_path / "line", experts_folder, RULES))


def run(answers: Answers, *more: object, expert: str = "R0402", status: int = 0) -> Any:
    line = answers.line
    costs = ("--escape-cost", 100, "--false-call-cost", 1, "--out", line.folder / "out", "--config", line.config)
    done = coserve("experts", "threshold", expert, *costs, *more, status=status)
    return json.loads(done.stdout) if "--json" in more and not status else done.output


def test_everything_is_decided_and_the_best_threshold_is_above_the_last_escape(answers: Answers) -> None:
    answers.add([*GOOD_SHOWN, *BAD_SHOWN], "review")
    answers.add(PASSED, "pass")
    answers.add([(0.99, 10, "fail")], "fail", label="bad")  # shown at every threshold
    result = run(answers, "--json")
    assert (result["entry"], result["key"], result["in_force"]) == ("R*", "review_below", 0.8)
    assert (result["shown_decided"], result["passed_decided"], result["passed"]) == (110, 225, 225)
    assert result["best"] == 0.91, "0.9 would pass the five escapes; above 0.95 every good part is shown"
    assert result["cost_in_force"] == pytest.approx((5 * 100 + 80) * 1000 / 335)
    assert result["cost"] == pytest.approx(100 * 1000 / 335)
    low, high = result["best_interval"]
    assert low <= 0.91 <= high <= 0.95
    assert result["saved_interval"][0] > 0
    costs = {round(row[0], 2): row[1] for row in result["curve"]}
    assert len(costs) == 101
    assert costs[0.5] == pytest.approx(25 * 100 * 1000 / 335)
    assert costs[1.0] == pytest.approx(300 * 1000 / 335)
    assert run(answers, "--json") == result, "the seed is fixed"


def test_what_passed_and_was_looked_at_by_chance_says_nothing_about_escapes(answers: Answers) -> None:
    answers.add([*GOOD_SHOWN, *BAD_SHOWN], "review")
    answers.add([(0.95, 200, None), (0.85, 20, None)], "pass")
    answers.add([(0.90, 5, "fail")], "pass", board=1000)  # a customer's board: only what had failed was decided
    answers.add([(0.95, 1, None)], "pass", board=1000)
    result = run(answers, "--json")
    assert (result["passed"], result["passed_decided"], result["compares_all"]) == (226, 0, False)
    assert max(row[0] for row in result["curve"]) == 0.8, "nothing is known of thresholds that show more"
    assert result["best"] == 0.6, "all defects that people found are below"
    assert (result["cost"], result["cost_in_force"]) == (0.0, pytest.approx(80 * 1000 / 326))
    assert "100 more passed images, all those of boards chosen at random" in run(answers).replace("\n", " ")


def test_too_few_decisions_say_how_many_more_of_which_kind(answers: Answers) -> None:
    assert "10 more that fail and 10 more that pass are needed" in run(answers, status=1)
    answers.add([(0.70, 12, "pass"), (0.5, 3, "fail")], "review")
    answers.add([(0.5, 50, "fail")], "review", version="000000000000")  # another version is another expert
    output = run(answers, status=1)
    assert "3 images that fail and 12 that pass are known; 7 more that fail are needed" in output.replace("\n", " ")


def test_a_detectors_label_has_a_threshold_of_its_own(answers: Answers) -> None:
    of = {"expert": "yolo-solder", "label": None, "box": "bridge"}
    answers.add([(0.55, 30, "pass")], "fail", **of)
    answers.add([(0.55, 10, "fail")], "fail", defect="void", **of)  # for this label a false call
    answers.add([(0.75, 20, "fail")], "fail", defect="D207", **of)
    answers.add([(0.20, 9, "fail")], "fail", **of)  # another label failed these: this threshold changes nothing
    for chosen in ((), ("--label", "joint")):
        refused = run(answers, *chosen, expert="yolo-solder", status=1).replace("\n", " ")
        assert "--label: expected one that `fail_on` of solder names: bridge, void" in refused
    result = run(answers, "--label", "bridge", "--json", expert="yolo-solder")
    assert (result["key"], result["in_force"], result["best"]) == ("fail_on: bridge", 0.5, 0.56)
    assert (result["cost"], result["cost_in_force"]) == (0.0, pytest.approx(40 * 1000 / 60))
    assert min(row[0] for row in result["curve"]) == 0.5
    answers.add([(0.40, 100, "pass"), (0.45, 20, "fail")], "pass", **of)
    wider = run(answers, "--label", "bridge", "--json", expert="yolo-solder")
    assert (wider["best"], min(row[0] for row in wider["curve"])) == (0.45, 0.25), "boxes below the floor are not kept"


def test_pictures_stand_for_the_images_and_decisions_for_the_share_of_defects(
    tmp_path: Path, version_folders: tuple[Path, Path]
) -> None:
    rules = "boards: {board: {components: {P: 1}}}\nclassifiers: {P: {expert: P, pass: [ok], review_below: 0.5}}\n"
    answers = Answers(Line(tmp_path / "line", version_folders[0], rules, COSERVE_RUN))
    pictures = tmp_path / "pictures"
    for label in ("ok", "bad"):
        (pictures / label).mkdir(parents=True)
        for number in range(12):
            (pictures / label / f"{number}.jpg").write_bytes(a_jpeg(number if label == "ok" else 100 + number))
    assert "1 that fails is needed" in run(answers, "--pictures", pictures, expert="P", status=1)
    answers.add([(0.4, 5, "fail"), (0.4, 95, "pass")], "review", expert="P")
    result = run(answers, "--pictures", pictures, "--json", expert="P")
    assert (result["pictures"], result["fail"], result["pass"], result["defective"]) == (24, 12, 12, 5.0)
    spec = answers.catalog[ExpertId("P")]
    sure = {
        label: [
            each.confidence if each.label == "ok" else -1.0
            for each in answers_of(spec, images_in(pictures / label, spec))
        ]
        for label in ("ok", "bad")
    }
    for at, cost, *_ in result["curve"]:
        escapes = sum(each >= at for each in sure["bad"]) * 5 / 12
        false_calls = sum(each < at for each in sure["ok"]) * 95 / 12
        assert cost == pytest.approx((100 * escapes + false_calls) * 10)
    output = run(answers, "--pictures", pictures, expert="P").replace("\n", " ")
    assert "the share of defective ones (5.00%) from decisions" in output
