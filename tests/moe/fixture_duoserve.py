"""DuoServe on the trained fixture and held-out files: what docs/moe.md says of it, each figure printed.

make test-moe, or: .venv/bin/python -m pytest -q -s tests/moe/fixture_duoserve.py
"""

from contextlib import closing
from pathlib import Path
from statistics import mean

import pytest
import torch

from experts.moe.cache.metrics import FetchCounts, PredictionCounts
from experts.moe.gating import StepRow
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes import Mode, open_mode
from experts.moe.modes.duoserve.fitting import accuracies, load_predictors
from experts.moe.modes.duoserve.mode import DuoServe
from experts.moe.trace import load_popularity, load_trace
from experts.moe.weights.prepared import HELD_OUT, TRAIN, PreparedFiles
from tests.moe.evaluate import DecodeTiming, decode_timing, held_out_prompts, perplexity
from tools.moe.checkpoint import budget_of, open_runtime

FIXTURE = Path("build/moe/fixture")
SHARES = [0.5, 0.25]


def decode_held_out(mode: Mode, share: float) -> tuple[float, FetchCounts, PredictionCounts]:
    """Held-out text decoded token by token, its own tokens given: perplexity, counts and predictions of decoding."""
    with closing(MoeRuntime.open(FIXTURE, mode, budget_of(FIXTURE, share))) as runtime:
        quality = perplexity(runtime, held_out_prompts(FIXTURE, of_domain=2, length=160), decoded=96)
        runtime.cache.check()
        return quality.perplexity, runtime.cache.metrics.of_phase["decode"], runtime.cache.metrics.predictions.total()


def time_behind_a_link(share: float, mode: str = "duoserve", **options: bool) -> DecodeTiming:
    with closing(open_runtime(FIXTURE, mode, share=share, link_ms=2.0, options=options)) as runtime:
        return decode_timing(runtime, held_out_prompts(FIXTURE, of_domain=2, length=64), new_tokens=24)


@torch.inference_mode()
def logits_of(mode: str, share: float, batch: int) -> list[torch.Tensor]:
    """A prefill of several prompts, the shorter ones padded on the left, and sixteen greedy steps."""
    prompts = held_out_prompts(FIXTURE, of_domain=1, length=48)[:batch]
    ids, mask = torch.stack([each.ids for each in prompts]), torch.ones(batch, 48, dtype=torch.long)
    for row in range(batch):
        mask[row, : 5 * row] = 0
    runtime = open_runtime(FIXTURE, mode, share=share)
    logits, past = [], None
    for _ in range(17):
        with runtime.step([StepRow(f"r{row}", None, ids.shape[1]) for row in range(batch)]):
            output = runtime.model(ids, attention_mask=mask, past_key_values=past, use_cache=True)
        logits.append(output.logits)
        past, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    runtime.close()
    return logits


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("share", SHARES)
def test_logits_are_those_of_everything_in_memory(share: float, batch: int):
    pairs = zip(logits_of("duoserve", share, batch), logits_of("resident", 1.0, batch), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_experts_are_predicted_more_often_than_by_counting():
    prepared = PreparedFiles(FIXTURE)
    counts = accuracies(load_trace(prepared, HELD_OUT), load_trace(prepared, TRAIN), load_predictors(prepared))
    runtime = open_runtime(FIXTURE, "lookahead")
    perplexity(runtime, held_out_prompts(FIXTURE, of_domain=40))
    counts["lookahead"] = runtime.cache.metrics.predictions.total()
    runtime.close()
    print("\nexperts predicted on held-out files: both, at least one, share of experts")
    for how, hits in counts.items():
        print(f"  {how:10} {hits.all_rate:.3f}  {hits.any_rate:.3f}  {hits.recall:.3f}  of {hits.tokens} choices")
    assert counts["duoserve"].all_rate >= counts["affinity"].all_rate + 0.10
    assert counts["duoserve"].all_rate >= 2 * counts["popularity"].all_rate
    assert counts["duoserve"].any_rate >= 0.90


@pytest.mark.parametrize("share", SHARES)
def test_computing_waits_for_fewer_experts_than_loading_on_demand(share: float):
    """Twice: by prediction alone, and live, where loading a second missed expert ahead of its turn does its part too.

    Without predictors that part alone passes, so only the first says what the predictor is worth.
    """
    popular, _ = load_popularity(PreparedFiles(FIXTURE))
    modes = {
        "ondemand": open_mode("ondemand", FIXTURE),
        "lookahead": open_mode("lookahead", FIXTURE),
        "no predictor": DuoServe({}, popular.tolist()),
        "serially": open_mode("duoserve", FIXTURE, {"overlap": False}),
        "duoserve": open_mode("duoserve", FIXTURE),
    }
    results = {what: decode_held_out(mode, share) for what, mode in modes.items()}
    base = results["ondemand"][1]
    print(f"\n{share} of each layer's experts, decoding held-out text, as shares of ondemand's")
    for what, (quality, counts, hits) in results.items():
        print(
            f"  {what:12} waited for {counts.blocking / base.blocking:.3f}, absent at the gate"
            f" {(counts.misses + counts.joined) / base.misses:.3f}, {hits.tokens} choices predicted in time,"
            f" both {hits.all_rate:.3f}, perplexity {quality:.4f}"
        )
    assert results["serially"][1].blocking <= 0.60 * base.blocking
    assert results["duoserve"][1].blocking <= 0.60 * base.blocking
    assert len({quality for quality, _, _ in results.values()}) == 1


def test_decoding_overlapped_takes_less_time_than_the_same_work_done_serially():
    """The shortest of three runs for each token, taken in turns: another process takes its time from one run only."""
    print("\nlink of 2 ms an expert")
    ratios: dict[float, float] = {}
    for share in SHARES:
        runs: dict[str, list[DecodeTiming]] = {"overlapped": [], "serially": [], "ondemand": []}
        for _ in range(3):
            runs["overlapped"].append(time_behind_a_link(share))
            runs["serially"].append(time_behind_a_link(share, overlap=False))
            runs["ondemand"].append(time_behind_a_link(share, "ondemand"))
        best = {what: fastest(timings) for what, timings in runs.items()}
        for what, timing in best.items():
            table = timing.as_dict()
            print(
                f"  {share} of each layer, {what:10} TTFT p50 {table['ttft_p50_ms']:.1f}"
                f" p95 {table['ttft_p95_ms']:.1f} ms, TPOT mean {1000 * mean(timing.between_s):.2f}"
                f" p50 {table['tpot_p50_ms']:.2f} p95 {table['tpot_p95_ms']:.2f} ms"
            )
            print(f"      in decoding {runs[what][-1].decode}")
        ratios[share] = sum(best["overlapped"].between_s) / sum(best["serially"].between_s)
        print(f"  overlapped / serially {ratios[share]:.3f}")
    assert ratios[0.5] <= 0.75


def fastest(timings: list[DecodeTiming]) -> DecodeTiming:
    """The same tokens in each run: for each the time of the run in which it came soonest."""
    first = [min(times) for times in zip(*(each.first_s for each in timings), strict=True)]
    between = [min(times) for times in zip(*(each.between_s for each in timings), strict=True)]
    return DecodeTiming(first_s=first, between_s=between, total_s=sum(first) + sum(between))
