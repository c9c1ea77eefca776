"""The modes on the trained fixture and held-out files: what docs/language-models.md says of them, each figure printed.

make test-moe, or: .venv/bin/python -m pytest -q -s tests/moe/fixture_modes.py
"""

from contextlib import closing
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from experts.moe.cache.slot_ledger import FetchCounts
from experts.moe.model.mode import Mode
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes import open_mode
from experts.moe.modes.baselines import Prune
from experts.moe.modes.duoserve.predictor import known_layers, load_predictors, paths_of
from experts.moe.modes.emoe.fitting import load_sensitivity
from experts.moe.modes.swapmoe.mode import SwapMoe, SwapMoeOptions
from experts.moe.modes.swapmoe.planner import load_preparation
from experts.moe.trace import Trace, affinity, load_popularity, load_trace, popularity
from experts.moe.weights.prepared import TRAIN, PreparedFiles
from tests.experts.moe.accesses import Accesses
from tests.moe.evaluate import TextQuality, held_out_prompts, perplexity
from tools.moe.checkpoint import arch_of, budget_of
from tools.moe.trace import take_trace

FIXTURE = Path("build/moe/fixture")
SHARES = [0.5, 0.25]


def prepared() -> PreparedFiles:
    return PreparedFiles(FIXTURE)


@cache
def held_out_trace() -> Trace:
    if not prepared().has("traces/heldout"):
        take_trace(prepared(), "traces/heldout", prompts=120, length=256)
    return load_trace(prepared(), "traces/heldout")


def served(mode: Mode, budget_bytes: int, **prompts: Any) -> TextQuality:
    """Measure perplexity on held-out text within `budget_bytes`."""
    decoded = prompts.pop("decoded", 0)
    with closing(MoeRuntime.open(FIXTURE, mode, budget_bytes)) as runtime:
        quality = perplexity(runtime, held_out_prompts(FIXTURE, **prompts), decoded=decoded)
        runtime.cache.check()
        assert runtime.cache.allocated_bytes <= budget_bytes
    return quality


def of_mode(name: str, share: float, of_domain: int = 24, **options: Any) -> TextQuality:
    return served(open_mode(name, FIXTURE, options), budget_of(FIXTURE, share), of_domain=of_domain)


def test_every_expert_of_every_layer_is_used_on_held_out_files():
    shares = popularity(held_out_trace())
    least, most = shares.min(dim=1).values, shares.max(dim=1).values
    print("\nshare of tokens, least and most used expert of each layer (even: .0625)", least.tolist(), most.tolist())
    assert (least > 0.0625 / 8).all()
    assert (most < 4 * 0.0625).all()


# DuoServe


def test_duoserve_predicts_more_experts_than_counting():
    """The share of tokens all of whose experts are named, over all predicted layers."""
    trace, train = held_out_trace(), load_trace(prepared(), TRAIN)
    own, before = paths_of(trace)
    top_k, named = trace.index.shape[2], dict[str, list[float]]()
    for layer, predictor in load_predictors(prepared()).items():
        counted = affinity(train, layer - 1, layer)[own.index[:, layer - 1]].sum(1)
        parts = [slice(start, start + 4096) for start in range(0, len(trace.index), 4096)]
        learned = [
            predictor.probabilities(own.first(known_layers(layer)).rows(part), before.rows(part)) for part in parts
        ]
        guesses = {
            "popularity": popularity(train)[layer].expand(len(trace.index), -1),
            "affinity": counted,
            "duoserve": torch.cat(learned),
        }
        for how, likely in guesses.items():
            right = (own.index[:, layer, :, None] == likely.topk(top_k).indices[:, None]).any(-1).all(-1)
            named.setdefault(how, []).append(float(right.float().mean()))
    rates = {how: sum(each) / len(each) for how, each in named.items()}
    print("\nall experts predicted on held-out files:", rates)
    assert rates["duoserve"] >= rates["affinity"] + 0.10
    assert rates["duoserve"] >= 2 * rates["popularity"]


@pytest.mark.parametrize("share", SHARES)
def test_duoserve_waits_for_fewer_experts_than_loading_on_demand(share: float):
    counts: dict[str, FetchCounts] = {}
    for name, options in (("ondemand", {}), ("duoserve", {}), ("serially", {"overlap": False})):
        mode = open_mode("duoserve" if options else name, FIXTURE, options)
        with closing(MoeRuntime.open(FIXTURE, mode, budget_of(FIXTURE, share))) as runtime:
            counts[name] = perplexity(runtime, held_out_prompts(FIXTURE, of_domain=2, length=160), decoded=96).decoding
    waited = {name: each.blocking / counts["ondemand"].blocking for name, each in counts.items()}
    print(f"\n{share} of each layer's experts, waited for as a share of ondemand's:", waited)
    assert max(waited["duoserve"], waited["serially"]) <= 0.60


