"""BrownoutServe on the trained fixture, held-out files: what MOE.md asks of it, each figure printed.

make test-moe, or: .venv/bin/python -m pytest -q -s tests/moe/fixture_brownout.py
"""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from experts.moe.model.runtime import MoeRuntime
from experts.moe.modes.brownout.mode import Brownout
from experts.moe.modes.brownout.united import UnitedExperts, averaged, load_united, read_expert
from experts.moe.policy.brownout import Phase, SalcRule, groups_in_order
from experts.moe.policy.schedule import FirstCome
from experts.moe.weights.expert_store import ExpertStore
from experts.moe.weights.prepared import PreparedFiles
from tests.moe.burst import (
    ACCESS_S,
    CALM_S,
    AccessTable,
    BurstScene,
    StaticThreshold,
    burst,
    measure_accesses,
    scene_of,
)
from tests.moe.evaluate import held_out_prompts, perplexity
from tests.moe.load import capacity_per_s
from tools.moe.checkpoint import budget_of, open_runtime

FIXTURE = Path("build/moe/fixture")
PHASES: tuple[Phase, ...] = ("prefill", "decode")


def united(way: int) -> UnitedExperts | None:
    return load_united(PreparedFiles(FIXTURE), way) if way else None


def averaged_united(store: ExpertStore, way: int) -> UnitedExperts:
    """Unite the experts of each group by the means of their weights: distilled ones are measured against these."""
    arch = store.arch
    groups = groups_in_order(arch.experts, way)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(arch.layers):
        means = [
            averaged(read_expert(store, layer, expert) for expert in range(arch.experts) if groups[expert] == group)
            for group in range(groups[-1] + 1)
        ]
        parts.append(tuple(torch.stack(matrices).to(arch.dtype) for matrices in zip(*means, strict=True)))
    gate_up, down = zip(*parts, strict=True)
    return UnitedExperts(gate_up, down, (groups,) * arch.layers)


def a_runtime(mode: Brownout, share: float = 1.0) -> MoeRuntime:
    """Slots for `share` of the experts, and room for the united ones."""
    return MoeRuntime.open(FIXTURE, mode, budget_of(FIXTURE, share) + mode.reserved_bytes)


def quality(mode: Brownout) -> tuple[float, float]:
    """Perplexity of 60 held-out pieces of 256 tokens, one at a time, and the share of expert accesses."""
    with closing(a_runtime(mode)) as runtime:
        value = perplexity(runtime, held_out_prompts(FIXTURE, of_domain=12)).perplexity
    return value, mode.accesses["prefill"].share


@pytest.fixture(scope="module")
def exact() -> float:
    """Perplexity at threshold 1."""
    return quality(Brownout(None))[0]


def test_threshold_1_changes_no_bit():
    prompts = held_out_prompts(FIXTURE, of_domain=2)
    ids = torch.stack([each.ids for each in prompts])
    answers = []
    for share, runtime in [(1.0, open_runtime(FIXTURE, "resident")), (0.25, a_runtime(Brownout(united(4)), 0.25))]:
        with torch.no_grad():
            answers.append((runtime.model(ids).logits, runtime.model.generate(ids[:1, :32], max_new_tokens=16)))
        assert runtime.cache.allocated_bytes <= budget_of(FIXTURE, share)
        runtime.close()
    print(f"\nthreshold 1, a quarter of the slots: {answers[0][0].numel()} logits compared bit by bit, and 16 tokens")
    assert torch.equal(answers[0][0], answers[1][0])
    assert torch.equal(answers[0][1], answers[1][1])


def test_the_more_experts_in_one_the_worse_and_nothing_is_as_bad_as_dropping(exact: float):
    perplexities: dict[int, list[float]] = {}
    print(f"\nperplexity on held-out files, {exact:.2f} at threshold 1; expert accesses in brackets")
    for way in (2, 4, 8, 0):
        rows = [quality(Brownout(united(way), threshold=threshold)) for threshold in (0.8, 0.6, 0.4)]
        perplexities[way] = [value for value, _ in rows]
        figures = ", ".join(f"{value:.2f} {value / exact - 1:+.1%} ({share:.2f})" for value, share in rows)
        print(f"  {f'way {way}' if way else 'full'}: threshold .8, .6, .4: {figures}")
    for two, four, full in zip(perplexities[2], perplexities[4], perplexities[0], strict=True):
        assert two <= four
        assert full - exact >= 4 * (four - exact)


