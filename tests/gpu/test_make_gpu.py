"""`make gpu` on a simulated GPU: stages keep and replace their figures, and a lost GPU leaves nothing half-written."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.__main__ import measure
from tests.gpu.page import BEGIN, END, NOT_MEASURED, FigureFiles, StageFigures, Table, write_section
from tests.gpu.stages import DRY_RUN

pytestmark = pytest.mark.test_all

TINY_LOADS = replace(DRY_RUN, devices=("sim:0",), rounds=1)


def some_figures(stage: str, value: float) -> StageFigures:
    table = Table("Loads", [{"way": "slot", "ms": value}, {"way": "other | way", "ms": None}], ["A note."])
    return StageFigures(stage, f"make gpu STAGES={stage}", {"GPU": "one"}, "2026-11-25", 3.0, tables=[table])


def test_a_stage_that_is_repeated_replaces_its_own_figures_when_it_has_ended(tmp_path: Path):
    files = FigureFiles(tmp_path)
    for value in (1.5, 2.5):
        files.keep(some_figures("load", value))
        files.finish("load")
    files.keep(some_figures("compute", 7.5))
    files.finish("compute")
    files.keep(some_figures("load", 9.5))
    read = [figures for stage in ("load", "compute") if (figures := files.read(stage)) is not None]
    file = tmp_path / "benchmarks.md"
    file.write_text(f"# Before\n{BEGIN}\n\n{NOT_MEASURED}\n\n{END}\n## After\n", encoding="utf-8")
    write_section(file, read)
    page = file.read_text(encoding="utf-8")
    assert (page.startswith("# Before\n"), page.endswith(f"{END}\n## After\n")) == (True, True)
    assert "| slot | 2.5 |" in page
    assert "| slot | 7.5 |" in page
    assert "9.5" not in page, "this run has not ended"
    assert "| other \\| way | – |" in page
    assert page.count("### Machine") == 1
    assert NOT_MEASURED not in page


def test_a_gpu_that_disappears_is_a_named_error_and_the_figures_of_before_stay(tmp_path: Path, capsys):
    files = FigureFiles(tmp_path / "figures")
    assert measure("load", TINY_LOADS, tmp_path, files) == 0
    before = (tmp_path / "figures" / "load.json").read_bytes()
    assert measure("load", replace(TINY_LOADS, devices=("lost:0",)), tmp_path, files) == 3
    assert "load: the GPU is lost: CUDA error" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "figures").iterdir()] == ["load.json"]
    assert (tmp_path / "figures" / "load.json").read_bytes() == before
    figures = files.read("load")
    assert figures is not None
    assert (figures.problem, [table.title for table in figures.tables]) == ("", ["resnet18, float32, into sim:0"])


def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert measure("load", replace(TINY_LOADS, devices=("cuda:0",)), tmp_path, FigureFiles(tmp_path)) == 3
    assert "sees no CUDA device" in capsys.readouterr().err
