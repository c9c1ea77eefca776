"""The drive over simulated devices: chains, deadlines, failures, reload, control. Nothing waits, nothing is random."""

from dataclasses import replace
from typing import Any

import pytest

from daemon.dispatch.pool import Fault, StoredImage
from daemon.policy.presets import PRESETS
from daemon.wire.control import ControlError
from experts.spec import Answer, ExpertId, ExpertSpec
from routing_rules.routes import GUARDS
from tests.daemon.dispatch.simulated_line import a_catalog, a_line, a_mix, a_spec, an_image, on_backbone, says


@pytest.mark.parametrize(
    ("label", "experts", "verdict", "defect"),
    [
        ("ok", ["A1", "yolo-solder"], "pass", None),
        ("odd", ["A1", "yolo-shape"], "review", "odd"),
        ("missing", ["A1"], "fail", "missing"),
        ("bridge", ["A1", "yolo-solder"], "fail", "D207"),
    ],
)
def test_a_label_chooses_the_next_expert_and_a_failure_ends_the_chain(
    label: str, experts: list[str], verdict: str, defect: str | None
):
    line = a_line(answer=says({1: label}))
    line.accept(an_image(1, "A1"))
    line.run()
    outcome = line.outcomes[1]
    assert (outcome.verdict, outcome.defect, outcome.reason) == (verdict, defect, None)
    assert [stage.expert for stage in outcome.stages] == experts
    assert {(stage.executor, stage.expert_version) for stage in outcome.stages} == {("cpu/0", "0" * 12)}


@pytest.mark.promise("Containment", "A guard (a repeated, unusable or strange picture) turns only a pass into review")
@pytest.mark.parametrize(
    ("label", "found", "verdict", "reason"),
    [
        ("ok", [], "pass", None),
        ("ok", ["unlike_training", "picture_quality"], "review", "picture_quality"),
        ("odd", ["picture_quality"], "review", None),
        ("missing", ["picture_quality"], "fail", None),
        ("expert_failed", ["picture_quality"], "unknown", "expert_failed"),
    ],
)
def test_a_guard_turns_only_a_pass_into_review(label: str, found: list[str], verdict: str, reason: str | None):
    said = says({1: label})

    def answer(spec: ExpertSpec, image: StoredImage) -> Answer | Fault:
        plain = said(spec, image)
        is_first = spec.expert == "A1" and isinstance(plain, Answer)  # the guard of an earlier step counts as well
        return replace(plain, guards=tuple(found)) if is_first else plain

    line = a_line(answer=answer)
    line.accept(an_image(1, "A1"))
    line.run()
    outcome = line.outcomes[1]
    assert (outcome.verdict, outcome.reason) == (verdict, reason)
    assert len(outcome.stages) == {"ok": 2, "odd": 2, "missing": 1, "expert_failed": 0}[label]


def test_of_several_guards_the_repeated_picture_comes_first_and_one_that_is_off_never():
    def answer(_spec: ExpertSpec, _image: StoredImage) -> Answer:
        return Answer("ok", 0.9, guards=("unlike_training",))

    for guards, reason in ((GUARDS, "repeated_picture"), (GUARDS[1:], "unlike_training"), ([], None)):
        line = a_line(answer=answer, guards=guards)
        line.accept(replace(an_image(1), guard="repeated_picture"))
        line.run()
        assert line.reasons() == {1: reason}


@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.parametrize("budgets", [{"cpu": 20}, {"cpu": 25}, {"cuda:0": 20, "cpu": 20}, {"cuda:0": 20, "cuda:1": 30}])
def test_every_image_ends_once_however_small_the_memory(policy: str, budgets: dict[str, int]):
    executors = [name for name in budgets for _ in range(2)]
    line = a_line(policy=policy, budgets=budgets, executors=executors)
    line.accept(*a_mix(120))
    line.run()
    assert {outcome.verdict for outcome in line.outcomes.values()} == {"pass"}
    assert len(line.outcomes) == 120


