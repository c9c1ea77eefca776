"""What a model takes in memory, measured in a process of its own; the figures are printed (pytest -s).

`tests/moe/fixture_resident_memory.py` compares a checkpoint of 800 MB with other ways to open it.
"""

from tests.experts.moe.tiny import write_tiny
from tests.experts.moe.weights.memory_probe import MB, measure


def test_a_model_takes_its_slots_and_little_more_while_it_writes(tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_local_experts": 16}
    write_tiny(tmp_path, initializer_range=0.02, **shape)
    size = (tmp_path / "model.safetensors").stat().st_size
    budget_bytes = 8 * 3 * 256 * 512 * 4
    found = measure("runtime", tmp_path, budget_bytes)
    print(f"\ncheckpoint {size / MB:.0f} MB, budget {budget_bytes / MB:.0f} MB: {found}")
    assert found.peak_bytes < budget_bytes + 25 * MB < size / 2
