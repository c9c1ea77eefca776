"""SwapMoE on the trained fixture: perplexity at equal memory beside static pruning, and what its parts are worth.

make test-moe, or: .venv/bin/python -m pytest -q -s tests/moe/fixture_swapmoe.py   (after `coserve moe plan`)

Held-out files, batch 1, domain after domain: text keeps to its subject, as SwapMoE assumes (§2.4). The first half of
each prompt is one prefill, the second comes token by token; what does not change between steps does not notice.
"""

import math
import threading
from contextlib import closing
from functools import cache
from pathlib import Path

import torch

from experts.moe.cache.weight_transfer import SlowLink
from experts.moe.gating import StepRow
from experts.moe.model.mode import Mode
from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes.baselines import Prune, Resident
from experts.moe.modes.swapmoe.mode import SwapMoe, token_count
from experts.moe.modes.swapmoe.planner import Preparation, load_preparation, plan_for
from experts.moe.trace import load_popularity
from experts.moe.weights.prepared import PreparedFiles
from tests.moe.evaluate import TextQuality, held_out_prompts, perplexity
from tools.moe.checkpoint import arch_of

FIXTURE = Path("build/moe/fixture")
OF_DOMAIN, LENGTH, DECODED = 6, 256, 128


@cache
def prepared() -> tuple[Preparation, torch.Tensor]:
    """What `coserve moe plan` wrote, and (L, E) popularity from `coserve moe trace`."""
    ready = load_preparation(FIXTURE)
    assert ready is not None, "run: .venv/bin/coserve moe plan build/moe/fixture"
    return ready, load_popularity(PreparedFiles(FIXTURE))[0]


def served(mode: Mode, slots: int, *, decoded: int = 0, link: SlowLink | None = None) -> TextQuality:
    """Perplexity on the held-out text; what is static is measured in prefills alone, which are much quicker."""
    prompts = held_out_prompts(FIXTURE, of_domain=OF_DOMAIN, length=LENGTH, mixed=False)
    size_bytes = slots * arch_of(FIXTURE).expert_bytes
    with closing(MoeRuntime.open(FIXTURE, mode, size_bytes, link=link)) as runtime:
        quality = perplexity(runtime, prompts, decoded=decoded)
        runtime.cache.check()
        assert runtime.cache.allocated_bytes <= size_bytes
    return quality


@cache
def whole() -> float:
    arch = arch_of(FIXTURE)
    return served(Resident(), arch.layers * arch.experts).perplexity


@cache
def pruned(by: str, each: int) -> float:
    ready, popularity = prepared()
    shares = {"popularity": popularity, "importance": ready.importance, "weight": ready.norms}[by]
    return served(Prune(shares), each * arch_of(FIXTURE).layers).perplexity


@cache
def swapped(each: int, split: str, score: str = "importance") -> TextQuality:
    """`each` experts a layer on average; `split` even or planned; ranked by `score`, before the first token as well."""
    arch, (ready, popularity) = arch_of(FIXTURE), prepared()
    slots = each * arch.layers
    counts = (each,) * arch.layers if split == "even" else None
    if score == "tokens":
        mode = SwapMoe(Preparation(ready.norms, popularity), counts=counts, period=1, score=token_count)
    else:
        mode = SwapMoe(ready, counts=counts, period=1 if counts else None)
    return served(mode, slots, decoded=DECODED)


def test_the_perplexity_lost_at_half_the_experts_is_at_most_three_quarters_of_what_static_pruning_loses():
    print(f"\nresident {whole():.2f}")
    for each in (8, 4):
        static = {by: pruned(by, each) for by in ("popularity", "importance", "weight")}
        quality = swapped(each, "planned")
        best = min(static.values())
        share = (quality.perplexity - whole()) / (best - whole())
        print(f"{each} of 16: pruned " + ", ".join(f"by {by} {value:.2f}" for by, value in static.items()))
        print(f"  swapmoe, planned {quality.perplexity:.2f}: {share:.2f} of what the best of them loses")
        print(f"  blocking {quality.counts.blocking}, swaps {quality.counts.fetches} of {quality.counts.served} served")
        assert quality.counts.blocking == quality.counts.fetches_demand == 0
        assert share <= 0.75


