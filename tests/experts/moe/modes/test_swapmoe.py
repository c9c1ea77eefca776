"""SwapMoE on a tiny model: a masked gate, importance from before the mask, swaps without waiting, a moving budget."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from experts.moe.errors import ModelError
from experts.moe.gating import ForwardStep, Routing
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes.swapmoe.mode import SwapMoe, SwapMoeOptions, expert_norms, importance
from experts.moe.modes.swapmoe.planner import MemoryPlan, Preparation
from tests.experts.moe.tiny import fail_amid_each_layer, load_unmodified, prompts, write_tiny

LAYERS, EXPERTS, TOP_K = 3, 8, 2
EXPERT_BYTES = 3 * 24 * 32 * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("swapmoe") / "mixtral")


def serving(checkpoint: Path, slots: int, mode: SwapMoe | None = None):
    return closing(MoeRuntime.open(checkpoint, mode or SwapMoe(), slots * EXPERT_BYTES))


def run_prompt(runtime: MoeRuntime, seed: int, tokens: int = 9) -> torch.Tensor:
    """Return the logits of one prompt, after its swaps have ended."""
    with torch.no_grad():
        logits = runtime.model(**prompts(1, tokens, seed=seed)).logits
    runtime.cache.quiesce()
    runtime.cache.check()
    return logits


def test_with_all_experts_the_answer_is_the_unmodified_models_also_after_failed_steps(checkpoint: Path):
    with serving(checkpoint, LAYERS * EXPERTS) as runtime, torch.no_grad():
        fail_amid_each_layer(runtime, lambda: run_prompt(runtime, 2))
        assert torch.equal(run_prompt(runtime, 1), load_unmodified(checkpoint)(**prompts(1, 9, seed=1)).logits)


def test_only_resident_experts_compute_and_nothing_is_waited_for(checkpoint: Path):
    carried_out: list[tuple[ForwardStep, Routing]] = []
    with serving(checkpoint, LAYERS * 4, SwapMoe(options=SwapMoeOptions(period=1))) as runtime:

        def watch(step: ForwardStep, _gate: Routing, done: Routing) -> None:
            assert set(done.distinct_experts()) <= set(runtime.cache.resident(done.layer))
            carried_out.append((step, done))

        runtime.observers.append(watch)
        before = [runtime.cache.resident(layer) for layer in range(LAYERS)]
        for seed in range(8):
            run_prompt(runtime, seed)
        counts = runtime.cache.counts
        assert len(carried_out) == 8 * LAYERS
        assert [runtime.cache.resident(layer) for layer in range(LAYERS)] != before, "experts were swapped"
        assert (counts.blocking, counts.fetches_demand, counts.wait_s) == (0, 0, 0.0)
        assert counts.hits == counts.served
        assert counts.fetches_prefetch > 0
        assert all((done.index < EXPERTS).all() for _, done in carried_out), "every token got its k experts"


def test_absent_experts_that_the_gate_wants_are_loaded(checkpoint: Path):
    """The importance of absent experts is seen because it is taken before masking."""
    demand = torch.zeros(LAYERS, EXPERTS)
    with serving(
        checkpoint, LAYERS * 4, SwapMoe(options=SwapMoeOptions(period=1, prior_tokens=0, window=1e6))
    ) as runtime:
        runtime.observers.append(lambda _s, gate, _d: demand[gate.layer].add_(importance(gate, torch.ones(EXPERTS))))
        norms = expert_norms(runtime.store)
        for seed in range(4):
            run_prompt(runtime, seed, tokens=40)
        for layer in range(LAYERS):
            best = (demand * norms)[layer].topk(3).indices.tolist()
            assert set(best) <= set(runtime.cache.resident(layer))


def test_less_than_top_k_experts_in_each_layer_is_an_error_and_serving_goes_on(checkpoint: Path):
    with pytest.raises(ModelError, match="at least"):
        MoeRuntime.open(checkpoint, SwapMoe(), LAYERS * TOP_K * EXPERT_BYTES)
    with serving(checkpoint, LAYERS * TOP_K + 1) as runtime:
        with pytest.raises(ModelError, match="give at least"):
            runtime.mode.resize(LAYERS * TOP_K * EXPERT_BYTES)
        run_prompt(runtime, 0)


def test_a_plan_gives_each_layer_its_experts_and_another_budget_the_same_proportions(checkpoint: Path):
    plans = (MemoryPlan(12 * EXPERT_BYTES, (6, 2, 4), 3),)
    with serving(checkpoint, 7) as runtime:
        norms = expert_norms(runtime.store)
    mode = SwapMoe(Preparation(norms, norms, plans))
    with serving(checkpoint, 13, mode) as runtime:
        assert [len(runtime.cache.resident(layer)) for layer in range(LAYERS)] == [6, 2, 4]
        runtime.mode.resize(16 * EXPERT_BYTES)
        for seed in range(9):
            run_prompt(runtime, seed)
        more = [len(runtime.cache.resident(layer)) - planned for layer, planned in enumerate((8, 2, 5))]
        assert sum(more) == max(more) == 1, "one has the slot for swaps"
