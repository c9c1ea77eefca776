"""The baselines on a tiny model: what they answer, what they load, what they predict."""

import pytest

pytest.importorskip("transformers", reason="language models need the extra `moe`: pip install 'coserve[moe]'")

import torch

from experts.moe.errors import ModelError
from experts.moe.gating import Routing
from experts.moe.model.mode import Mode
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes import open_mode
from experts.moe.modes.lookahead import Lookahead
from experts.moe.trace import Trace, save_popularity
from experts.moe.weights.prepared import PreparedFiles
from tests.experts.moe.tiny import load_unmodified, prompts, write_tiny

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
LAYERS, EXPERTS, TOP_K = 3, 8, 2
LOSSLESS = ["resident", "ondemand", "lookahead", "popularity"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    folder = write_tiny(tmp_path_factory.mktemp("models") / "mixtral", "mixtral")
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, EXPERTS, (50, LAYERS, TOP_K), generator=generator) // 2  # 0 to 3 are the popular ones
    trace = Trace(
        index=index,
        weight=torch.ones(index.shape),
        token=torch.zeros(50, dtype=torch.int32),
        decode=torch.ones(50, dtype=torch.bool),
        start=torch.tensor([0, 50]),
        task=torch.zeros(1, dtype=torch.int16),
        tasks=("text",),
        experts=EXPERTS,
    )
    save_popularity(PreparedFiles(folder), trace)
    return folder


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return load_unmodified(checkpoint)


def a_runtime(checkpoint, mode: str | Mode, slots: int, device: str = "cpu") -> MoeRuntime:
    """`slots` for each layer."""
    made = open_mode(mode, checkpoint) if isinstance(mode, str) else mode
    expert_bytes = 3 * 32 * 24 * 4
    return MoeRuntime.open(checkpoint, made, slots * LAYERS * expert_bytes, device=device)


@pytest.mark.parametrize("mode", LOSSLESS)
def test_lossless_baselines_generate_what_the_unmodified_model_does(checkpoint, oracle, mode: str):
    runtime = a_runtime(checkpoint, mode, EXPERTS if mode == "resident" else 3)
    given = prompts(3)
    with torch.inference_mode():
        texts = [one.generate(**given, max_new_tokens=8, do_sample=False) for one in (runtime.model, oracle)]
        assert torch.equal(runtime.model(**given).logits, oracle(**given).logits)
    assert torch.equal(*texts)
    runtime.cache.check()
    runtime.close()


def test_a_mode_is_opened_by_the_name_that_it_has(checkpoint):
    for name in (*LOSSLESS, "prune"):
        mode = open_mode(name, checkpoint)
        assert (mode.name, mode.lossless) == (name, name != "prune")


def test_a_mode_that_is_not_known_is_named_with_the_nearest_one(checkpoint):
    with pytest.raises(ModelError, match="did you mean lookahead"):
        open_mode("look-ahead", checkpoint)


def test_a_mode_whose_preparation_is_missing_names_the_command(tmp_path):
    folder = write_tiny(tmp_path / "bare", "mixtral")
    with pytest.raises(ModelError, match="coserve moe trace"):
        open_mode("popularity", folder)


def test_resident_loads_everything_before_the_first_token_and_never_again(checkpoint):
    runtime = a_runtime(checkpoint, "resident", EXPERTS)
    runtime.model.generate(**prompts(1), max_new_tokens=6, do_sample=False)
    counts = runtime.cache.metrics.counts
    assert (counts.fetches_startup, counts.fetches, counts.misses) == (LAYERS * EXPERTS, 0, 0)
    with pytest.raises(ModelError, match="keeps all experts in memory"):
        runtime.mode.resize(5 * LAYERS * runtime.store.expert_bytes)
    runtime.close()


def test_resident_with_too_little_memory_is_refused(checkpoint):
    with pytest.raises(ModelError, match="raise the model's budget or choose another mode"):
        a_runtime(checkpoint, "resident", EXPERTS - 1)


def test_on_demand_waits_for_every_fetch(checkpoint):
    runtime = a_runtime(checkpoint, "ondemand", 3)
    runtime.model.generate(**prompts(1), max_new_tokens=8, do_sample=False)
    counts = runtime.cache.metrics.counts
    assert counts.blocking == counts.fetches == counts.misses > 0
    assert counts.overlapped == counts.fetches_prefetch == 0
    assert counts.wait_s > 0
    runtime.close()


class InTime(Lookahead):
    """Its prefetches are there before the gate speaks, however late the loader's thread is."""

    def route(self, routing: Routing) -> Routing:
        self.cache.quiesce()
        return super().route(routing)


