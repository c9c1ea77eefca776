"""A board is judged to its end by the edition in which its attempt began, its rules and its experts."""

from dataclasses import replace

import pytest

from experts.spec import ExpertId, ExpertSpec, identified
from tests.daemon.dispatch.simulated_line import Line, a_catalog, a_line, a_mix, a_spec, an_image, on_backbone, routes
from tests.daemon.policy.books import check_scheduler

RULES_B = (
    "boards: {main: {extras: allow, components: {B: 1}}}\nclassifiers: {B: {expert: B, pass: [odd], review_below: 0}}"
)
NEW_B = identified(a_spec("B", sha256="f" * 64))


def with_b(spec: ExpertSpec) -> dict[ExpertId, ExpertSpec]:
    return {**a_catalog(), ExpertId("B"): spec}


def versions(line: Line, *numbers: int) -> set[str]:
    """The first digit of the weights that answered first for each image."""
    return {line.outcomes[number].stages[0].expert_version[0] for number in numbers}


@pytest.mark.promise(
    "Versions of experts",
    "A board is judged to its end by the rules and experts of the edition in which it began, also where memory fits "
    "one version only",
)
@pytest.mark.parametrize("memory", [100, 10], ids=["memory for both", "memory for one"])
def test_what_began_before_a_change_keeps_its_weights_its_settings_and_its_rules(memory: int) -> None:
    line = a_line(budgets={"cpu": memory}, load_s=0.01)
    line.accept(*(an_image(number, "B") for number in range(20)))
    line.run(until_s=0.12)
    assert 0 < len(line.outcomes) < 20
    number = line.put_in_force(with_b(NEW_B), routes(RULES_B))
    line.accept(*(an_image(100 + n, "B", edition=number) for n in range(5)), *(an_image(20 + n, "B") for n in range(5)))
    line.run()
    assert versions(line, *range(25)) == {"0"}
    assert {line.outcomes[n].verdict for n in range(25)} == {"pass"}  # "ok" passes by its rules
    assert versions(line, *range(100, 105)) == {"f"}
    assert {line.outcomes[n].verdict for n in range(100, 105)} == {"fail"}  # and fails by the new ones


def test_a_change_of_a_setting_alone_keeps_the_answers_apart() -> None:
    line, warm = a_line(budgets={"cpu": 100}), identified(replace(a_spec("B"), temperature=2.0))
    line.accept(*(an_image(n, "B") for n in range(40)))
    line.run(until_s=0.12)
    number = line.put_in_force(with_b(warm))
    line.accept(an_image(50, "B", edition=number))
    line.run()
    settings = {line.outcomes[n].stages[0].expert_settings for n in range(40)}
    assert settings == {a_spec("B").settings_digest}
    assert line.outcomes[50].stages[0].expert_settings == warm.settings_digest


def test_heads_that_move_to_another_backbone_are_judged_on_the_one_they_began_with() -> None:
    names = ("A1", "A2", "B", "C")
    line = a_line(catalog=on_backbone(a_catalog(), "line@1", *names), load_s=5.0)
    line.accept(*a_mix(12))
    line.turn()
    number = line.put_in_force(on_backbone(a_catalog(), "line@2", *names))
    line.accept(*a_mix(12, first=20, edition=number))
    line.run()
    assert {outcome.verdict for outcome in line.outcomes.values()} == {"pass"}
    assert len(line.outcomes) == 24


@pytest.mark.promise(
    "Versions of experts",
    "A replaced edition serves ten minutes or its longest time limit; what comes later is `unknown`",
)
def test_a_replaced_edition_serves_ten_minutes_and_then_its_images_are_unknown() -> None:
    line = a_line(budgets={"cpu": 100})
    line.accept(an_image(0, "B"))
    line.put_in_force(with_b(NEW_B))
    line.run(until_s=590.0)
    line.accept(an_image(1, "B"))
    line.run(until_s=599.0)
    line.run(until_s=602.0)
    line.accept(an_image(2, "B"))
    line.run()
    assert [line.outcomes[n].reason for n in range(3)] == [None, None, "edition_gone"]
    assert line.ended_editions == [1]
    assert versions(line, 0, 1) == {"0"}
    assert "B" not in line.pools["cpu"].memory.resident()


def test_ended_at_once_what_waits_runs_or_is_parked_is_unknown_and_what_is_new_goes_on() -> None:
    line = a_line(budgets={"cpu": 10}, load_s=0.05)
    line.accept(*(an_image(number, "B") for number in range(20)))
    line.run(until_s=0.12)
    done = set(line.outcomes)
    number = line.put_in_force(with_b(NEW_B))
    line.accept(*(an_image(100 + n, "B", edition=number) for n in range(5)))
    line.end_editions([1])
    line.run()
    assert {line.outcomes[n].reason for n in set(range(20)) - done} == {"edition_gone"}
    assert {line.outcomes[n].verdict for n in range(100, 105)} == {"pass"}
    check_scheduler(line.drive._scheduler)


@pytest.mark.promise("Versions of experts", "Ten changes in a row under load lose nothing and give their memory back")
def test_ten_changes_under_load_lose_nothing_and_give_their_memory_back() -> None:
    line = a_line(budgets={"cpu": 60}, executors=("cpu", "cpu"), load_s=0.02)
    number, count = 1, 0
    for change in range(10):
        line.accept(*a_mix(8, first=count, edition=number))
        line.run(until_s=line.clock.now() + 0.05)
        count += 8
        number = line.put_in_force(with_b(identified(a_spec("B", sha256=f"{change:x}" * 64))))
    line.accept(*a_mix(8, first=count, edition=number))
    line.run()
    assert {outcome.verdict for outcome in line.outcomes.values()} == {"pass"}
    assert len(line.outcomes) == count + 8
    line.run(until_s=line.clock.now() + 700.0)
    assert len(line.serving.served) == 1
    known = {spec.resident.expert for spec in line.serving.current.catalog.values()}
    assert set(line.pools["cpu"].memory.resident()) <= known
    check_scheduler(line.drive._scheduler)


def test_a_pin_goes_over_to_new_weights_of_its_expert() -> None:
    line = a_line(budgets={"cpu": 30})
    line.run()
    line.ask("pin", expert="B")
    line.put_in_force(with_b(NEW_B))
    line.run()
    assert [row["expert"] for row in line.ask("experts")["experts"] if row["pinned"]] == ["B"]
    assert NEW_B.expert in line.pools["cpu"].memory.resident()