# SwapMoE: text keeps to its subject (§2.4), so prompts come domain after domain


@pytest.mark.parametrize("share", SHARES)
def test_swapmoe_never_waits_and_loses_less_than_static_pruning(share: float):
    ready, popular = load_preparation(FIXTURE), load_popularity(prepared())
    assert ready is not None, "run: .venv/bin/coserve moe plan build/moe/fixture"
    size_bytes, prompts = budget_of(FIXTURE, share), {"of_domain": 6, "mixed": False}
    even = (round(share * arch_of(FIXTURE).experts),) * arch_of(FIXTURE).layers
    whole = of_mode("resident", 1.0, 6).perplexity
    pruned = {
        by: served(Prune(shares), size_bytes, **prompts).perplexity
        for by, shares in (("popularity", popular), ("importance", ready.importance), ("weight", ready.norms))
    }
    planned = served(SwapMoe(ready), size_bytes, decoded=128, **prompts)
    split = served(SwapMoe(ready, SwapMoeOptions(counts=even, period=1)), size_bytes, decoded=128, **prompts)
    lost = (planned.perplexity - whole) / (min(pruned.values()) - whole)
    print(f"\n{share}: in full {whole:.2f}, pruned {pruned}, planned {planned.perplexity:.2f}", end=", ")
    print(f"even {split.perplexity:.2f}; {lost:.2f} of what the best pruning loses")
    assert planned.counts.blocking == planned.counts.fetches_demand == 0
    assert lost <= 0.75
    assert planned.perplexity <= split.perplexity


# eMoE


@pytest.mark.parametrize("share", SHARES)
def test_emoes_loads_fall_with_the_period_and_it_loses_less_than_pruning(share: float):
    pruned = of_mode("prune", share)
    qualities = {period: of_mode("emoe", share, period=period) for period in (1, 5, 20)}
    for period, each in qualities.items():
        print(f"\n{share}, every {period}: {each.perplexity:.2f}, loads {each.counts.fetches}", end="")
        assert each.counts.fetches <= 1.1 * qualities[1].counts.fetches / period
        assert each.perplexity < pruned.perplexity
    print(f"; pruned {pruned.perplexity:.2f}")


@pytest.mark.parametrize("share", SHARES)
def test_emoe_is_no_worse_on_sensitive_tasks_for_knowing_them(share: float):
    aware, alike = (of_mode("emoe", share, period=1, task_aware=known).of_domain for known in (True, False))
    print(f"\n{share}: task-aware {aware}, agnostic {alike}")
    weights = {task: sum(row) for task, row in load_sensitivity(prepared()).items()}
    sensitive = [task for task, weight in weights.items() if weight >= median(weights.values())]
    assert all(aware[task] <= alike[task] for task in sensitive)


# BrownoutServe


def browned(way: int, threshold: float) -> tuple[float, float]:
    """Return perplexity, and experts run as a share of those chosen."""
    mode = open_mode("brownout", FIXTURE, {"way": way, "threshold": threshold})
    accesses = Accesses(arch_of(FIXTURE).experts)
    with closing(MoeRuntime.open(FIXTURE, mode, budget_of(FIXTURE, 1.0) + mode.reserved_bytes)) as runtime:
        runtime.observers.append(accesses)
        return perplexity(runtime, held_out_prompts(FIXTURE, of_domain=12)).perplexity, accesses.share


def test_the_more_experts_in_one_the_worse_and_nothing_is_as_bad_as_dropping():
    exact, _ = browned(0, 1.0)
    results = {way: browned(way, 0.6) for way in (2, 4, 8, 0)}
    for way, (value, share) in results.items():
        print(f"\nway {way}, threshold .6: perplexity {value / exact - 1:+.1%}, accesses {share:.3f}", end="")
    lost = {way: value - exact for way, (value, _) in results.items()}
    assert lost[2] <= lost[4]
    assert lost[0] >= 4 * lost[4]
    assert results[4][1] <= 0.65
    assert results[4][0] <= 1.10 * exact
