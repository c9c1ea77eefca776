"""Options of a mode are checked before anything is read."""

from pathlib import Path
from typing import Any

import pytest

from experts.moe.errors import ModelError
from experts.moe.modes import open_mode


@pytest.mark.parametrize(
    ("mode", "option", "value"),
    [
        ("emoe", "period", 0),
        ("emoe", "period", 2.5),
        ("emoe", "variant", "layers"),
        ("emoe", "task_aware", "perhaps"),
        ("duoserve", "overlap", "perhaps"),
        ("swapmoe", "period", -1),
        ("swapmoe", "score", "luck"),
    ],
)
def test_an_option_of_a_wrong_value_is_named(tmp_path: Path, mode: str, option: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"mode {mode}, option {option}: .*options are: "):
        open_mode(mode, tmp_path, {option: value})


@pytest.mark.parametrize("mode", ["emoe", "duoserve", "swapmoe", "brownout", "ondemand"])
def test_an_option_that_a_mode_does_not_have_is_named(tmp_path: Path, mode: str) -> None:
    with pytest.raises(ModelError, match="speed"):
        open_mode(mode, tmp_path, {"speed": 1})
