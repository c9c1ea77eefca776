"""Families: heads of one backbone are queued, loaded and batched together; answers and versions stay their own."""

from collections.abc import Mapping
from dataclasses import replace

from experts.spec import ExpertId, ExpertSpec
from tests.daemon.dispatch.simulated_line import a_catalog, a_line, a_mix, a_spec, an_image, routes, says


def on_backbone(catalog: Mapping[ExpertId, ExpertSpec], backbone: str, *names: str) -> dict[ExpertId, ExpertSpec]:
    """Return the catalog with some of its experts as heads of a backbone."""
    resident = replace(a_spec(backbone, weights_bytes=10, sha256=backbone[-1] * 64), classes=())
    heads = {
        ExpertId(name): replace(catalog[ExpertId(name)], weights_bytes=1, sha256="a" * 64, backbone=resident)
        for name in names
    }
    return {**catalog, **heads}


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


def test_an_operator_may_name_a_head_for_its_backbone():
    line = a_line(catalog=FAMILY)
    line.run()
    assert line.ask("pin", expert="A1")["expert"] == "line@1"
    rows = {row["expert"]: row for row in line.ask("experts")["experts"]}
    assert rows["A2"]["pinned"] == rows["A1"]["pinned"] != []
    assert (rows["A1"]["backbone"], "backbone" in rows["C"]) == ("line@1", False)
    (pool,) = line.ask("memory")["pools"]
    assert "line@1" in [expert["expert"] for expert in pool["experts"]]


def test_images_of_heads_that_move_to_another_backbone_are_judged_there():
    line = a_line(catalog=FAMILY, load_s=5.0)
    line.accept(*a_mix(12))
    line.turn()
    line.drive.reload_later(on_backbone(a_catalog(), "line@2", "A1", "A2", "B", "C"), routes())
    line.run()
    assert {outcome.verdict for outcome in line.outcomes.values()} == {"pass"}
    assert len(line.outcomes) == 12


def test_images_that_wait_are_judged_on_the_backbone_as_the_new_catalog_has_it():
    """Its file was moved, or its normalisation was corrected: its name stays."""
    specs = []
    line = a_line(catalog=FAMILY, load_s=5.0, answer=lambda spec, image: specs.append(spec) or says()(spec, image))
    line.accept(*a_mix(12))
    line.turn()
    moved = replace(a_spec("line@1", sha256="1" * 64), classes=(), mean=(0.5, 0.5, 0.5))
    catalog = {name: replace(spec, backbone=moved) if spec.backbone else spec for name, spec in FAMILY.items()}
    line.drive.reload_later(catalog, routes())
    line.run()
    assert {spec.backbone for spec in specs if spec.expert in ("A1", "A2", "B")} == {moved}
    assert len(line.outcomes) == 12


def test_an_expert_that_becomes_a_head_loses_no_image():
    line = a_line(load_s=5.0)
    line.accept(*a_mix(12))
    line.turn()
    line.drive.reload_later(FAMILY, routes())
    line.run()
    assert {outcome.verdict for outcome in line.outcomes.values()} == {"pass"}
    assert {stage.expert_version for stage in line.outcomes[0].stages[:1]} == {"a" * 12}
