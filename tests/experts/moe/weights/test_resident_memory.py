"""Resident memory of a model in service, measured in a process of its own; the figures are printed (pytest -s)."""

import subprocess
import sys

import pytest

from tests import ROOT
from tests.experts.moe.tiny import write_tiny

MB = 1 << 20
#: Writes some tokens; prints the bytes that this added to the memory of the process after its imports.
PROBE = """
import sys, torch
from pathlib import Path
from experts.moe.library import transformers
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes import open_mode

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

small = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_local_experts=2)
config = transformers().MixtralConfig(num_attention_heads=1, num_key_value_heads=1, **small)
transformers().MixtralForCausalLM(config)(torch.zeros(1, 4, dtype=torch.long))
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
model = MoeRuntime.open(Path(sys.argv[1]), open_mode("ondemand", Path(sys.argv[1])), int(sys.argv[2])).model
ids = torch.arange(2, 18).unsqueeze(0)
model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
print(resident("VmHWM") - before)
"""


@pytest.mark.test_all
def test_a_model_takes_its_slots_and_little_more_while_it_writes(tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_local_experts": 16}
    write_tiny(tmp_path, initializer_range=0.02, **shape)
    size = (tmp_path / "model.safetensors").stat().st_size
    budget_bytes = 8 * 3 * 256 * 512 * 4
    command = [sys.executable, "-c", PROBE, str(tmp_path), str(budget_bytes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280, cwd=ROOT)
    peak_bytes = int(done.stdout.splitlines()[-1])
    print(f"\ncheckpoint {size / MB:.0f} MB, budget {budget_bytes / MB:.0f} MB: +{peak_bytes / MB:.0f} MB resident")
    assert peak_bytes < budget_bytes + 25 * MB < size / 2
