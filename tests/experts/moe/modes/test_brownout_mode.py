"""The mode brownout on a tiny random model, and the distillation of its united experts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experts.moe.cache.weight_transfer import WeightTransfer
from experts.moe.errors import ModelError
from experts.moe.model.mode import Mode
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes.brownout import mode as brownout
from experts.moe.modes.brownout.mode import Brownout, BrownoutOptions
from experts.moe.modes.brownout.united import DistillRecipe
from experts.moe.policy.brownout import INTERVAL_S
from tests.experts.moe.accesses import Accesses
from tests.experts.moe.tiny import load_unmodified, prompts, write_tiny
from tests.experts.moe.traces import take_tiny_trace
from tools.moe.unite import unite_all

RECIPE = DistillRecipe(tokens=512, steps=60, batch=64)
PLENTY = 1 << 22


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of 3 layers of 8 experts, a trace of random text, and united experts of 2 and 4."""
    folder = write_tiny(tmp_path_factory.mktemp("brownout"))
    take_tiny_trace(folder, {"text": prompts(1, 512)["input_ids"][0]}, 32)
    unite_all(folder, (2, 4), RECIPE)
    return folder


def a_runtime(folder: Path, mode: Mode, budget_bytes: int = PLENTY) -> MoeRuntime:
    return MoeRuntime.open(folder, mode, budget_bytes)


def a_mode(folder: Path, way: int = 4, **options: Any) -> Brownout:
    return Brownout.open(folder, BrownoutOptions.model_validate({"way": way, **options}))


@torch.no_grad()
def logits(folder: Path, mode: Mode, accesses: Accesses, **inputs: torch.Tensor) -> torch.Tensor:
    runtime = a_runtime(folder, mode)
    runtime.observers.append(accesses)
    return runtime.model(**(inputs or prompts(3, 24))).logits


@pytest.mark.parametrize("way", [0, 2, 4])
def test_threshold_1_changes_no_bit(tiny: Path, way: int):
    inputs = prompts(3, 24)
    expected = load_unmodified(tiny)(**inputs).logits
    accesses = Accesses(8)
    assert torch.equal(logits(tiny, a_mode(tiny, way), accesses, **inputs), expected)
    assert (accesses.share, accesses.united) == (1.0, 0)


def test_below_1_fewer_experts_run_and_full_brownout_drops_what_partial_brownout_unites(tiny: Path):
    partial, full = Accesses(8), Accesses(8)
    exact = logits(tiny, Mode(), Accesses(8))
    near, far = logits(tiny, a_mode(tiny, threshold=0.5), partial), logits(tiny, a_mode(tiny, 0, threshold=0.5), full)
    assert 0 < partial.united <= 0.5 * partial.choices
    assert (partial.choices, partial.dropped) == (3 * 24 * 2 * 3, 0)
    assert full.dropped > 0
    assert full.share < partial.share < 1.0
    assert not torch.equal(near, exact)
    assert not torch.equal(near, far)


def test_the_threshold_follows_the_observed_latencies(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(brownout, "time", SimpleNamespace(monotonic=lambda: now))
    mode = a_mode(tiny, ttft_slo_ms=200, tpot_slo_ms=100)
    runtime = a_runtime(tiny, mode)
    runtime.model(**prompts())
    mode.observe("prefill", 0.3)
    mode.observe("decode", 0.09)
    now = INTERVAL_S
    runtime.model(**prompts())
    assert mode.thresholds == {"prefill": 0.8, "decode": 1.0}


def test_united_experts_count_in_the_budget(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    mode = a_mode(tiny)
    expert_bytes = 3 * 32 * 24 * 4
    assert mode.reserved_bytes == 3 * 2 * expert_bytes
    allocated: list[int] = []
    allocate = WeightTransfer.allocate
    monkeypatch.setattr(WeightTransfer, "allocate", lambda transfer: allocated.append(1) or allocate(transfer))
    runtime = a_runtime(tiny, mode, 12 * expert_bytes)
    assert runtime.cache.allocated_bytes == len(allocated) * expert_bytes == 6 * expert_bytes
    runtime.model(**prompts(3, 24))
    mode.resize(8 * expert_bytes)
    assert runtime.cache.allocated_bytes == 2 * expert_bytes
    runtime.model(**prompts(3, 24))
    with pytest.raises(ModelError, match="bytes of its own in memory"):
        mode.resize(6 * expert_bytes)
