"""Resident memory and time to open a checkpoint of 800 MB: by the runtime, mapped, and by from_pretrained."""

import pytest

from tests.experts.moe.tiny import write_tiny
from tests.experts.moe.weights.memory_probe import MB, measure

pytestmark = pytest.mark.timeout(900)

_SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_local_experts": 16,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "initializer_range": 0.02,
}


def test_the_runtime_takes_a_fraction_of_what_other_ways_take(tmp_path):
    single = write_tiny(tmp_path / "single", **_SHAPE)
    fused = write_tiny(tmp_path / "fused", layout="fused", **_SHAPE)
    size = (fused / "model.safetensors").stat().st_size
    budget_bytes = 8 * 3 * 512 * 1024 * 4
    print(f"\ncheckpoint {size / MB:.0f} MB, budget of the runtime {budget_bytes / MB:.0f} MB")
    peaks, texts = {}, set()
    for way, folder in (("runtime", single), ("mmap", fused), ("from_pretrained", fused), ("from_pretrained", single)):
        probe = measure(way, folder, budget_bytes)
        print(f"  {folder.name:6} {probe}")
        peaks[way, folder.name] = probe.peak_bytes
        texts.add(probe.text)
    ours = peaks.pop(("runtime", "single"))
    assert len(texts) == 1
    assert ours < budget_bytes + 60 * MB
    assert ours < 0.5 * min(peaks.values())
    assert ours < 0.1 * peaks["from_pretrained", "single"]
