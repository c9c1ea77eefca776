"""Compiled rules: recipes, first steps, usage probabilities, versions; all of it immutable."""

from pathlib import Path

import pytest

from routing_rules.compile import ExpertLabels, compile_rules
from routing_rules.load import read_yaml, read_yaml_text
from routing_rules.routes import ClassifierStep, Position, Routes, chain

RULES = """
boards:
  a:
    time_limit: 20s
    components: {R0402: 180, C0603: 10, QFP64: [U1, U2, U7]}
  b: {extras: allow, components: {QFP64: 1}}
classifiers:
  QFP*: {expert: "{component}", pass: [ok], then: solder}
  "*": {expert: "{component}", pass: [ok], then: {odd: "look"}}
detectors:
  solder: {expert: "yolo", fail_on: {bridge: 0.4}, then: look}
steps:
  look: {expert: "look-{component}", pass: [ok]}
"""


def the_routes(text: str = RULES, experts: dict[str, ExpertLabels] | None = None) -> Routes:
    return compile_rules(text, "rules.yaml", experts)


def a_recipe(components: str, board: str = "", rest: str = "pass: [ok]") -> Routes:
    return the_routes(
        f"boards: {{x: {{components: {components}{board}}}}}\nclassifiers: {{'*': {{expert: e, {rest}}}}}\n"
    )


def test_a_recipe_says_what_a_board_brings() -> None:
    recipe = the_routes().recipes["a"]
    assert recipe.board_type == "a"
    assert recipe.positions == {
        "R0402": Position(180),
        "C0603": Position(10),
        "QFP64": Position(3, ("U1", "U2", "U7")),
    }
    assert (recipe.expected, recipe.time_limit_s, recipe.extras_allowed) == (193, 20.0, False)
    second = the_routes().recipes["b"]
    assert (second.expected, second.time_limit_s, second.extras_allowed) == (1, None, True)


@pytest.mark.parametrize(
    ("limit", "seconds"), [("500ms", 0.5), ("20s", 20), ("1.5 s", 1.5), ("2m", 120), ("1h", 3600), ("168h", 604800)]
)
def test_time_limits_have_their_unit(limit: str, seconds: float) -> None:
    assert a_recipe("{R: 1}", f", time_limit: {limit}").recipes["x"].time_limit_s == seconds


def test_a_component_takes_the_first_pattern_that_matches_and_its_name_fills_the_template() -> None:
    routes = the_routes()
    qfp, resistor = routes.first_step("a", "QFP64"), routes.first_step("a", "R0402")
    assert isinstance(qfp, ClassifierStep)
    assert isinstance(resistor, ClassifierStep)
    assert (qfp.name, qfp.expert) == ("QFP*", "QFP64")
    assert (resistor.name, resistor.expert) == ("*", "R0402")
    assert [step.expert for step in chain(qfp)] == ["QFP64", "yolo", "look-QFP64"]
    assert [step.expert for step in chain(resistor)] == ["R0402", "look-R0402"]


def test_case_counts_and_brackets_are_ordinary_in_component_types() -> None:
    text = "boards: {x: {components: {'A[1]': 1, a: 1}}}\nclassifiers:\n"
    routes = the_routes(text + "  A?1?: {expert: upper, pass: [ok]}\n  '*': {expert: lower, pass: [ok]}\n")
    assert [routes.first_step("x", name).expert for name in ("A[1]", "a")] == ["upper", "lower"]  # type: ignore[union-attr]


def test_unknown_boards_and_components_have_no_step() -> None:
    routes = the_routes()
    assert routes.first_step("zzz", "R0402") is None
    assert routes.first_step("a", "LED") is None


def test_extras_without_an_expert_in_the_catalog_are_unknown_components() -> None:
    classifier = ExpertLabels("classify", ("ok", "odd"))
    names = ["R0402", "C0603", "QFP64", "look-R0402", "look-C0603", "look-QFP64", "LED", "look-LED", "XTAL"]
    catalog = dict.fromkeys(names, classifier) | {"yolo": ExpertLabels("detect", ("bridge",))}
    routes = the_routes(experts=catalog)
    assert routes.first_step("b", "LED") is not None
    assert routes.first_step("b", "XTAL") is None  # its chain needs look-XTAL
    assert routes.first_step("b", "yolo") is None  # not a classifier


