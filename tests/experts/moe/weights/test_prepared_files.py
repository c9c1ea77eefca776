"""Prepared files belong to exactly one checkpoint, and traces come back as they were written."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from experts.moe.errors import ModelError
from experts.moe.trace import (
    Trace,
    load_popularity,
    popularity,
    popularity_by_task,
    save_popularity,
)
from experts.moe.weights.prepared import POPULARITY, PreparedFiles
from tests.experts.moe.traces import make_trace


def a_checkpoint(folder: Path, fill: float = 0.0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": torch.full((300, 300), fill)}, folder / "model.safetensors")
    return folder


def a_trace(experts: tuple[int, ...], task: str = "licence", prompts: int = 2) -> Trace:
    """Return a trace of one layer, one expert a token, with `experts` in each of the prompts."""
    index = torch.tensor(experts * prompts)[:, None, None]
    tokens = torch.arange(len(index), dtype=torch.int32)
    start, tasks = torch.arange(prompts + 1) * len(experts), torch.zeros(prompts, dtype=torch.int16)
    return make_trace(index, 4, token=tokens, start=start, task=tasks, tasks=(task,))


def test_parts_of_other_weights_are_refused(tmp_path: Path):
    first = PreparedFiles(a_checkpoint(tmp_path))
    first.save(POPULARITY, {"popularity": torch.ones(1, 4)})
    second = PreparedFiles(a_checkpoint(tmp_path, fill=1.0))
    assert second.stamp != first.stamp
    assert not second.has(POPULARITY)
    with pytest.raises(ModelError, match="made from other weights"):
        second.load(POPULARITY)


def test_a_broken_part_says_what_to_do(tmp_path: Path):
    prepared = PreparedFiles(a_checkpoint(tmp_path))
    prepared.folder.mkdir()
    prepared.path("duoserve").write_bytes(b"half")
    assert not prepared.has("duoserve")
    with pytest.raises(ModelError, match="make it again with `coserve moe fit"):
        prepared.load("duoserve")


def test_popularity_is_the_share_of_a_layers_tokens(tmp_path: Path):
    of_prompts = {"start": torch.tensor([0, 4, 5]), "task": torch.tensor([0, 1]), "tasks": ("licence", "python")}
    trace = replace(a_trace((0, 0, 0, 1, 2), prompts=1), **of_prompts)
    assert popularity(trace).tolist() == [pytest.approx([0.6, 0.2, 0.2, 0.0])]
    assert popularity_by_task(trace)[:, 0].tolist() == [pytest.approx([0.75, 0.25, 0, 0]), pytest.approx([0, 0, 1, 0])]
    prepared = PreparedFiles(a_checkpoint(tmp_path))
    save_popularity(prepared, trace)
    assert torch.equal(load_popularity(prepared), popularity(trace))
