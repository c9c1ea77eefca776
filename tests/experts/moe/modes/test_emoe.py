"""eMoE on a tiny random model: loads between periods only, next-ranked experts for absent ones, and its fits."""

import pytest
import torch

from experts.moe.gating import StepRow
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes.emoe.fitting import (
    SENSITIVITY,
    EmoeRecipe,
    fit_predictor,
    load_sensitivity,
    measure_sensitivity,
    save_predictor,
)
from experts.moe.modes.emoe.mode import Emoe, EmoeOptions
from experts.moe.weights.prepared import PreparedFiles
from tests.experts.moe.tiny import fail_amid_each_layer, load_unmodified, write_tiny
from tests.experts.moe.traces import take_tiny_trace

SMALL = EmoeRecipe(history=3, ahead=2, width=16, blocks=1, steps=12, batch=8)
TASKS = ("even", "odd")
LAYERS, EXPERTS, TOP_K = 3, 8, 2
EXPERT_BYTES = 3 * 24 * 32 * 4


def a_text(task, number, tokens=12):
    """Return even tokens for one task and odd ones for the other, so that their routing differs."""
    generator = torch.Generator().manual_seed(number)
    return 2 + 2 * torch.randint(0, 45, (1, tokens), generator=generator) + TASKS.index(task)


def open_runtime(folder, mode, slots=LAYERS * EXPERTS):
    return MoeRuntime.open(folder, mode, slots * EXPERT_BYTES)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Return a checkpoint with a predictor and with sensitivity."""
    folder = write_tiny(tmp_path_factory.mktemp("emoe") / "tiny")
    ids = {task: torch.cat([a_text(task, number)[0] for number in range(12)]) for task in TASKS}
    prepared, trace = PreparedFiles(folder), take_tiny_trace(folder, ids, 12)
    save_predictor(prepared, fit_predictor(trace, SMALL), trace, SMALL)
    windows = {task: torch.cat([a_text(task, 1), a_text(task, 2)]) for task in TASKS}
    measure_sensitivity(prepared, windows, lambda *_: None)
    return folder


def run_prompt(runtime, task, number, tokens=12):
    with torch.no_grad(), runtime.step([StepRow(f"{task}-{number}", task, tokens)]):
        return runtime.model(a_text(task, number, tokens)).logits


def emoe(folder, **options):
    return Emoe(PreparedFiles(folder), EmoeOptions(**options))


def resident(runtime):
    return [runtime.cache.resident(layer) for layer in range(LAYERS)]


def test_with_all_experts_the_answer_is_the_unmodified_models_also_after_failed_steps(fitted):
    runtime = open_runtime(fitted, emoe(fitted, period=2))
    fail_amid_each_layer(runtime, lambda: run_prompt(runtime, "odd", 1))
    for number in range(3):
        assert torch.equal(run_prompt(runtime, "even", number), load_unmodified(fitted)(a_text("even", number)).logits)


@pytest.mark.parametrize("variant", ["all", "layer"])
def test_experts_change_with_the_period_and_never_in_between(fitted, variant):
    runtime = open_runtime(fitted, emoe(fitted, period=4, variant=variant), slots=9)
    changed = []
    for number in range(12):
        before = resident(runtime)
        run_prompt(runtime, TASKS[number // 6], number)
        runtime.cache.quiesce()
        runtime.cache.check()
        if resident(runtime) != before:
            changed.append(number)
    assert changed
    assert set(changed) <= {4, 8}


def test_only_experts_that_are_there_run_and_a_token_takes_its_next_ranked(fitted):
    runtime = open_runtime(fitted, emoe(fitted, period=100), slots=9)
    residents = resident(runtime)
    seen = []
    runtime.observers.append(lambda _step, gate, done: seen.append((gate, done)))
    run_prompt(runtime, "even", 1)
    for gate, done in seen:
        allowed = residents[gate.layer]
        ranking = gate.logits.argsort(-1, descending=True)
        expected = [[expert for expert in row if expert in allowed][:TOP_K] for row in ranking.tolist()]
        assert done.index.tolist() == expected
        assert torch.allclose(done.weight.sum(-1), torch.ones(len(done.weight)))


def test_decoding_loads_nothing_and_waits_for_nothing(fitted):
    runtime = open_runtime(fitted, emoe(fitted, period=1), slots=9)
    run_prompt(runtime, "even", 1)
    with torch.inference_mode(), runtime.step([StepRow("odd-2", "odd", 12)]):
        past = runtime.model(a_text("odd", 2), use_cache=True).past_key_values
    runtime.cache.quiesce()
    before = runtime.cache.counts.copy()
    for _ in range(4):
        with torch.inference_mode(), runtime.step([StepRow("odd-2", "odd", 1)]):
            runtime.model(torch.tensor([[5]]), past_key_values=past, use_cache=True)
    spent = runtime.cache.counts - before
    assert spent.fetches == 0
    assert spent.served == spent.hits > 0


def test_a_layer_is_as_sensitive_as_its_wrong_routing_costs(fitted):
    prepared = PreparedFiles(fitted)
    measured = load_sensitivity(prepared)
    assert [len(measured[task]) for task in TASKS] == [LAYERS, LAYERS]
    stored = prepared.load(SENSITIVITY)[1] | {"accuracy": {"a": {"": 0.8, "0": 0.2, "1": 0.76, "2": 0.9}}}
    other = PreparedFiles(write_tiny(fitted / "other", seed=1))
    other.save(SENSITIVITY, {}, stored)
    assert load_sensitivity(other)["a"] == pytest.approx((0.75, 0.05, 0.01))