def test_a_deadline_that_passes_in_the_queue_gives_unknown_without_computing():
    line = a_line(load_s=5.0)
    line.accept(an_image(1, "B", deadline_ms=2000), an_image(2, "B"))
    line.run()
    assert (line.outcomes[1].verdict, line.outcomes[1].reason, line.outcomes[1].stages) == ("unknown", "deadline", ())
    assert line.ended_s[1] == pytest.approx(2.0)
    assert line.outcomes[2].verdict == "pass"


def test_a_result_that_is_finished_too_late_is_unknown():
    line = a_line(load_s=0.1)
    line.accept(an_image(1, "B", deadline_ms=111))
    line.run()
    outcome = line.outcomes[1]
    assert (outcome.verdict, outcome.defect, outcome.reason) == ("unknown", None, "deadline")
    assert [stage.expert for stage in outcome.stages] == ["B"]


def test_an_image_that_certainly_cannot_make_it_is_answered_early():
    line = a_line(load_s=1.0, budgets={"cpu": 10})
    line.accept(an_image(1, "B"), an_image(2, "C"))
    line.run()
    begin_s = line.clock.now()
    late = an_image(3, "B", deadline_ms=500, accepted_s=begin_s)
    line.accept(late)
    line.run()
    assert line.outcomes[3].reason == "deadline"
    assert line.ended_s[3] == begin_s


def test_an_expert_that_cannot_be_loaded_fails_its_images_and_no_others():
    line = a_line()
    line.pools["cpu"].memory.broken["B"] = "its weights file is missing"
    line.accept(*(an_image(n, "B" if n % 2 else "C") for n in range(10)))
    line.run()
    assert {n: outcome.reason for n, outcome in line.outcomes.items()} == {
        n: "expert_failed" if n % 2 else None for n in range(10)
    }
    status = line.ask("status")
    assert "its weights file is missing" in status["last_error"]
    assert list(status["failed"]) == ["B"]


def test_a_repaired_expert_is_tried_again_after_a_while_and_the_line_is_failing_until_then():
    line = a_line()
    line.pools["cpu"].memory.broken["B"] = "its weights file is missing"
    line.accept(an_image(1, "B"))
    line.run()
    assert line.drive.is_failing
    line.pools["cpu"].memory.broken.clear()
    line.accept(an_image(2, "B"))
    line.run(until_s=31.0)
    line.accept(an_image(3, "B"))
    line.run(until_s=40.0)
    assert [line.outcomes[n].reason for n in (1, 2, 3)] == ["expert_failed", "expert_failed", None]
    assert not line.drive.is_failing
    assert line.ask("status")["last_error"] is None


def test_the_error_of_an_expert_is_shown_until_it_answers_again():
    line = a_line(answer=says({1: "expert_failed"}))
    line.accept(an_image(1, "B"))
    line.run()
    assert line.ask("status")["last_error"] == "expert B: as the test says"
    line.accept(an_image(2, "C"))
    line.run()
    assert line.ask("status")["last_error"] == "expert B: as the test says"
    line.accept(an_image(3, "B"))
    line.run()
    assert line.ask("status")["last_error"] is None


def test_the_usage_of_a_head_is_its_own_and_not_that_of_its_backbone():
    line = a_line(catalog=on_backbone(a_catalog(), "line", "B", "C"))
    usage = {row["expert"]: round(row["usage"], 3) for row in line.ask("experts")["experts"]}
    assert (usage["A1"], usage["B"], usage["C"]) == (0.222, 0.444, 0.111)


def test_whoever_unloads_a_head_hears_that_it_is_its_backbone_that_goes():
    line = a_line(catalog=on_backbone(a_catalog(), "line", "B", "C"))
    line.run()
    assert line.ask("unload", expert="B") == {"expert": "line"}
    with pytest.raises(ControlError, match=r"^C is a head of line: line is not resident"):
        line.ask("unload", expert="C")


def test_an_expert_larger_than_every_pool_fails_its_images_and_says_why():
    line = a_line(catalog={**a_catalog(), ExpertId("B"): a_spec("B", 1000)})
    line.accept(an_image(1, "B"), an_image(2, "C"))
    line.run()
    assert line.outcomes[1].reason == "expert_failed"
    assert line.outcomes[2].verdict == "pass"
    assert "needs 1000 bytes and the largest pool has room for 30: raise a device's" in line.ask("status")["last_error"]


