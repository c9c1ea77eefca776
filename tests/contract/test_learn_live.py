"""`coserve learn` on a real line: decided pictures become a version that waits, compared and judged again."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.contract.client import Line
from tests.contract.test_families_live import put_heads, write_heads
from tests.lines import COSERVE_RUN
from tests.tools.run_commands import coserve, start_coserve

pytestmark = pytest.mark.test_all

RULES = """\
boards:
  free: {extras: allow, components: {P: 1000}}
classifiers:
  P: {expert: R0402, pass: [ok], review_below: 0.0}
  V: {expert: C0603, pass: [ok], review_below: 0.0}
defects: {bad: D7}
"""
IMAGES = 60


def a_part(seed: int, *, is_bad: bool) -> bytes:
    """A grey part with noise; a bad one has a bright stripe."""
    pixels = np.random.default_rng(seed).integers(40, 90, (64, 64, 3), dtype=np.uint8)
    if is_bad:
        pixels[20:44] = 240
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, torch_experts_folder: Path) -> Iterator[Line]:
    """Images of which each second is bad, all decided by a person; the head in service has random weights."""
    folder = tmp_path_factory.mktemp("learn") / "line"
    keep = {"keep": ["pass", "fail", "review", "unknown"]}
    line = Line(folder, torch_experts_folder, RULES, command=COSERVE_RUN, memory="150MB", retention=keep)
    for name in ("R0402", "C0603"):
        (folder / "experts" / f"{name}.safetensors").unlink()  # links to the session's files
    put_heads(folder / "experts", write_heads(folder / "experts"))
    with line.service():
        for number in range(IMAGES):
            board = {"type": "free", "serial": f"B{number // 2}"}
            line.send(a_part(number, is_bad=number % 2 == 1), board=board, component="P")
        line.idle()
        for image, number in line.rows("SELECT inspection_id, substr(image_id, 7) FROM inspections"):
            decision = {"verdict": "pass"} if int(number) % 2 else {"verdict": "fail", "defect": "D7"}
            assert line.review(inspection_id=image, reviewer="Eva", **decision)["type"] == "ok"
        yield line


def learn(line: Line, *words: str) -> Any:
    return start_coserve("learn", "R0402", "--config", line.config, "--json", *words, timeout=180)


def test_decided_pictures_become_a_better_version_that_is_not_yet_promoted(line: Line) -> None:
    before = json.loads(coserve("experts", "show", "R0402", "--config", line.config, "--json").stdout)
    done = learn(line)
    assert done.returncode == 0, done.stderr
    learned = json.loads(done.stdout)
    assert learned["pictures"] == {"bad": IMAGES // 2, "ok": IMAGES // 2} == learned["decided"]
    assert learned["compared"]["learned"]["escapes"].startswith("0 of 30")
    assert "The learned version makes fewer mistakes" in learned["compared"]["says"]
    assert learned["rejudged"]["rejudged"] == IMAGES
    candidates = json.loads((line.folder / "experts/candidates.json").read_text("utf-8"))
    assert f"reviews of {IMAGES} images, {learned['images'][0]} to {learned['images'][-1]}" in json.dumps(candidates)
    assert "coserve-learn-" not in json.dumps(candidates), "a temporary folder says nothing"
    effects = learned["rejudged"]["effects"]
    wrong = line.rows(
        "SELECT count(*) FROM inspections JOIN reviews USING (inspection_id)"
        " WHERE inspections.verdict = 'fail' AND reviews.verdict = 'pass'"
    )
    assert effects["false_calls_gone"] == wrong[0][0]
    after = json.loads(coserve("experts", "show", "R0402", "--config", line.config, "--json").stdout)
    assert after["version"] == before["version"] == learned["in_service"]
    assert learned["version"] in [row["version"] for row in after["versions"]]
    coserve("experts", "promote", "R0402", learned["version"], "--config", line.config)
    line.send(a_part(999, is_bad=True), board={"type": "free", "serial": "after"}, component="P")
    line.idle()
    assert line.rows("SELECT verdict, defect FROM inspections ORDER BY inspection_id DESC LIMIT 1") == [("fail", "D7")]


def test_the_folder_that_it_was_trained_on_is_used_too_and_the_newest_decision_counts(
    line: Line, tmp_path: Path
) -> None:
    for number in range(100, 110):
        for label in ("ok", "bad"):
            file = tmp_path / "training" / label / f"T{number}.P.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(a_part(number, is_bad=label == "bad"))
    image, path = line.rows("SELECT inspection_id, image_path FROM inspections WHERE image_id = 'image-1'")[0]
    wrong = tmp_path / "training" / "bad" / f"{image}-B0.png"
    wrong.write_bytes((line.folder / path).read_bytes())
    done = learn(line, "--with", str(tmp_path / "training"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pictures"] == {"bad": IMAGES // 2 + 10, "ok": IMAGES // 2 + 10}


@pytest.mark.parametrize(
    ("expert", "says"),
    [
        ("yolo-solder", "is not a classifier"),
        ("C0603", "no kept picture of C0603 has a person's decision"),
        ("none", "there is no expert none"),
    ],
)
def test_what_nothing_can_be_learned_from_is_refused_by_name(line: Line, expert: str, says: str) -> None:
    assert says in coserve("learn", expert, "--config", line.config, status=1).stderr
