"""DuoServe: its decisions, its predictor, and the mode on tiny random models."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experts.moe.gating import ExpertKey, StepRow
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes import open_mode
from experts.moe.modes.duoserve.mode import DuoServe
from experts.moe.modes.duoserve.predictor import (
    DuoServeRecipe,
    LayerPredictor,
    fit_layer,
    known_layers,
    paths_of,
    save_layer,
    states_of,
)
from experts.moe.trace import Trace
from experts.moe.weights.prepared import PreparedFiles
from tests.experts.moe.tiny import load_unmodified, prompts, write_tiny
from tests.experts.moe.traces import make_trace, open_with_slots, take_tiny_trace

SMALL = DuoServeRecipe(widths=(64, 32), tokens=12_000, batch=128)
QUICK = DuoServeRecipe(widths=(32, 16), tokens=800, batch=64)


def a_planned_trace(tokens: int = 2000, layers: int = 4, experts: int = 8, seed: int = 0) -> Trace:
    """Return routing with a plan: a token's experts follow from its first layer, and these from the token before."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(0, 2, (tokens,), generator=draw).cumsum(0) % experts
    second = (first + 1 + torch.arange(tokens) % 2) % experts
    index = [torch.stack([first, second], 1)]
    for layer in range(1, layers):
        lead = (first * 3 + second * layer) % experts
        index.append(torch.stack([lead, (lead + 1 + second % (experts - 1)) % experts], 1))
    weight = torch.tensor([0.7, 0.3], dtype=torch.float16).expand(tokens, layers, 2).contiguous()
    return make_trace(torch.stack(index, 1), experts, weight=weight)


@pytest.mark.parametrize(
    ("rows", "resident", "slots", "fetched"),
    [
        ([[0.1, 0.9, 0.3, 0.2], [0.8, 0.0, 0.7, 0.0]], (2, 3), 2, [1, 0]),
        ([[0.1, 0.9, 0.3, 0.2]], (2,), 4, [2, 1]),
    ],
)
def test_resident_predicted_experts_stay_and_the_others_are_fetched_as_far_as_a_layer_has_slots(
    rows: list[list[float]], resident: tuple[int, ...], slots: int, fetched: list[int]
):
    mode, keys, prediction = DuoServe({}), list[ExpertKey](), Future()
    prediction.set_result(rows)
    mode.arch = SimpleNamespace(layers=1, top_k=2)
    mode.cache = SimpleNamespace(slots=slots, resident=lambda _layer: resident, prefetch=keys.extend)
    mode._fetch(0, prediction)
    assert [key.expert for key in keys] == fetched


def test_a_folded_predictor_gives_what_its_network_gives_and_the_same_seed_the_same_network():
    trace = a_planned_trace(tokens=300)
    network, again = (fit_layer(trace, 2, SMALL) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(network.parameters(), again.parameters(), strict=True))
    own, before = paths_of(trace)
    sofar = own.first(known_layers(2))
    expected = network(states_of(trace, 2).build(sofar, before)).sigmoid()
    predictor = LayerPredictor(states_of(trace, 2), network.folded())
    assert torch.allclose(predictor.probabilities(sofar, before), expected, atol=0.02)
    for width in (1, 2):
        rows = [slice(start, start + width) for start in range(0, 20, width)]
        parts = [predictor.probabilities(sofar.rows(row), before.rows(row)) for row in rows]
        assert torch.allclose(torch.cat(parts), expected[:20], atol=0.02)


# The mode


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(write_tiny(tmp_path_factory.mktemp("duoserve") / "mixtral"))


def prepare(folder: Path) -> Path:
    """Trace a random model on random text, and fit its predictors."""
    trace = take_tiny_trace(folder, {"text": prompts(1, 192)["input_ids"][0]}, 48)
    for layer in range(1, trace.layers):
        save_layer(PreparedFiles(folder), layer, fit_layer(trace, layer, QUICK), trace, QUICK)
    return folder


def duoserve(folder: Path, slots: int = 8, **options: bool) -> MoeRuntime:
    return open_with_slots(folder, open_mode("duoserve", folder, options), slots)


@torch.inference_mode()
def decode(runtime: MoeRuntime, inputs: dict[str, torch.Tensor], steps: int = 6) -> list[torch.Tensor]:
    """Return the logits of a prefill and greedy steps."""
    ids, mask, past, logits = inputs["input_ids"], inputs["attention_mask"], None, []
    for _ in range(steps):
        with runtime.step([StepRow(f"r{row}", None, ids.shape[1]) for row in range(len(ids))]):
            output = runtime.model(ids, attention_mask=mask, past_key_values=past, use_cache=True)
        logits.append(output.logits)
        past, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return logits


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("slots", [1, 4, 8])
def test_logits_and_text_are_those_of_the_unmodified_model(checkpoint: Path, slots: int, overlap: bool):
    expected = load_unmodified(checkpoint)
    runtime = duoserve(checkpoint, slots, overlap=overlap)
    for batch in (1, 3):
        inputs = prompts(batch)
        with torch.inference_mode():
            assert torch.equal(runtime.model(**inputs).logits, expected(**inputs).logits)
            texts = [model.generate(**inputs, max_new_tokens=8, do_sample=False) for model in (runtime.model, expected)]
        assert torch.equal(*texts)
    runtime.cache.check()


def test_predicted_experts_are_fetched_before_the_gate_speaks(checkpoint: Path):
    """Serially, so that no clock decides."""
    runtime = duoserve(checkpoint, slots=2, overlap=False)
    decode(runtime, prompts(1), steps=1)
    prefill = runtime.cache.counts.copy()
    decode(runtime, prompts(1), steps=12)
    decoded = runtime.cache.counts - prefill
    assert decoded.fetches_prefetch > 0
    assert decoded.overlapped > 0
