"""`coserve bench load` measures every way, and says how."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.bench import loading
from tools.cli.main import app

pytestmark = pytest.mark.test_all

torch.set_num_threads(1)


def run(*words: str):
    return CliRunner().invoke(app, ["bench", "load", *words])


@pytest.mark.test_all
def test_every_way_is_measured_and_slots_stand_beside_raw_and_ordinary(tmp_path: Path):
    result = run(
        "--architecture", "resnet18", "--rounds", "1", "--dtype", "bfloat16", "--folder", str(tmp_path), "--json"
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["rounds"] == 1
    assert report["cold_reads"] in ("direct", "dropped", "cached")
    figures = {entry["way"]: entry for entry in report["figures"]}
    for slot in ("slot, cold", "slot, warm", "slot, from RAM tier"):
        assert figures[slot]["share_of_raw"] > 0
        assert figures[slot]["bytes"] < 25e6
    for state in ("cold", "warm"):
        assert figures[f"slot, {state}, int8"]["bytes"] < 0.51 * figures[f"slot, {state}"]["bytes"]
        assert figures[f"slot, {state}, int8"]["share_of_raw"] > 0
        assert figures[f"slot, {state}, int8"]["slot_is_faster"] > 0
        assert f"slot, {state}, bfloat16" not in figures, "no thinner than what the slot computes with"
        for way in (
            "torch.load + construct",
            "safetensors + construct",
            "safetensors, module kept",
            "safetensors, assigned",
        ):
            assert figures[f"{way}, {state}"]["slot_is_faster"] > 0
    assert all(entry["ms"] > 0 and entry["dtype"] == "bfloat16" for entry in report["figures"])
    assert list(tmp_path.iterdir()) == []


def test_shares_and_ratios_are_taken_within_a_round():
    way = loading.LoadWay("slot", "disk", lambda: 0.0, 1_000_000, raw="raw", slot="other")
    seconds = {"slot": [1.0, 2.0, 4.0], "raw": [0.5, 1.0, 2.0], "other": [0.5, 0.5, 0.5]}
    figures = loading.figures_of(way, seconds, "resnet18", "float32", "cpu")
    assert (figures.ms, figures.share_of_raw, figures.slot_is_faster) == (2000.0, 0.5, 4.0)
