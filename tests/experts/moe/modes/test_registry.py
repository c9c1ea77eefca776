"""The registry of modes: names, options, and what a mode says if its preparation is missing."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experts.moe.errors import ModelError
from experts.moe.modes import open_mode


def test_the_configuration_takes_its_modes_from_the_registry_without_importing_torch():
    code = "import sys, typing, daemon.config.settings as s; from experts.moe.modes import MODES\n"
    code += "sys.exit('torch' in sys.modules or typing.get_args(s.ModeName) != tuple(MODES))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_mode_is_named_with_the_nearest_one(tmp_path: Path):
    with pytest.raises(ModelError, match="did you mean lookahead"):
        open_mode("look-ahead", tmp_path)


@pytest.mark.parametrize(
    ("mode", "option", "value"),
    [
        ("emoe", "period", 0),
        ("emoe", "task_aware", "perhaps"),
        ("duoserve", "overlap", "perhaps"),
        ("swapmoe", "period", -1),
        ("brownout", "threshold", 1.5),
    ],
)
def test_a_wrong_value_of_an_option_is_named(tmp_path: Path, mode: str, option: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"mode {mode}, option {option}: .*options are: "):
        open_mode(mode, tmp_path, {option: value})


def test_one_slo_without_the_other_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"mode brownout: .*give ttft_slo_ms and tpot_slo_ms"):
        open_mode("brownout", tmp_path, {"ttft_slo_ms": 200})


@pytest.mark.parametrize(
    ("mode", "command"),
    [("popularity", "trace"), ("prune", "trace"), ("duoserve", "fit"), ("emoe", "fit"), ("brownout", "unite")],
)
def test_a_mode_whose_preparation_is_missing_names_the_command(tmp_path: Path, mode: str, command: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ModelError, match=f"coserve moe {command}"):
        open_mode(mode, tmp_path)
