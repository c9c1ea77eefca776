"""DuoServe on tiny random models: the answers of the unmodified model, and what is fetched when."""

from functools import partial

import pytest
import torch

from experts.moe.errors import ModelError
from experts.moe.gating import StepRow
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes import open_mode
from experts.moe.modes.duoserve.fitting import (
    DuoServeRecipe,
    fit_layer,
    load_predictors,
    paths_of,
    save_layer,
    states_of,
)
from experts.moe.modes.duoserve.mode import DuoServe
from experts.moe.modes.duoserve.predictor import Predictor
from experts.moe.modes.duoserve.state import known
from experts.moe.modes.resident import Resident
from experts.moe.statistics import popularity
from experts.moe.trace import Trace, load_trace, save_popularity, save_trace
from experts.moe.weights.prepared import TRAIN, PreparedFiles
from tests.experts.moe.tiny import fail_amid_each_layer, load_unmodified, prompts, write_tiny

FAMILIES = ("mixtral", "qwen2_moe", "olmoe")
SMALL = DuoServeRecipe(widths=(32, 16), tokens=800, batch=64)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("duoserve")
    return {family: prepare(write_tiny(root / family, family)) for family in FAMILIES}


def prepare(folder):
    """Trace a random model on random text and fit on it."""
    prepared = PreparedFiles(folder)
    trace = take_trace(folder)
    save_trace(prepared, TRAIN, trace)
    save_popularity(prepared, trace)
    for layer in range(1, trace.layers):
        save_layer(prepared, layer, fit_layer(trace, layer, SMALL, lambda *_: None), trace, SMALL)
    return folder


def take_trace(folder):
    runtime = open_runtime(folder, Resident())
    seen = []
    runtime.observers.append(lambda _step, gate, _done: seen.append((gate.index, gate.weight)))
    with torch.no_grad():
        runtime.model(prompts(4, 48)["input_ids"])
    runtime.close()
    index, weight = (torch.stack([one[part] for one in seen], 1) for part in (0, 1))
    tokens = len(index)
    return Trace(
        index=index.to(torch.int16),
        weight=weight.to(torch.float16),
        token=torch.zeros(tokens, dtype=torch.int32),
        decode=torch.ones(tokens, dtype=torch.bool),
        start=torch.tensor([0, tokens]),
        task=torch.zeros(1, dtype=torch.int16),
        tasks=("random",),
        experts=runtime.arch.experts,
    )


def open_runtime(folder, mode, slots=8):
    """With this many slots for each layer."""
    from experts.moe.arch import load_config, read_arch

    arch = read_arch(folder, load_config(folder), torch.float32)
    return MoeRuntime.open(folder, mode, slots * arch.layers * arch.expert_bytes)


def a_mode(folder, **options):
    return open_mode("duoserve", folder, options)


