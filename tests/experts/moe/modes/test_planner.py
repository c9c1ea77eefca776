"""The planner gives memory to the layers that need it, keeps to memory and bandwidth, and goes on where it stopped."""

from pathlib import Path

import pytest

from experts.moe.errors import ModelError
from experts.moe.modes.swapmoe.planner import (
    Configuration,
    LossModel,
    MeasuredPlan,
    load_preparation,
    plan_counts,
    random_counts,
)

pytest.importorskip("transformers", reason="language models need the extra `moe`: pip install 'coserve[moe]'")

from experts.moe.weights.prepared import PreparedFiles
from tests.experts.moe.tiny import prompts, write_tiny
from tools.moe.plan import Planner, PlanProfile
from tools.moe.trace import TRAIN, TaskText, save_text

LAYERS, EXPERTS, FLOOR, SLOTS = 4, 16, 2, 32
NEED = (6.0, 1.0, 0.5, 2.0)


def loss_of(counts: Configuration) -> float:
    """What absent experts cost, most in the first layer."""
    return 3 + sum(need * 0.8**count for need, count in zip(NEED, counts, strict=True))


def test_the_plan_loses_less_than_an_even_split_and_keeps_to_the_memory():
    drawn = random_counts(LAYERS, EXPERTS, FLOOR, SLOTS, 40)
    rows = [MeasuredPlan(counts, 1, loss_of(counts), 1.0) for counts in drawn]
    best = plan_counts(LossModel(rows, EXPERTS), rows, SLOTS, experts=EXPERTS, floor=FLOOR)
    assert sum(best) <= SLOTS
    assert loss_of(best) < loss_of((SLOTS // LAYERS,) * LAYERS)
    assert best[0] == max(best)


def test_a_plan_is_made_from_measurements_that_are_kept_and_not_taken_twice(tmp_path: Path):
    checkpoint = write_tiny(tmp_path / "mixtral")
    save_text(PreparedFiles(checkpoint), TRAIN, TaskText({"text": prompts(1, 64)["input_ids"][0]}))
    profile = PlanProfile(of_domain=2, length=8, chunk=4)
    planner = Planner(checkpoint, "50%", profile)
    plan = planner.run(4)
    assert sum(plan.counts) <= 12
    assert planner.measured(plan.counts, plan.period).loss <= planner.measured(planner.even, plan.period).loss
    best = load_preparation(checkpoint)
    assert best is not None
    assert best.plans == (plan,)
    file = PreparedFiles(checkpoint).path("plan-measured")
    _, first = PreparedFiles(checkpoint).load("plan-measured")
    assert len(first["measured"]) >= 9, "six frequencies and the configurations"
    stamp_ns = file.stat().st_mtime_ns
    assert Planner(checkpoint, "50%", profile).run(4) == plan
    assert file.stat().st_mtime_ns == stamp_ns, "everything was there already"


@pytest.mark.parametrize(
    ("budget", "says"), [("10%", "give at least"), ("much", "is not a budget"), ("1kB", "give at least")]
)
def test_a_budget_that_is_none_is_refused(tmp_path: Path, budget: str, says: str):
    with pytest.raises(ModelError, match=says):
        Planner(write_tiny(tmp_path / "mixtral"), budget, PlanProfile())
