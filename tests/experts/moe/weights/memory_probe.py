"""Run as a program: open a checkpoint one way, write some tokens, and say in JSON what that added to memory.

Ways: `runtime` (on demand, experts within a budget), `from_pretrained`, and `mmap` (dense tensors and experts are views
of the mapped file, as weights on disk are commonly served).
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Probe:
    """Bytes above what the process had after its imports; seconds to open the model; the tokens written."""

    way: str
    peak_bytes: int
    open_s: float
    text: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.way} +{self.peak_bytes / MB:.0f} MB resident, open in {self.open_s:.2f} s"


def measure(way: str, folder: Path, budget_bytes: int = 0) -> Probe:
    """In a process of its own."""
    command = [sys.executable, "-m", "tests.experts.moe.weights.memory_probe", way, str(folder), str(budget_bytes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    return Probe(way, found["peak_bytes"], found["open_s"], tuple(found["text"]))


def _resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _open(way: str, folder: Path, budget_bytes: int):
    from experts.moe.model.runtime import MoeRuntime
    from experts.moe.modes import open_mode
    from tests.experts.moe.tiny import load_unmodified

    if way == "runtime":
        return MoeRuntime.open(folder, open_mode("ondemand", folder), budget_bytes).model
    if way == "from_pretrained":
        return load_unmodified(folder)
    return _mapped(folder)


def _mapped(folder: Path):
    """The model on `meta`, each parameter a view of the mapped file; fused layout only."""
    from safetensors import safe_open

    from experts.moe.model.runtime import read_model
    from experts.moe.weights.checkpoint import rebuild_buffers

    model, _, checkpoint = read_model(folder)
    opened = {tensor.file: safe_open(tensor.file, framework="pt") for tensor in checkpoint.tensors.values()}
    state = {name: opened[each.file].get_tensor(each.stored) for name, each in checkpoint.tensors.items()}
    model.load_state_dict(state, assign=True)
    rebuild_buffers(model, "cpu")
    return model


def main(way: str, folder: Path, budget_bytes: int) -> None:
    import torch

    from experts.moe.library import transformers
    from experts.moe.modes import open_mode  # noqa: F401 — imports do not count

    transformers().MixtralForCausalLM  # noqa: B018 — nor does the model's module
    transformers().MixtralForCausalLM(transformers().MixtralConfig(**_SMALL))(torch.zeros(1, 4, dtype=torch.long))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = _resident("VmRSS")
    begin = time.monotonic()
    model = _open(way, folder, budget_bytes)
    open_s = time.monotonic() - begin
    ids = torch.arange(2, 18).unsqueeze(0)
    text = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    report = {"peak_bytes": _resident("VmHWM") - before, "open_s": open_s, "text": text[0].tolist()}
    print(json.dumps(report))
    sys.stdout.flush()


_SMALL = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
_SMALL |= {"num_key_value_heads": 1, "num_local_experts": 2}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
