"""The baselines on a tiny model: their answers and their loads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from experts.moe.errors import ModelError
from experts.moe.gating import Routing
from experts.moe.model.mode import Mode
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes import open_mode
from experts.moe.modes.baselines import Lookahead
from experts.moe.trace import save_popularity
from experts.moe.weights.prepared import PreparedFiles
from tests.experts.moe.tiny import load_unmodified, prompts, write_tiny
from tests.experts.moe.traces import make_trace, open_with_slots

LAYERS, EXPERTS, TOP_K = 3, 8, 2
LOSSLESS = ["resident", "ondemand", "lookahead", "popularity"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("models") / "mixtral", "mixtral")
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, EXPERTS, (50, LAYERS, TOP_K), generator=generator) // 2  # 0 to 3 are the popular ones
    save_popularity(PreparedFiles(folder), make_trace(index))
    return folder


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return load_unmodified(checkpoint)


def a_runtime(checkpoint: Path, mode: str | Mode, slots: int) -> MoeRuntime:
    opened = open_mode(mode, checkpoint) if isinstance(mode, str) else mode
    return open_with_slots(checkpoint, opened, slots)


def generate(runtime: MoeRuntime, batch: int = 1, tokens: int = 8) -> torch.Tensor:
    return runtime.model.generate(**prompts(batch), max_new_tokens=tokens, do_sample=False)


@pytest.mark.parametrize("mode", LOSSLESS)
def test_lossless_baselines_generate_what_the_unmodified_model_does(checkpoint: Path, oracle: Any, mode: str):
    runtime = a_runtime(checkpoint, mode, EXPERTS if mode == "resident" else 3)
    with torch.inference_mode():
        expected = oracle.generate(**prompts(3), max_new_tokens=8, do_sample=False)
        assert torch.equal(generate(runtime, 3), expected)
        assert torch.equal(runtime.model(**prompts(3)).logits, oracle(**prompts(3)).logits)
    runtime.cache.check()


def test_resident_loads_everything_before_the_first_token_and_never_again(checkpoint: Path):
    runtime = a_runtime(checkpoint, "resident", EXPERTS)
    generate(runtime)
    counts = runtime.cache.counts
    assert (counts.bytes_moved // runtime.store.expert_bytes, counts.fetches) == (LAYERS * EXPERTS, 0)
    assert counts.hits == counts.served
    with pytest.raises(ModelError, match="keeps 24 experts"):
        runtime.mode.resize(5 * LAYERS * runtime.store.expert_bytes)
    with pytest.raises(ModelError, match=r"give at least .* or choose another mode"):
        a_runtime(checkpoint, "resident", EXPERTS - 1)


def test_on_demand_waits_for_every_fetch(checkpoint: Path):
    runtime = a_runtime(checkpoint, "ondemand", 3)
    generate(runtime)
    counts = runtime.cache.counts
    assert counts.blocking == counts.fetches == counts.served - counts.hits > 0
    assert counts.overlapped == counts.fetches_prefetch == 0
    assert counts.wait_s > 0


class InTime(Lookahead):
    """Waits for its prefetches before the gate speaks, however late the loader's thread is."""

    def route(self, routing: Routing) -> Routing:
        self.cache.quiesce()
        return super().route(routing)


def test_lookahead_prefetches_what_the_next_gate_will_choose(checkpoint: Path):
    runtime = a_runtime(checkpoint, InTime(), 4)
    generate(runtime, tokens=9)
    counts = runtime.cache.counts
    assert counts.fetches_prefetch > 0
    assert counts.overlapped > 0


def test_popularity_keeps_the_popular_experts(checkpoint: Path):
    runtime = a_runtime(checkpoint, "popularity", 3)
    before = [runtime.cache.resident(layer) for layer in range(LAYERS)]
    assert sum(len(experts) for experts in before) == 3 * LAYERS - 1  # one slot is for the others
    generate(runtime)
    after = [runtime.cache.resident(layer) for layer in range(LAYERS)]
    assert all(set(popular) <= set(now) for popular, now in zip(before, after, strict=True))


def test_pruning_runs_with_the_popular_experts_only_and_never_loads(checkpoint: Path):
    runtime = a_runtime(checkpoint, "prune", 4)
    routings: list[Routing] = []
    runtime.observers.append(lambda _step, _gate, done: routings.append(done))
    generate(runtime, 3)
    counts = runtime.cache.counts
    assert (counts.bytes_moved // runtime.store.expert_bytes, counts.fetches) == (4 * LAYERS, 0)
    assert counts.hits == counts.served
    for routing in routings:
        assert set(routing.distinct_experts()) <= set(runtime.cache.resident(routing.layer))
        assert torch.allclose(routing.weight.sum(-1), torch.ones(len(routing.weight)))
