"""Any file gives routes or problems, never an exception; and coverage of patterns is exact."""

from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing_rules.compile import ExpertLabels, RulesError, compile_rules
from routing_rules.load import Problem
from routing_rules.routes import Routes, judge
from routing_rules.schema import BoardEntry, DetectorEntry, Glob, RulesFile
from tests import ROOT

EXAMPLES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "routing_rules/examples").glob("*.yaml"))]
QUIET = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


def compiled(text: str, experts: dict[str, ExpertLabels] | None = None) -> Routes | None:
    """The routes, or None after having seen that every problem has its place in the text."""
    problems: list[Problem] = []
    try:
        return compile_rules(text, "f", experts)
    except RulesError as error:
        problems = error.problems
    assert problems
    lines = len(text.splitlines())
    for problem in problems:
        assert problem.file == "f"
        assert 1 <= problem.line <= lines + 1
        assert problem.column >= 1
        assert problem.message
    return None


def reads_well(routes: Routes) -> None:
    """Every promise of compiled rules that needs no knowledge of what they say."""
    assert set(routes.usage) == set(routes.experts) == set(routes.successors)
    assert all(0.0 <= usage <= 1.0 for usage in routes.usage.values())
    assert all(0.0 <= share <= 1.0 for following in routes.successors.values() for _, share in following)
    for board_type, recipe in routes.recipes.items():
        assert recipe.expected >= 1
        for component in recipe.positions:
            step = routes.first_step(board_type, component)
            assert step is not None
            length = 0
            judgement = judge(step, "ok", 0.99, (), None)
            while judgement.next is not None:
                judgement = judge(judgement.next, "ok", 0.99, (), judgement)
                length += 1
            assert length < 16


components = st.sampled_from(["R1", "R2", "a"])
patterns = st.sampled_from(["R*", "R?", "R1", "a", "*"])
labels = st.sampled_from(["ok", "bad"])
boxes = st.sampled_from(["x", "*"])
laters = st.sampled_from(["d", "s", "t"])
names = components | patterns | labels | boxes | laters | st.sampled_from(["{component}", "", "2", "null", "<<"])
keys = st.sampled_from([*RulesFile.model_fields, *BoardEntry.model_fields, *DetectorEntry.model_fields, "pass", "min"])
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.floats(), names, st.sampled_from(["20s", "allow", "pass", "-1s"])
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names | keys, inner, max_size=5)),
    max_leaves=20,
)


@QUIET
@given(anything)
def test_any_structure_is_routes_or_problems(structure: Any) -> None:
    compiled(yaml.safe_dump(structure))


@QUIET
@given(
    text=st.sampled_from(EXAMPLES),
    cut=st.tuples(st.integers(0, 4000), st.integers(0, 30)),
    put=st.text(":{}[],*0.- \nabc", max_size=5),
)
def test_a_damaged_example_is_routes_or_problems(text: str, cut: tuple[int, int], put: str) -> None:
    start = cut[0] % len(text)
    routes = compiled(text[:start] + put + text[start + cut[1] :])
    if routes is not None:
        reads_well(routes)


globs = st.text("ab*?", min_size=1, max_size=5).map(Glob.of)


@settings(QUIET, max_examples=400)
@given(glob=globs, cover=globs)
def test_a_pattern_is_covered_exactly_when_no_name_is_left_over(glob: Glob, cover: Glob) -> None:
    # Three letters, of which the patterns name two, and names as long as two patterns: enough to tell them apart.
    left_over = [name for name in SHORT_NAMES if glob.matches(name) and not cover.matches(name)]
    assert bool(left_over) != cover.covers(glob)


def _names(length: int) -> list[str]:
    return [""] if length == 0 else [name + sign for name in _names(length - 1) for sign in "abc"]


SHORT_NAMES = [name for length in range(1, 8) for name in _names(length)]