def test_importance_is_no_worse_than_a_token_count_and_that_no_worse_than_chance():
    arch = arch_of(FIXTURE)
    for each in (8, 4):
        by_importance, by_tokens = (swapped(each, "even", score).perplexity for score in ("importance", "tokens"))
        chance = []
        for seed in range(3):
            shares = torch.rand(arch.layers, arch.experts, generator=torch.Generator().manual_seed(seed))
            chance.append(served(Prune(shares), each * arch.layers).perplexity)
        print(f"\n{each} of 16: importance {by_importance:.2f}, tokens {by_tokens:.2f}", end=", ")
        print("chance " + " ".join(f"{layer:.2f}" for layer in chance))
        assert by_importance <= by_tokens <= min(chance)


def test_the_plan_is_no_worse_than_an_even_split_of_the_same_bytes():
    arch, (ready, _) = arch_of(FIXTURE), prepared()
    for each in (8, 4):
        plan = plan_for(ready.plans, each * arch.layers * arch.expert_bytes)
        assert plan is not None
        planned, even = swapped(each, "planned").perplexity, swapped(each, "even").perplexity
        # A prior that nothing outweighs: the plan's layers, and always the same experts in them.
        still = served(SwapMoe(ready, prior_tokens=1e12), each * arch.layers)
        assert still.counts.fetches == 0
        print(f"\n{each} of 16: planned {plan.counts} {planned:.2f}, even {even:.2f}")
        print(f"  planned, but never swapped {still.perplexity:.2f}")
        assert planned <= still.perplexity
        assert planned <= even


def test_behind_a_slow_link_no_step_waits_either():
    arch, (ready, _) = arch_of(FIXTURE), prepared()
    prompts = held_out_prompts(FIXTURE, of_domain=1, length=96, mixed=False)
    size_bytes = 8 * arch.layers * arch.expert_bytes
    with closing(MoeRuntime.open(FIXTURE, SwapMoe(ready), size_bytes, link=SlowLink(2.0))) as runtime:
        quality = perplexity(runtime, prompts, decoded=64)
        counts = runtime.cache.metrics.counts
        print(f"\nlink of 2 ms: perplexity {quality.perplexity:.2f}, waited {counts.wait_s} s, {counts.fetches} swaps")
        assert counts.wait_s == counts.blocking == 0
        assert counts.fetches > 0


def test_the_budget_changes_while_text_is_generated():
    arch, (ready, _) = arch_of(FIXTURE), prepared()
    ids = held_out_prompts(FIXTURE, of_domain=1, length=64)[0].ids[None]
    slots = [arch.layers * each for each in (8, 3, 16, 4, 10)]
    with closing(MoeRuntime.open(FIXTURE, SwapMoe(ready), slots[0] * arch.expert_bytes)) as runtime:
        steps: list[int] = []
        done = threading.Event()
        observed = runtime.observers
        observed.append(lambda step, _gate, carried: steps.append(step.number) if carried.layer == 0 else None)

        def generate() -> None:
            with runtime.step([StepRow("budget", None, ids.shape[1])]):
                runtime.model.generate(ids, max_new_tokens=256, min_new_tokens=256, do_sample=False)
            done.set()

        thread = threading.Thread(target=generate)
        thread.start()
        for turn, size in enumerate(slots[1:], start=1):
            while len(steps) < 40 * turn and not done.wait(0.005):
                pass
            runtime.mode.resize(size * arch.expert_bytes)
            assert runtime.cache.allocated_bytes <= size * arch.expert_bytes
            print(f"\nafter step {len(steps)}: {size} experts", end="")
        assert not done.is_set(), "all budgets came while text was generated"
        thread.join()
        runtime.cache.check()
        assert len(steps) == 256
        assert runtime.cache.metrics.counts.blocking == 0
        assert math.isclose(sum(len(runtime.cache.resident(layer)) for layer in range(arch.layers)), slots[-1])
