"""The trained fixture itself: every expert is used, every domain learned, and the next gate's guess is good."""

import json
from contextlib import closing
from pathlib import Path

from experts.moe.trace import load_trace, popularity
from experts.moe.weights.prepared import HELD_OUT, PreparedFiles
from tests.moe.evaluate import decode_timing, held_out_prompts
from tools.moe.checkpoint import open_runtime

FIXTURE = Path("build/moe/fixture")


def test_every_expert_of_every_layer_is_used_on_held_out_files():
    shares = popularity(load_trace(PreparedFiles(FIXTURE), HELD_OUT))
    least, most = shares.min(dim=1).values, shares.max(dim=1).values
    print("\nshare of tokens, least and most used expert of each layer (even: .0625)")
    print("  least", [round(value, 3) for value in least.tolist()])
    print("  most ", [round(value, 3) for value in most.tolist()])
    assert (least > 0.0625 / 8).all()
    assert (most < 4 * 0.0625).all()


def test_every_domain_is_learned():
    report = json.loads((FIXTURE / "training.json").read_text())
    print("\nparameters", report["parameters"], "perplexity of held-out files", report["perplexity"])
    assert 5.2e6 < report["parameters"] < 5.4e6
    assert all(value < 100 for value in report["perplexity"].values())  # 2048 is guessing


def test_the_next_layers_gate_asked_early_names_both_experts_of_half_the_tokens():
    prompts = held_out_prompts(FIXTURE, of_domain=4, length=64)
    with closing(open_runtime(FIXTURE, "lookahead", share=0.5)) as runtime:
        decode_timing(runtime, prompts, new_tokens=24)
        hits = runtime.cache.metrics.predictions.total()
    print(f"\nlookahead: both {hits.all_rate:.3f}, at least one {hits.any_rate:.3f} of {hits.tokens} choices")
    assert hits.all_rate > 0.40
    assert hits.any_rate > 0.80