def test_way_4_at_threshold_6_saves_a_third_of_the_accesses(exact: float):
    value, share = quality(Brownout(united(4), threshold=0.6))
    print(f"\nway 4, threshold .6: accesses {share:.3f} (≤ .65), perplexity {value / exact - 1:+.1%} (≤ +10 %)")
    assert share <= 0.65
    assert value <= 1.10 * exact


def test_distilled_on_activations_is_better_than_averaged(exact: float):
    with closing(open_runtime(FIXTURE, "ondemand", share=0.25)) as runtime:
        peers = {way: averaged_united(runtime.store, way) for way in (2, 4, 8)}
    print("\nthreshold .6: perplexity against threshold 1, united experts distilled and averaged")
    for way, peer in peers.items():
        distilled, averaged = (quality(Brownout(each, threshold=0.6))[0] for each in (united(way), peer))
        print(f"  way {way}: {distilled / exact - 1:+.1%} and {averaged / exact - 1:+.1%}")
        assert distilled - exact < 0.5 * (averaged - exact)


@pytest.fixture(scope="module")
def table() -> AccessTable:
    mode = Brownout(united(4))
    with closing(a_runtime(mode)) as runtime:
        return measure_accesses(runtime, mode, held_out_prompts(FIXTURE, of_domain=12))


@pytest.fixture(scope="module")
def scene(table: AccessTable) -> BurstScene:
    return scene_of(table)


def test_under_a_burst_the_threshold_falls_within_two_checks_and_returns_to_1(table: AccessTable, scene: BurstScene):
    print(f"\nan expert access is made to cost {1000 * ACCESS_S:.0f} ms; experts run by a step, measured, of way 4:")
    for phase in PHASES:
        for row, threshold in enumerate(table.thresholds):
            if threshold in {0.0, 0.2, 0.4, 0.6, 0.8, 1.0}:
                columns = zip(table.tokens[phase], table.runs[phase][row], strict=True)
                counts = ", ".join(f"{tokens} tokens {runs:.0f}" for tokens, runs in columns)
                print(f"  {phase}, threshold {threshold}: {counts}")
    _, _, controlled = burst(scene, table, 0.9 * scene.capacity_per_s, seed=1)
    interval_s = SalcRule(slo_s=1.0).interval_s
    fell_s: dict[Phase, float | None] = {}
    for phase in PHASES:
        past = [(now, thresholds[phase]) for now, thresholds in controlled.history]
        calm = [threshold for now, threshold in past if now < CALM_S]
        fell_s[phase] = next((now - CALM_S for now, threshold in past if now >= CALM_S and threshold < calm[-1]), None)
        least = min(threshold for now, threshold in past if now >= CALM_S)
        again_s = next((now - 2 * CALM_S for now, threshold in past if now >= 2 * CALM_S and threshold == 1.0), None)
        print(
            f"  {phase}: mean threshold {sum(calm) / len(calm):.2f} before the burst, falls {fell_s[phase]} s after its"
            f" begin (a check each {interval_s} s), least {least:.2f}, is 1 again {again_s} s after its end"
        )
        assert again_s is not None
    assert min(each for each in fell_s.values() if each is not None) <= 2 * interval_s


@pytest.mark.parametrize("capacity", ["keeping its SLO", "throughput"])
def test_with_the_load_doubled_violations_are_less_than_half(table: AccessTable, scene: BurstScene, capacity: str):
    """At 90 % of what threshold 1 can take: nine of ten tokens within the SLO, or with always one request waiting."""
    top = scene.capacity_per_s
    if capacity == "throughput":
        top = capacity_per_s(scene.tasks, FirstCome(scene.limits), scene.machine, StaticThreshold(table))
    print(f"\n90 % of {top:.2f} requests a second ({capacity}), doubled for {CALM_S:.0f} s; access {ACCESS_S * 1e3} ms")
    missed: dict[Phase, list[tuple[float, float]]] = {phase: [] for phase in PHASES}
    for seed in (1, 2, 3):
        static, controlled, _ = burst(scene, table, 0.9 * top, seed)
        for phase in PHASES:
            slo_s = scene.slo_s[phase]
            missed[phase].append((static.violations_of(phase, slo_s), controlled.violations_of(phase, slo_s)))
    for phase in PHASES:
        static_share, controlled_share = (sum(each) / 3 for each in zip(*missed[phase], strict=True))
        print(
            f"  {phase}, SLO {1000 * scene.slo_s[phase]:.0f} ms: tokens too late {static_share:.3f} at threshold 1,"
            f" {controlled_share:.3f} under SALC: {controlled_share / static_share:.2f} (≤ .50)"
        )
        assert controlled_share <= 0.5 * static_share
