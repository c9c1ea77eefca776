"""`make gpu` on a simulated GPU: stages keep and replace their figures, and a lost GPU leaves nothing half-written."""

from dataclasses import replace
from pathlib import Path

import pytest

from daemon.check import check_line as check_line_of
from daemon.config.settings import load_config
from tests.bench.line import RunFigures
from tests.bench.live.expert_files import ExpertRecipe, read_experts
from tests.gpu import expert_files
from tests.gpu.__main__ import measure
from tests.gpu.expert_files import make_expert_files
from tests.gpu.page import NOT_MEASURED, FigureFiles, StageFigures, Table, page_text
from tests.gpu.stages import DRY_RUN

pytestmark = pytest.mark.test_all

RECIPE = ExpertRecipe(3, 1, "resnet18", "yolo11n", 32)
TINY_LOADS = replace(DRY_RUN, devices=("sim:0",), rounds=1)


def some_figures(stage: str, value: float) -> StageFigures:
    table = Table("Loads", ("way", "ms"), [("slot", value), ("other | way", None)], ["A note."])
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
    page = page_text(read)
    assert "| slot | 2.5 |" in page
    assert "| slot | 7.5 |" in page
    assert "9.5" not in page, "this run has not ended"
    assert "| other \\| way | – |" in page
    assert page.count("## Machine") == 1
    assert NOT_MEASURED not in page


def test_loads_are_measured_on_a_simulated_gpu(tmp_path: Path):
    files = FigureFiles(tmp_path / "figures")
    assert measure("load", TINY_LOADS, tmp_path, files) == 0
    figures = files.read("load")
    assert figures is not None
    (table,) = figures.tables
    assert (figures.problem, table.title) == ("", "resnet18, float32, into sim:0")
    assert {"slot, cold", "slot, from RAM tier", "safetensors, assigned, warm"} <= {row[0] for row in table.rows}


def test_the_demos_line_needs_no_training_and_leaves_only_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def check_line(config: Path, images: list[object], name: str, environ: dict[str, str]) -> RunFigures:
        """Check the line instead of running it, which takes a minute."""
        devices = load_config(config, environ).devices
        assert (list(devices), devices["cpu"].executors) == (["cpu"], 2), "a daemon has no simulated devices"
        assert len(images) == 54
        if name == "samba":
            problems, facts = check_line_of(config)
            assert (problems, facts["experts"]) == ([], 18)
        return RunFigures(name, len(images), 10.0, 5, 0)

    monkeypatch.setattr("tests.bench.line.run_line", check_line)
    files = FigureFiles(tmp_path / "figures")
    assert measure("line", DRY_RUN, tmp_path, files) == 0
    figures = files.read("line")
    assert figures is not None
    assert [table.title for table in figures.tables] == ["The demo's line, cpu"]
    assert [file.name for file in tmp_path.iterdir()] == ["figures"]


def test_a_gpu_that_disappears_is_a_named_error_and_the_figures_of_before_stay(tmp_path: Path, capsys):
    files = FigureFiles(tmp_path / "figures")
    files.keep(some_figures("load", 2.5))
    files.finish("load")
    before = (tmp_path / "figures" / "load.json").read_bytes()
    assert measure("load", replace(TINY_LOADS, devices=("lost:0",)), tmp_path, files) == 3
    assert "load: the GPU is lost: CUDA error" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "figures").iterdir()] == ["load.json"]
    assert (tmp_path / "figures" / "load.json").read_bytes() == before


def test_a_machine_without_a_gpu_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert measure("load", replace(TINY_LOADS, devices=("cuda:0",)), tmp_path, FigureFiles(tmp_path)) == 3
    assert "sees no CUDA device" in capsys.readouterr().err


def test_experts_have_bytes_of_their_own_and_share_files_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    catalog, distinct = make_expert_files(tmp_path, RECIPE, limit_s=0.0)
    specs = read_experts(catalog)
    assert (distinct, len(specs)) == (2, 4)
    assert len({spec.file for spec in specs.values()}) == 2, "no time: one of each kind"
    monkeypatch.setattr(expert_files, "_RESERVE_BYTES", 0)
    catalog, distinct = make_expert_files(tmp_path, RECIPE, limit_s=600.0)
    specs = read_experts(catalog)
    assert distinct == 4
    pages = {spec.file.read_bytes()[1_000_000:1_004_096] for spec in specs.values()}
    assert len({spec.sha256 for spec in specs.values()}) == len(pages) == 4