def test_a_chain_that_breaks_is_unknown_and_keeps_what_ran():
    line = a_line()
    line.pools["cpu"].memory.broken["yolo-solder"] = "is damaged"
    line.accept(an_image(1, "A1"))
    line.run()
    outcome = line.outcomes[1]
    assert (outcome.verdict, outcome.reason, [stage.expert for stage in outcome.stages]) == (
        "unknown",
        "expert_failed",
        ["A1"],
    )


@pytest.mark.parametrize(
    ("kind", "fields", "code"),
    [
        ("pin", {"expert": "unknown"}, "unknown_expert"),
        ("pin", {"expert": "B", "device": "cuda:7"}, "unknown_device"),
        ("pin", {"expert": 3}, "bad_field"),
        ("unload", {"expert": "B", "device": "cuda:7"}, "unknown_device"),
        ("unpin", {"expert": "B"}, "not_pinned"),
        ("unload", {"expert": "yolo-shape"}, "not_resident"),
        ("limits", {"expert_memory": {"cpu": 5}}, "does_not_fit"),
        ("limits", {"expert_memory": {"cuda:7": 50}}, "unknown_device"),
        ("limits", {"expert_memory": [1]}, "bad_field"),
        ("dance", {}, "bad_field"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_with_a_reason(kind: str, fields: dict[str, Any], code: str):
    line = a_line(budgets={"cpu": 20})
    line.run()
    with pytest.raises(ControlError) as caught:
        line.ask(kind, **fields)
    assert caught.value.code == code
    assert caught.value.reason
    assert code != "unknown_device" or "expected one of cpu" in caught.value.reason


def test_a_smaller_budget_takes_hold_and_a_larger_one_too():
    line = a_line(budgets={"cpu": 30})
    line.run()
    assert len(line.pools["cpu"].memory.resident()) == 3
    assert line.ask("limits", expert_memory={"cpu": 10}) == {"expert_memory": {"cpu": 10}}
    line.run()
    assert (line.pools["cpu"].budget_bytes, len(line.pools["cpu"].memory.resident())) == (10, 1)
    line.ask("limits", expert_memory={"cpu": 60})
    line.accept(*(an_image(n, ["A1", "B", "A2", "C"][n % 4]) for n in range(20)))
    line.run()
    assert line.pools["cpu"].budget_bytes == 60
    assert len(line.pools["cpu"].memory.resident()) == 6


def test_status_names_executors_counts_images_and_lists_memory_that_they_share_once():
    line = a_line(executors=("cpu", "cpu"))
    line.accept(*(an_image(n, "B") for n in range(3)))
    line.run()
    status = line.ask("status")
    assert status["completed"] == 3
    assert status["under_way"] == 0
    first = status["executors"][0]
    assert (first["name"], first["device"], first["budget_bytes"]) == ("cpu/0", "cpu", 30)
    assert first["used_bytes"] <= 30
    assert 0.0 < first["busy_share"] < 1.0
    assert [row["pool"] for row in status["executors"]] == ["cpu", "cpu"]
    (pool,) = status["pools"]
    assert (pool["pool"], pool["device"], pool["executors"]) == ("cpu", "cpu", ["cpu/0", "cpu/1"])
    assert (pool["budget_bytes"], pool["used_bytes"]) == (30, status["executors"][0]["used_bytes"])


FAMILY = on_backbone(a_catalog(), "line@1", "A1", "A2", "B")


def test_one_batch_holds_the_images_of_a_family_and_each_answer_is_its_heads():
    line = a_line(catalog=FAMILY, answer=says({1: "odd"}))
    line.accept(an_image(0, "A1"), an_image(1, "A2"), an_image(2, "B"), an_image(3, "B"))
    line.run()
    first = {number: outcome.stages[0] for number, outcome in line.outcomes.items()}
    assert {stage.batch_id for stage in first.values()} == {1}
    assert [first[number].expert for number in range(4)] == ["A1", "A2", "B", "B"]
    assert {stage.expert_version for stage in first.values()} == {"a" * 12}
    assert [stage.expert for stage in line.outcomes[1].stages] == ["A2", "yolo-shape"]
    assert {str(switch.loaded) for switch in line.switches} & {"A1", "A2", "B"} == set()
