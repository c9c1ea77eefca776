"""Rules that a running line keeps in memory."""

from dataclasses import replace

from daemon.line.rulebook import Rulebook, changed_experts
from experts.catalog import Catalog
from experts.spec import ExpertSpec
from tests.daemon.dispatch.simulated_line import a_spec
from tests.daemon.storage.database.store_parts import RULES, a_line, an_arrival, an_outcome, some_rules


def a_catalog(*specs: ExpertSpec) -> Catalog:
    return Catalog({spec.expert: spec for spec in specs}, {})


def test_changed_experts_are_named_with_what_changed_and_others_are_not():
    same, warm, swapped, gone = (replace(a_spec(name), temperature=1.3) for name in ("A", "B", "C", "D"))
    moved = replace(same, file=same.file.with_name("moved.safetensors"))
    cold = replace(warm, temperature=1.1)
    better = replace(swapped, sha256="f" * 64, temperature=0.9)
    fresh = a_spec("E")
    changed = changed_experts(a_catalog(same, warm, swapped, gone), a_catalog(moved, cold, better, fresh))
    assert changed == [
        {"expert": "B", "version": "0" * 12, "settings": cold.settings_digest, "what": "temperature 1.3 → 1.1"},
        {
            "expert": "C",
            "version": "f" * 12,
            "settings": better.settings_digest,
            "what": f"version {'0' * 12} → {'f' * 12}, temperature 1.3 → 0.9",
        },
        {"expert": "E", "version": "0" * 12, "settings": fresh.settings_digest, "what": "new"},
        {"expert": "D", "version": None, "settings": None, "what": "removed"},
    ]


def rules(number: int):
    return some_rules(RULES.replace("20s", f"{20 + number}s"))


def test_a_thousand_reloads_keep_the_newest_rules_and_those_in_use():
    versions = [rules(number) for number in range(1000)]
    book = Rulebook(versions[0])
    for routes in versions[1:]:
        book.replace(routes, {versions[0].version, versions[500].version})
    kept = [number for number, routes in enumerate(versions) if book.get(routes.version) is routes]
    assert kept == [0, 500, *range(992, 1000)]
    assert book.current is versions[-1]


def test_rules_are_in_use_while_an_attempt_is_open_or_an_image_has_no_verdict(tmp_path):
    line = a_line(tmp_path)
    opened = line.rulebook.current.version
    (image,) = line.accept(an_arrival("a", "R0402", "R1", serial="S1"))
    line.rulebook.replace(rules(1), ())
    with_late_image = rules(1).version
    (late,) = line.accept(an_arrival("b", "R0402", "R1", serial="S2"))
    line.clock.pass_s(60.0)
    line.judge(an_outcome(image.inspection_id))  # closes both by their time limit
    reader = line.reader()
    assert reader.rules_in_use() == {with_late_image}
    line.judge(an_outcome(late.inspection_id))
    assert reader.rules_in_use() == set()
    line.accept(an_arrival("c", "R0402", "R1", serial="S3"))
    line.judge()
    assert reader.rules_in_use() == {with_late_image}
    assert opened != with_late_image
    line.store.close()
