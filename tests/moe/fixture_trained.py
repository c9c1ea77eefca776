"""The trained fixture itself: every expert is used, every domain learned, the runtime says what the model says."""

import json
from pathlib import Path

import pytest
import torch

from experts.moe.library import transformers
from experts.moe.trace import load_trace, popularity
from experts.moe.weights.prepared import HELD_OUT, PreparedFiles
from tools.moe.evaluate import decode_timing, held_out_prompts, open_runtime, perplexity

FIXTURE = Path("build/moe/fixture")


def test_every_expert_of_every_layer_is_used_on_held_out_files():
    shares = popularity(load_trace(PreparedFiles(FIXTURE), HELD_OUT))
    least, most = shares.min(dim=1).values, shares.max(dim=1).values
    print("\nshare of tokens, least and most used expert of each layer (even: .0625)")
    print("  least", [round(value, 3) for value in least.tolist()])
    print("  most ", [round(value, 3) for value in most.tolist()])
    assert (least > 0.0625 / 8).all()
    assert (most < 4 * 0.0625).all()


def test_every_domain_is_learned_and_no_file_is_on_both_sides():
    report = json.loads((FIXTURE / "training.json").read_text())
    print("\nparameters", report["parameters"], "perplexity of held-out files", report["perplexity"])
    assert 5.2e6 < report["parameters"] < 5.4e6
    assert all(value < 100 for value in report["perplexity"].values())  # 2048 is guessing
    rows = json.loads((FIXTURE / "coserve/text/corpus.json").read_text())
    sides: dict[str, set[bool]] = {}
    for row in rows:
        sides.setdefault(row["source"], set()).add(row["held_out"])
    assert all(len(side) == 1 for side in sides.values())


def test_loading_on_demand_gives_the_perplexity_of_the_unmodified_model():
    prompts = held_out_prompts(FIXTURE, of_domain=4)
    model = transformers().AutoModelForCausalLM.from_pretrained(FIXTURE, dtype=torch.float32).eval()
    with torch.no_grad():
        losses = [model(each.ids[None], labels=each.ids[None]).loss for each in prompts]
    expected = torch.stack(losses).mean().exp().item()
    runtime = open_runtime(FIXTURE, "ondemand", share=0.25)
    try:
        found = perplexity(runtime, prompts).perplexity
    finally:
        runtime.close()
    print(f"\nperplexity: unmodified {expected:.4f}, on demand with a quarter of the experts {found:.4f}")
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_next_layers_gate_asked_early_names_both_experts_of_half_the_tokens():
    prompts = held_out_prompts(FIXTURE, of_domain=4, length=64)
    runtime = open_runtime(FIXTURE, "lookahead", share=0.5)
    try:
        decode_timing(runtime, prompts, new_tokens=24)
        hits = runtime.cache.metrics.predictions.total()
    finally:
        runtime.close()
    print(f"\nlookahead: both {hits.all_rate:.3f}, at least one {hits.any_rate:.3f} of {hits.tokens} choices")
    assert hits.all_rate > 0.40
    assert hits.any_rate > 0.80