@torch.inference_mode()
def decode(runtime, given, steps=6):
    """Prefill and greedy steps; the logits of each step."""
    ids, mask, past, logits = given["input_ids"], given["attention_mask"], None, []
    for _ in range(steps):
        rows = [StepRow(f"r{row}", None, ids.shape[1]) for row in range(len(ids))]
        with runtime.step(rows):
            output = runtime.model(ids, attention_mask=mask, past_key_values=past, use_cache=True)
        logits.append(output.logits)
        past, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return logits


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("slots", [1, 4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_text_are_those_of_the_unmodified_model(folders, family, slots, overlap):
    expected = load_unmodified(folders[family])
    runtime = open_runtime(folders[family], a_mode(folders[family], overlap=overlap), slots)
    for batch in (1, 3):
        given = prompts(batch)
        with torch.inference_mode():
            assert torch.equal(runtime.model(**given).logits, expected(**given).logits)
            texts = [one.generate(**given, max_new_tokens=8, do_sample=False) for one in (runtime.model, expected)]
        assert torch.equal(*texts)
    runtime.cache.check()
    runtime.close()


def test_each_step_of_decoding_has_the_logits_of_resident(folders):
    for batch in (1, 3):
        answers = []
        for mode in (Resident(), a_mode(folders["mixtral"])):
            runtime = open_runtime(folders["mixtral"], mode, 8 if isinstance(mode, Resident) else 2)
            answers.append(decode(runtime, prompts(batch)))
            runtime.close()
        assert all(torch.equal(one, two) for one, two in zip(*answers, strict=True))


def test_a_prefill_fetches_no_expert_of_a_layer_twice_where_slots_for_two_are_there(folders):
    runtime = open_runtime(folders["mixtral"], a_mode(folders["mixtral"]), slots=2)
    wanted = []
    runtime.observers.append(lambda _step, gate, _done: wanted.extend(gate.wanted()))
    with torch.inference_mode():
        runtime.model(**prompts(1, 24))
    counts = runtime.cache.metrics.counts
    assert counts.fetches - counts.unused <= len(wanted)
    assert counts.overlapped + counts.blocking + counts.unused <= counts.fetches
    runtime.close()


def test_what_was_predicted_is_there_when_the_gate_has_spoken(folders):
    """Serially, so that no clock decides: whatever the prediction found was a hit."""
    runtime = open_runtime(folders["mixtral"], a_mode(folders["mixtral"], overlap=False), slots=2)
    decode(runtime, prompts(1), steps=12)
    found = runtime.cache.metrics.predictions.total()
    decoded = runtime.cache.metrics.of_phase["decode"]
    assert found.tokens == 11 * 2  # eleven steps of decoding, and the first of three layers is not predicted
    assert found.found <= decoded.hits
    assert decoded.fetches_prefetch > 0
    runtime.close()


def test_the_first_layer_is_not_predicted(folders):
    runtime = open_runtime(folders["mixtral"], a_mode(folders["mixtral"], overlap=False), slots=2)
    decode(runtime, prompts(1), steps=4)
    assert [hits.tokens for hits in runtime.cache.metrics.predictions.of_layer] == [0, 3, 3]
    runtime.close()


def test_the_budget_changes_between_steps(folders):
    runtime = open_runtime(folders["mixtral"], a_mode(folders["mixtral"]), slots=4)
    whole = decode(runtime, prompts(1))
    runtime.mode.resize(runtime.cache.budget_bytes // 2)
    assert all(torch.equal(one, two) for one, two in zip(whole, decode(runtime, prompts(1)), strict=True))
    runtime.cache.check()
    runtime.close()


def test_kept_predictors_are_those_that_were_trained(folders):
    prepared = PreparedFiles(folders["mixtral"])
    trace = load_trace(prepared, TRAIN)
    own, before = paths_of(trace)
    fresh = Predictor.of(states_of(trace, 2), fit_layer(trace, 2, SMALL, lambda *_: None).folded())
    kept = load_predictors(prepared)[2]
    sofar = own.first(known(2))
    assert torch.equal(kept.probabilities(sofar, before), fresh.probabilities(sofar, before))


def test_a_model_without_predictors_says_which_command_makes_them(tmp_path):
    folder = write_tiny(tmp_path)
    with pytest.raises(ModelError, match="coserve moe"):
        a_mode(folder)


def test_predictors_that_were_cut_short_are_refused(folders, tmp_path):
    folder = prepare(write_tiny(tmp_path))
    file = PreparedFiles(folder).path("duoserve/layer-2")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="layer-2"):
        a_mode(folder)


def test_without_a_predictor_it_is_loading_on_demand_with_a_streamed_prefill(folders):
    popular = popularity(load_trace(PreparedFiles(folders["mixtral"]), TRAIN)).tolist()
    runtime = open_runtime(folders["mixtral"], DuoServe({}, popular), slots=2)
    decode(runtime, prompts(1))
    assert runtime.cache.metrics.of_phase["decode"].fetches_prefetch == 0
    runtime.close()


def test_a_step_that_fails_amid_its_layers_changes_no_answer_after_it(folders):
    answers = []
    for mode in (Resident(), a_mode(folders["mixtral"])):
        runtime = open_runtime(folders["mixtral"], mode, 8 if isinstance(mode, Resident) else 2)
        fail_amid_each_layer(runtime, partial(decode, runtime, prompts(3)))
        answers.append(decode(runtime, prompts(1)))
        runtime.close()
    assert all(torch.equal(*both) for both in zip(*answers, strict=True))
