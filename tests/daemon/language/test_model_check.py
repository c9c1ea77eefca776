"""`coserve check` of language models: a mistake in a checkpoint is named, with the line that names the checkpoint."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon.check import model_problems
from daemon.config.settings import load_config
from daemon.line.shared_devices import images_config, sharing_problems

pytest.importorskip("transformers", reason="language models need the extra `moe`")
from tests.tiny_text import EXPERT_BYTES, a_text_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_text_model(tmp_path_factory.mktemp("check") / "model")


def a_config(folder: Path, **model: Any) -> Path:
    path = folder / "coserve.yaml"
    settings = {"checkpoint": "model", "mode": "ondemand", "memory": "200KB"} | model
    text = "rules: r\ncatalog: c\ndevices: {cpu: {expert_memory: 1MB}}\nmodels:\n  tiny:\n"
    lines = yaml.safe_dump(settings, sort_keys=False).splitlines()
    path.write_text(text + "".join(f"    {line}\n" for line in lines), encoding="utf-8")
    return path


def problems(folder: Path, **model: Any) -> list[str]:
    path = a_config(folder, **model)
    return model_problems(path, load_config(path, {}))


def a_copy(checkpoint: Path, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint, folder / "model"))


def test_a_model_that_can_be_served_has_no_problem(checkpoint: Path, tmp_path: Path) -> None:
    a_copy(checkpoint, tmp_path)
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"checkpoint": "elsewhere"}, "elsewhere: there is no such folder"),
        ({"memory": 2 * EXPERT_BYTES - 1}, f"model: a budget of {2 * EXPERT_BYTES - 1} bytes"),
        ({"memory": 2 * EXPERT_BYTES}, "least_memory (a quarter of memory where it is not set): a budget of"),
        ({"least_memory": EXPERT_BYTES}, "least_memory (a quarter"),
        ({"text_memory": "10KB"}, "holds 19 tokens of 512 bytes, a text may come to 64: give at least 32768"),
        ({"text_memory": "10KB", "max_new_tokens": 19}, "a text may come to 20: give at least 10240"),
        ({"mode": "swapmoe", "options": {"periodd": 5}}, "periodd"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    checkpoint: Path, tmp_path: Path, model: dict[str, Any], message: str
) -> None:
    a_copy(checkpoint, tmp_path)
    (problem,) = problems(tmp_path, **model)
    assert problem.startswith(f"{tmp_path}/coserve.yaml:6:")
    assert message in problem


def test_damaged_and_missing_files_are_named(checkpoint: Path, tmp_path: Path) -> None:
    folder = a_copy(checkpoint, tmp_path)
    tokenizer = folder / "tokenizer.json"
    tokenizer.rename(folder / "gone")
    assert "tokenizer.json: is missing" in problems(tmp_path)[0]
    tokenizer.write_text("{}", encoding="utf-8")
    assert "tokenizer.json: is not a tokenizer" in problems(tmp_path)[0]
    (folder / "gone").rename(tokenizer)
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in problems(tmp_path)[0]


def test_a_missing_extra_says_how_to_install_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_copy(checkpoint, tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    (problem,) = problems(tmp_path)
    assert "transformers is not installed; a language model needs the extra `moe`" in problem
    assert "--editable '.[moe]'" in problem


def test_images_get_what_models_leave_and_nothing_is_a_mistake(checkpoint: Path, tmp_path: Path) -> None:
    folder = a_copy(checkpoint, tmp_path)
    config = load_config(a_config(tmp_path), {})
    left_bytes = images_config(config).devices["cpu"].expert_memory
    whole_bytes = (folder / "model.safetensors").stat().st_size
    dense_bytes = 1_000_000 - 200_000 - 50_000 - left_bytes
    assert 0 < dense_bytes < whole_bytes - 24 * EXPERT_BYTES
    for_texts = load_config(a_config(tmp_path, text_memory="60KB"), {})
    assert images_config(for_texts).devices["cpu"].expert_memory == left_bytes - 10_000
    assert sharing_problems(config) == []
    (problem,) = sharing_problems(load_config(a_config(tmp_path, memory="1MB"), {}))
    assert "leave nothing for images: models tiny take" in problem