def test_lookahead_counts_its_predictions_and_prefetches_what_it_predicts(checkpoint):
    runtime = a_runtime(checkpoint, InTime(), 4)
    asked = runtime.model.generate(**prompts(1), max_new_tokens=9, do_sample=False)
    counts, hits = runtime.cache.metrics.counts, runtime.cache.metrics.predictions.total()
    tokens = asked.shape[1] - 1  # the last one is not run
    assert hits.tokens == (LAYERS - 1) * tokens
    assert 0 < hits.all_hit <= hits.any_hit <= hits.tokens
    assert runtime.cache.metrics.predictions.of_layer[0].tokens == 0
    assert counts.fetches_prefetch > 0
    runtime.close()


class AsksItself(Lookahead):
    """Predicts a layer by its own gate, when that has spoken."""

    def route(self, routing: Routing) -> Routing:
        logits = self.gates[routing.layer](routing.hidden)
        assert torch.equal(logits, routing.logits)
        self.cache.metrics.predictions.predict(routing.layer, logits.topk(TOP_K).indices)
        self.cache.metrics.predictions.check(routing)
        return routing


def test_a_gate_asked_twice_about_its_own_layer_predicts_it_without_a_miss(checkpoint):
    runtime = a_runtime(checkpoint, AsksItself(), 4)
    runtime.model.generate(**prompts(3), max_new_tokens=4, do_sample=False)
    total = runtime.cache.metrics.predictions.total()
    assert total.tokens > 0
    assert total.all_rate == total.any_rate == total.recall == 1.0
    runtime.close()


def test_popularity_keeps_the_popular_and_predicts_them_for_everybody(checkpoint):
    runtime = a_runtime(checkpoint, "popularity", 3)
    before = [runtime.cache.resident(layer) for layer in range(LAYERS)]
    assert sum(len(experts) for experts in before) == 3 * LAYERS - 1  # one slot is for the others
    runtime.model.generate(**prompts(1), max_new_tokens=8, do_sample=False)
    after = [runtime.cache.resident(layer) for layer in range(LAYERS)]
    assert all(set(kept) <= set(now) for kept, now in zip(before, after, strict=True))
    assert runtime.cache.metrics.predictions.total().tokens > 0
    runtime.close()


def test_pruning_runs_with_the_popular_only_and_never_loads(checkpoint):
    runtime = a_runtime(checkpoint, "prune", 4)
    seen = []
    runtime.observers.append(lambda _, gate, done: seen.append((gate, done)))
    runtime.model.generate(**prompts(3), max_new_tokens=8, do_sample=False)
    counts = runtime.cache.metrics.counts
    assert (counts.fetches_startup, counts.fetches, counts.misses) == (4 * LAYERS, 0, 0)
    for gate, done in seen:
        here = runtime.cache.resident(gate.layer)
        assert set(done.wanted()) <= set(here)
        assert not set(here) - set(range(EXPERTS))
        assert torch.allclose(done.weight.sum(-1), torch.ones(len(done.weight)))
    runtime.close()


def test_pruning_nothing_is_the_unmodified_model(checkpoint, oracle):
    runtime = a_runtime(checkpoint, "prune", EXPERTS)
    given = prompts(3)
    with torch.inference_mode():
        assert torch.equal(runtime.model(**given).logits, oracle(**given).logits)
    runtime.close()


def test_pruning_follows_the_budget_while_serving(checkpoint, oracle):
    runtime = a_runtime(checkpoint, "prune", 4)
    expert_bytes = runtime.store.expert_bytes
    runtime.model(**prompts(1))
    runtime.mode.resize(2 * LAYERS * expert_bytes)
    assert [len(runtime.cache.resident(layer)) for layer in range(LAYERS)] == [2, 2, 2]
    runtime.model(**prompts(1))
    runtime.mode.resize(EXPERTS * LAYERS * expert_bytes)
    runtime.cache.quiesce()
    with torch.inference_mode():
        assert torch.equal(runtime.model(**prompts(1)).logits, oracle(**prompts(1)).logits)
    with pytest.raises(ModelError, match="mode prune needs at least"):
        runtime.mode.resize(LAYERS * expert_bytes)
    runtime.close()


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_gpu)])
@pytest.mark.parametrize("mode", ["ondemand", "lookahead", "popularity"])
def test_on_a_gpu_lossless_baselines_give_what_resident_gives_there(checkpoint, mode: str, device: str):
    given = {name: tensor.to(device) for name, tensor in prompts(3).items()}
    answers = []
    for name, slots in (("resident", EXPERTS), (mode, 3)):
        runtime = a_runtime(checkpoint, name, slots, device)
        with torch.inference_mode():
            answers.append(runtime.model.generate(**given, max_new_tokens=8, do_sample=False))
            answers.append(runtime.model(**given).logits)
        torch.cuda.synchronize()
        runtime.cache.check()
        runtime.close()
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[3])