def test_the_rules_read_twice_are_equal_and_have_one_version() -> None:
    first, again = the_routes(), the_routes()
    assert first == again
    assert hash(first) == hash(again)
    assert first.version == again.version == first.sha256[:12]
    assert first.text == RULES
    assert the_routes(RULES + "# a comment\n").version != first.version


def test_the_version_of_a_file_is_that_of_its_kept_text(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_bytes(RULES.replace("\n", "\r\n").encode())
    from_file = compile_rules(read_yaml(path))
    assert compile_rules(read_yaml_text(from_file.text, "kept")).version == from_file.version


def test_usage_of_one_board_is_quantities_times_pass_rates_along_the_chain() -> None:
    text = """
boards: {x: {components: {A: 3, B: 1}}}
classifiers:
  A: {expert: a, pass: [ok], then: d, pass_rate: 0.9}
  B: {expert: b, pass: [ok], then: d, pass_rate: 0.5}
detectors:
  d: {expert: d, fail_on: {x: 0.5}, then: e, pass_rate: 0.8}
steps:
  e: {expert: e, pass: [ok]}
"""
    routes = the_routes(text)
    assert routes.experts == ("a", "d", "e", "b")
    assert routes.usage == pytest.approx({"a": 0.75, "b": 0.25, "d": 0.8, "e": 0.64})
    assert dict(routes.successors["a"]) == pytest.approx({"d": 0.9})
    assert dict(routes.successors["d"]) == pytest.approx({"e": 0.8})
    assert routes.successors["e"] == ()


def test_boards_weigh_by_how_often_they_are_built_and_how_many_images_they_bring() -> None:
    text = "boards: {x: {share: 3, components: {A: 1}}, y: {components: {B: 2}}}\n"
    usage = the_routes(text + "classifiers: {'*': {expert: '{component}', pass: [ok]}}").usage
    assert usage == pytest.approx({"A": 0.6, "B": 0.4})


def test_pass_labels_share_the_pass_rate_and_other_branches_the_rest() -> None:
    text = """
boards: {x: {components: {A: 1}}}
classifiers:
  A: {expert: a, pass: [p, q], pass_rate: 0.8, then: {p: s1, bad: s2, worse: null, "*": s3}}
steps: {s1: {expert: e1, pass: [ok]}, s2: {expert: e2, pass: [ok]}, s3: {expert: e3, pass: [ok]}}
"""
    third = 0.2 / 3
    expected = {"e1": 0.4, "e2": third, "e3": 0.4 + third}
    routes = the_routes(text)
    assert dict(routes.successors["a"]) == pytest.approx(expected)
    assert {name: routes.usage[name] for name in expected} == pytest.approx(expected)


def test_a_detectors_branches_share_what_its_pass_rate_leaves() -> None:
    text = """
boards: {x: {components: {A: 1}}}
classifiers: {A: {expert: a, pass: [ok], pass_rate: 1, then: d}}
detectors: {d: {expert: d, pass_rate: 0.9, then: {p: s, q: t, "*": u}}}
steps: {s: {expert: s, pass: [ok]}, t: {expert: t, pass: [ok]}, u: {expert: u, pass: [ok]}}
"""
    assert dict(the_routes(text).successors["d"]) == pytest.approx({"s": 0.05, "t": 0.05, "u": 0.9})


def test_a_pass_rate_of_zero_leaves_later_experts_unused() -> None:
    text = "boards: {x: {components: {A: 1}}}\nclassifiers: {A: {expert: a, pass: [ok], pass_rate: 0, then: s}}\n"
    routes = the_routes(text + "steps: {s: {expert: b, pass: [ok], then: t}, t: {expert: c, pass: [ok]}}")
    assert routes.usage == {"a": 1.0, "b": 0.0, "c": 0.0}
    assert routes.successors["b"] == (("c", 0.0),)


def test_experts_that_only_extras_can_need_are_listed() -> None:
    text = "boards: {x: {extras: allow, components: {A: 1}}}\nclassifiers:\n  A: {expert: a, pass: [ok]}\n"
    routes = the_routes(text + "  '*': {expert: general, pass: [ok]}\n")
    assert routes.experts == ("a", "general")
    assert routes.usage == {"a": 1.0, "general": 0.0}
