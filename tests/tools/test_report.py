"""`coserve report SERIAL`: a board's failures in words, from its rows, or by a model of the running line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.client import Line, running

REPORT = [sys.executable, "-m", "tools", "report"]


def run(line: Line, *arguments: str, status: int = 0) -> str:
    done = subprocess.run(
        [*REPORT, *arguments, "--config", str(line.config)], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def as_json(line: Line, *arguments: str) -> dict[str, Any]:
    return json.loads(run(line, *arguments, "--json"))


def test_a_board_is_explained_by_the_template_or_by_the_model_that_is_configured(
    tmp_path: Path, experts_folder: Path
) -> None:
    pytest.importorskip("transformers", reason="language models need the extra `moe`")
    from tests.tiny_text import a_text_model

    folder = a_text_model(tmp_path / "model", max_position_embeddings=2048)
    model = {"checkpoint": str(folder), "mode": "ondemand", "memory": "200KB", "max_new_tokens": 16}
    with running(tmp_path / "line", experts_folder, models={"writer": model}) as line:
        named = {"type": "named", "serial": "B-1", "lot": "L42"}
        for component, designator in (("P", "P1"), ("V", "P2"), ("F", "F1")):
            line.send(board=named, component="P" if component == "V" else component, designator=designator)
        (board,) = line.boards("B-1")
        assert board["verdict"] == "fail"
        said = run(line, "B-1", "--template")
        assert "Board B-1 (named, lot L42), attempt 1 of 1, FAILED: 3 of 3 positions inspected." in said
        assert "- F1 (F) failed: defect missing_void; QFP64 saw " in said
        assert "yolo-solder found" in said
        assert "P1" not in said

        line.send(board={"type": "quick", "serial": "Q-1"}, component="P", designator="P1")
        (board,) = line.boards("Q-1")
        said = run(line, "Q-1", "--template")
        assert "could not be judged whole: 1 of 2 positions inspected, its time ran out." in said
        assert "- no image of 1 × P: P2." in said

        written = as_json(line, "B-1")
        assert (written["by"], written["why_not_the_model"], written["verdict"]) == ("writer", None, "fail")
        ((text, status, row_board),) = line.rows("SELECT text, status, board_id FROM generations")
        assert written["text"] == text.strip()
        assert (status, row_board) == ("done", 1)
        assert "no board with serial B-9 in the results" in run(line, "B-9", status=1)
        assert "no attempt 2 at board B-1" in run(line, "B-1", "--attempt", "2", status=1)
        assert "names no model reader: writer" in run(line, "B-1", "--model", "reader", status=2)
        line.control("drain")
        assert "(by the template, model writer: the daemon refused it: the line is draining" in run(line, "B-1")
    fallen_back = as_json(line, "B-1", "--wait", "0.5")
    assert fallen_back["by"] == "template"
    assert "did not answer" in fallen_back["why_not_the_model"]
    assert fallen_back["text"].startswith("Board B-1")
