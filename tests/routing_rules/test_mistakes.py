"""Every kind of mistake in rules: its line, its column, and the name that was meant."""

import pytest

from routing_rules.compile import ExpertLabels, RulesError, compile_rules

RULES = """\
boards:
  mainboard-a:
    time_limit: 20s
    components:
      R0402: 180
      QFP64: [U1, U2, U7]
classifiers:
  QFP*: {expert: "{component}", pass: [ok], review_below: 0.90, then: solder}
  R*:
    expert: resistor
    pass: [ok, turned]
detectors:
  solder:
    expert: yolo-solder
    fail_on: {bridge: 0.40, void: 0.55}
    require:
      joint: {min: 64, max: 70}
    then: {smear: wash}
steps:
  wash: {expert: wash, pass: [clean]}
defects: {tombstone: D101, bridge: D207}
"""
ONE_BOARD = "boards: {b: {components: {R: 1}}}\n"
CATALOG = {
    "QFP64": ExpertLabels("classify", ("ok", "missing", "tombstone")),
    "resistor": ExpertLabels("classify", ("ok", "turned")),
    "yolo-solder": ExpertLabels("detect", ("bridge", "void", "joint", "smear")),
    "wash": ExpertLabels("classify", ("clean", "dirty")),
}


def mistakes(old: str = "", new: str = "", catalog: dict[str, ExpertLabels] | None = None) -> list[str]:
    """The problems of RULES in which `old` is written as `new`."""
    assert old in RULES
    try:
        compile_rules(RULES.replace(old, new, 1) if old else RULES, "f", catalog)
    except RulesError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_the_rules_of_these_tests_are_right_before_they_are_spoilt() -> None:
    assert mistakes() == []
    assert mistakes(catalog=CATALOG) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("boards:", "bords:", "f:1:1: unknown key `bords`; did you mean `boards`?"),
        ("time_limit", "time_limt", "f:3:5: unknown key `time_limt`; did you mean `time_limit`?"),
        ("review_below", "Review_Below", "f:8:45: unknown key `Review_Below`; did you mean `review_below`?"),
        ("expert: resistor", "exprt: resistor", "f:10:5: unknown key `exprt`; did you mean `expert`?"),
        ("fail_on", "fail_at", "f:15:5: unknown key `fail_at`; did you mean `fail_on`?"),
        ("max: 70", "maximum: 70", "f:17:24: unknown key `maximum`"),
    ],
)
def test_an_unknown_key_is_shown_with_the_nearest_right_one(old: str, new: str, expected: str) -> None:
    assert mistakes(old, new)[0].startswith(expected)


def test_a_misspelt_key_is_reported_once() -> None:
    assert len(mistakes("expert: resistor", "exprt: resistor")) == 1
    assert len(mistakes("boards:", "bords:")) == 1


def test_an_entry_without_an_expert_is_a_mistake() -> None:
    assert mistakes("    expert: resistor\n", "") == ["f:9:3: missing key `expert`"]
    assert mistakes("    expert: yolo-solder\n", "") == ["f:13:3: missing key `expert`"]


def test_sections_that_are_missing_are_named() -> None:
    assert mistakes(RULES, "") == [
        "f:1:1: no boards: expected at least one entry under `boards:`",
        "f:1:1: no classifiers: expected at least one entry under `classifiers:`",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("R0402: 180", "r0402: 180", "f:5:7: no classifier pattern matches component `r0402`; the nearest is `R*`"),
        ("QFP64: [", "QFB64: [", "f:6:7: no classifier pattern matches component `QFB64`; the nearest is `QFP*`"),
        ("R0402: 180", "XTAL: 1", "f:5:7: no classifier pattern matches component `XTAL`"),
    ],
)
def test_a_component_that_no_pattern_matches_is_a_mistake(old: str, new: str, expected: str) -> None:
    assert mistakes(old, new)[0].startswith(expected)


@pytest.mark.parametrize(
    ("first", "covered"),
    [
        ('"*"', "R*"),
        ("R*", "R0402"),
        ("R*", "R??"),
        ("'?*'", "'*'"),
        ("Q*P*", "QFP*"),
        ("R?*", "R*2"),
        ("'*0*'", "R*04*2"),
    ],
)
def test_a_pattern_behind_one_that_covers_it_is_unreachable(first: str, covered: str) -> None:
    entry = "{expert: e, pass: [ok]}"
    text = (
        f"boards: {{b: {{components: {{QQ00: 1, R0: 1}}}}}}\nclassifiers:\n  {first}: {entry}\n  {covered}: {entry}\n"
    )
    with pytest.raises(RulesError) as raised:
        compile_rules(text + f"  Q*0: {entry}\n  Z: {entry}\n  R0: {entry}\n", "f")
    plain, plainly = first.strip("\"'"), covered.strip("\"'")
    assert any(
        str(problem).startswith(f"f:4:3: unreachable: `{plain}` (line 3) already matches all that `{plainly}` matches")
        for problem in raised.value.problems
    )


def test_a_pattern_that_two_earlier_ones_cover_together() -> None:
    entry = "{expert: e, pass: [ok]}"
    text = f"boards: {{b: {{components: {{R1: 1}}}}}}\nclassifiers:\n  '?': {entry}\n  '??*': {entry}\n  '*': {entry}\n"
    with pytest.raises(
        RulesError, match=r"f:5:3: unreachable: `\?` \(line 3\) and `\?\?\*` \(line 4\) already match all"
    ):
        compile_rules(text, "f")


@pytest.mark.parametrize(
    ("first", "second"), [("R0402", "R*"), ("R?", "R*"), ("R*2", "R*"), ("*R", "R*"), ("r*", "R*")]
)
def test_a_wider_pattern_behind_a_narrower_one_is_right(first: str, second: str) -> None:
    entry = "{expert: e, pass: [ok]}"
    text = f"boards: {{b: {{components: {{R0402: 1}}}}}}\nclassifiers:\n  '{first}': {entry}\n  '{second}': {entry}\n"
    assert compile_rules(text, "f").first_step("b", "R0402") is not None


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ('"[QR]*"', "f:9:3: expected a pattern in which only * (any text) and ? (one character) are wild, no brackets"),
        ("R**", "f:9:3: expected a pattern with single stars: ** means no more than *, found `R**`"),
        ('""', "f:9:3: expected a pattern of component types such as QFP*"),
        ('" R*"', "f:9:3: expected a pattern of component types such as QFP*"),
    ],
)
def test_patterns_of_a_wrong_shape_are_refused(pattern: str, expected: str) -> None:
    assert len(found := mistakes("  R*:", f"  {pattern}:")) == 1
    assert found[0].startswith(expected)


def test_only_the_patterns_that_are_needed_to_cover_are_named() -> None:
    entry = "{expert: e, pass: [ok]}"
    patterns = "".join(f"  '{pattern}': {entry}\n" for pattern in ("b*", "a", "ab?", "??*", "a*", "R"))
    with pytest.raises(RulesError) as raised:
        compile_rules(f"{ONE_BOARD}classifiers:\n{patterns}", "f")
    places = [(problem.line, problem.message[:60]) for problem in raised.value.problems]
    assert places == [(7, "unreachable: `a` (line 4) and `??*` (line 6) already match a")]


def test_a_cycle_between_detector_and_step_is_a_mistake() -> None:
    assert mistakes("pass: [clean]}", "pass: [clean], then: solder}") == [
        "f:20:45: a cycle: solder → wash → solder; a chain must end"
    ]


def test_a_step_that_leads_to_itself_is_a_cycle() -> None:
    assert mistakes("{smear: wash}", "solder") == ["f:18:11: a cycle: solder → solder; a chain must end"]


def test_every_cycle_is_found_once() -> None:
    found = mistakes(
        "{smear: wash}", "{smear: wash, a: solder, b: solder}\n  x: {expert: x, then: y}\n  y: {expert: y, then: x}"
    )
    assert [problem.split(": ")[0] for problem in found] == ["f:18:28", "f:18:39", "f:20:24"]


def test_a_chain_that_is_too_long_is_refused() -> None:
    steps = "".join(f"  s{n}: {{expert: e{n}, pass: [ok], then: s{n + 1}}}\n" for n in range(20))
    text = f"{ONE_BOARD}classifiers:\n  R: {{expert: r, pass: [ok], then: s0}}\nsteps:\n{steps}"
    with pytest.raises(RulesError, match="f:3:36: a chain of 22 steps: expected at most 16"):
        compile_rules(text + "  s20: {expert: e, pass: [ok]}\n", "f")


def test_a_cycle_of_thousands_of_steps_needs_no_recursion() -> None:
    steps = "".join(f"  s{n}: {{expert: e, pass: [ok], then: s{(n + 1) % 5000}}}\n" for n in range(5000))
    text = f"{ONE_BOARD}classifiers:\n  R: {{expert: r, pass: [ok], then: s0}}\nsteps:\n{steps}"
    with pytest.raises(RulesError, match="a cycle: s0 → s1 → s2"):
        compile_rules(text, "f")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "then: solder",
            "then: sodler",
            "f:8:71: `sodler` is not an entry of detectors or steps; did you mean `solder`?",
        ),
        ("smear: wash", "smear: wsh", "f:18:19: `wsh` is not an entry of detectors or steps; did you mean `wash`?"),
        (
            "then: solder",
            "then: yolo-solder",
            "f:8:71: `yolo-solder` is not an entry of detectors or steps but an expert; did you mean `solder`?",
        ),
        (
            "then: solder",
            "then: R*",
            "f:8:71: `R*` is not an entry of detectors or steps but a pattern of classifiers: a later classifier",
        ),
        (
            "then: solder",
            "then: zzz",
            "f:8:71: `zzz` is not an entry of detectors or steps; expected one of `solder`, `wash`",
        ),
        (
            "then: solder",
            "then: {ok: solder, '*': slder}",
            "f:8:89: `slder` is not an entry of detectors or steps; did you mean `solder`?",
        ),
    ],
)
def test_a_reference_to_nothing_is_a_mistake(old: str, new: str, expected: str) -> None:
    assert len(found := mistakes(old, new)) == 1
    assert found[0].startswith(expected)


def test_one_name_for_a_detector_and_a_step_is_a_mistake() -> None:
    assert mistakes("  wash: {", "  solder: {expert: s, pass: [ok]}\n  wash: {") == [
        "f:20:3: `solder` is already the name of an entry of detectors, line 13: expected another name"
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "expert: resistor",
            "expert: resistr",
            "f:10:13: no expert `resistr` in the catalog; did you mean `resistor`?",
        ),
        (
            "QFP64: [",
            "QFP6: [",
            "f:8:18: no expert `QFP6` in the catalog (for component `QFP6` of board `mainboard-a`, line 6)",
        ),
        ("expert: wash", "expert: Wash", "f:20:18: no expert `Wash` in the catalog; did you mean `wash`?"),
        (
            "expert: yolo-solder",
            'expert: "yolo-{component}"',
            "f:14:13: no expert `yolo-QFP64` in the catalog (for component `QFP64` of board `mainboard-a`, line 6)",
        ),
    ],
)
def test_an_expert_that_the_catalog_lacks_is_a_mistake(old: str, new: str, expected: str) -> None:
    assert len(found := mistakes(old, new, CATALOG)) == 1
    assert found[0].startswith(expected)


def test_a_template_is_checked_for_each_component_of_each_recipe() -> None:
    found = mistakes("QFP64: [U1, U2, U7]\n", "QFP64: 1\n      QFP100: 1\n      QFP32: 2\n", CATALOG)
    assert [line.split("`")[1] for line in found] == ["QFP100", "QFP32"]
    assert all(line.startswith("f:10:18: ") for line in found)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[ok, turned]", "[ok, turnd]", "f:11:16: expert `resistor` has no label `turnd`; did you mean `turned`?"),
        ("pass: [ok],", "pass: [OK],", "f:8:40: expert `QFP64` has no label `OK`; did you mean `ok`?"),
        (
            "then: solder",
            "then: {okk: solder}",
            "f:8:72: expert `QFP64` has no label `okk`; did you mean `ok`?",
        ),
        (
            "{bridge: 0.40",
            "{brigde: 0.40",
            "f:15:15: expert `yolo-solder` has no label `brigde`; did you mean `bridge`?",
        ),
        (
            "    fail_on:",
            "    review_on: {viod: 0.2}\n    fail_on:",
            "f:15:17: expert `yolo-solder` has no label `viod`",
        ),
        ("joint: {", "joints: {", "f:17:7: expert `yolo-solder` has no label `joints`; did you mean `joint`?"),
        ("{smear:", "{smaer:", "f:18:12: expert `yolo-solder` has no label `smaer`; did you mean `smear`?"),
        ("[clean]", "[cleen]", "f:20:31: expert `wash` has no label `cleen`; did you mean `clean`?"),
        (
            "{tombstone:",
            "{tombstoned:",
            "f:21:11: no expert of these rules has the label `tombstoned`; did you mean `tombstone`?",
        ),
        (
            "{tombstone:",
            "{mising_joint:",
            "f:21:11: no expert of these rules has the label `mising_joint`; did you mean `missing_joint`?",
        ),
    ],
)
def test_a_label_that_the_expert_does_not_have_is_a_mistake(old: str, new: str, expected: str) -> None:
    assert len(found := mistakes(old, new, CATALOG)) == 1
    assert found[0].startswith(expected)


def test_what_can_be_wrong_with_a_required_label_may_have_a_code() -> None:
    assert mistakes("{tombstone: D101", "{missing_joint: D1, extra_joint: D2", CATALOG) == []


def test_a_label_that_several_experts_of_a_template_lack_is_one_mistake() -> None:
    catalog = CATALOG | {"QFP32": CATALOG["QFP64"]}
    text = RULES.replace("QFP64: [U1, U2, U7]\n", "QFP64: 1\n      QFP32: 2\n").replace("pass: [ok],", "pass: [okay],")
    with pytest.raises(RulesError) as raised:
        compile_rules(text, "f", catalog)
    assert [str(problem) for problem in raised.value.problems] == [
        "f:9:40: expert `QFP64` has no label `okay` (nor have 1 others); did you mean `ok`?"
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "expert: resistor",
            "expert: yolo-solder",
            "f:10:13: expert `yolo-solder` is a detector, expected a classifier; a detector goes under `detectors:`",
        ),
        (
            "expert: yolo-solder",
            "expert: resistor",
            "f:14:13: expert `resistor` is a classifier, expected a detector; a classifier goes under `classifiers:`",
        ),
        (
            "expert: wash",
            "expert: yolo-solder",
            "f:20:18: expert `yolo-solder` is a detector, expected a classifier; a detector goes under `detectors:`",
        ),
    ],
)
def test_a_detector_as_classifier_is_a_mistake_and_so_is_the_other_way_round(old: str, new: str, expected: str) -> None:
    assert len(found := mistakes(old, new, CATALOG)) == 1
    assert found[0].startswith(expected)


def test_one_expert_in_both_uses_is_seen_without_a_catalog() -> None:
    assert mistakes("expert: resistor", "expert: yolo-solder") == [
        "f:10:13: expert `yolo-solder` is used as a detector in line 14: expected a classifier"
    ]


@pytest.mark.parametrize(
    ("old", "new", "place", "found"),
    [
        ("review_below: 0.90", "review_below: 1.2", "f:8:59", "1.2"),
        ("review_below: 0.90", "review_below: -0.1", "f:8:59", "-0.1"),
        ("review_below: 0.90", "review_below: high", "f:8:59", "high"),
        ("review_below: 0.90", "review_below: .nan", "f:8:59", ".nan"),
        ("review_below: 0.90", "review_below: true", "f:8:59", "true"),
        ("bridge: 0.40", "bridge: 40", "f:15:23", "40"),
        ("max: 70", "max: 70, confidence: 2", "f:17:45", "2"),
        ("pass: [clean]", "pass: [clean], pass_rate: 95", "f:20:50", "95"),
    ],
)
def test_a_threshold_outside_0_to_1_is_a_mistake(old: str, new: str, place: str, found: str) -> None:
    assert mistakes(old, new) == [f"{place}: expected a number from 0 to 1, found `{found}`"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("min: 64, max: 70", "min: 64, max: 7", "f:17:20: a count that cannot be: min 64 is more than max 7"),
        ("min: 64", "min: -1", "f:17:20: expected a count: a whole number from 0, found `-1`"),
        ("min: 64", "min: 1.5", "f:17:20: expected a count: a whole number from 0, found `1.5`"),
        ("min: 64, max: 70", "min: 0", "f:17:20: min 0 requires nothing: expected min of 1 or more, or a max"),
        ("R0402: 180", "R0402: 0", "f:5:14: expected a quantity: a whole number from 1 to 1000000, found `0`"),
        ("R0402: 180", "R0402: -5", "f:5:14: expected a quantity: a whole number from 1 to 1000000, found `-5`"),
        ("R0402: 180", "R0402: []", "f:5:14: expected at least one entry, found an empty list"),
        (
            "R0402: 180",
            "R0402: many",
            "f:5:14: expected a quantity (a whole number from 1) or a list of designators, found `many`",
        ),
        (
            "R0402: 180",
            "R0402:",
            "f:5:13: expected a quantity (a whole number from 1) or a list of designators, found nothing",
        ),
    ],
)
def test_a_count_that_cannot_be_is_a_mistake(old: str, new: str, expected: str) -> None:
    assert mistakes(old, new) == [expected]


def test_counts_are_checked_in_each_of_several_requirements() -> None:
    assert mistakes("joint: {min: 64, max: 70}", "joint: [{min: 1}, {min: 3, max: 2}]") == [
        "f:17:31: a count that cannot be: min 3 is more than max 2"
    ]


def test_a_designator_twice_in_one_component_is_a_mistake() -> None:
    assert mistakes("[U1, U2, U7]", "[U1, U2, U1]") == [
        "f:6:23: designator `U1` is already in line 6: expected once per board"
    ]


def test_a_designator_in_two_components_is_a_mistake() -> None:
    assert mistakes("R0402: 180", "R0402: [R1, U7]") == [
        "f:6:23: designator `U7` is already in line 5, `R0402`: expected once per board"
    ]


def test_a_designator_that_is_a_number_is_a_mistake() -> None:
    found = mistakes("[U1, U2, U7]", "[U1, 02]")
    assert len(found) == 1
    assert found[0].startswith("f:6:19: expected a designator: text of 1 to 128 characters")
    assert found[0].endswith(", found `02`; put it in quotes")


def test_a_key_that_is_there_twice_is_a_mistake() -> None:
    assert mistakes("QFP64: [", "R0402: [") == [
        "f:6:7: duplicate key `R0402`: it is already in line 5; keep one of them"
    ]


@pytest.mark.parametrize("limit", ["20", "0s", "-3s", "20 sec", "soon", "s", "1e3s", "169h", "[20s]", "true"])
def test_a_time_limit_that_is_no_duration_is_a_mistake(limit: str) -> None:
    assert len(found := mistakes("time_limit: 20s", f"time_limit: {limit}")) == 1
    assert found[0].startswith("f:3:17: expected a duration above 0 and to 168h, with its unit: 500ms, 20s, 2m or 1h")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[ok, turned]", "[]", "f:9:3: no image can pass `R*`: expected labels such as `pass: [ok]`"),
        ("[ok, turned]", "[ok, '*']", "f:11:16: expected a label: text of 1 to 128 characters; `*` for all labels"),
        ("[ok, turned]", "[ok, ok]", "f:11:16: label `ok` is already in this list: expected each once"),
        ("[ok, turned]", "ok", "f:11:11: expected a list, found `ok`"),
        ("pass: [ok],", "pass: [ok], on_clear: x,", "f:8:55: expected 'pass' or 'review', found `x`"),
        (" then: {smear: wash}", " then: [wash]", "f:18:11: expected the name of an entry of detectors or steps, or a"),
        (" then: {smear: wash}", " then: {}", "f:18:11: expected at least one entry, found an empty mapping"),
        ("fail_on: {bridge: 0.40, void: 0.55}", "fail_on: [bridge]", "f:15:14: expected a mapping"),
        ('expert: "{component}"', "expert: {component}", "f:8:18: expected the name of an expert, in quotes where it"),
        ('"{component}"', '"{compnent}"', "f:8:18: expected the name of an expert, with no braces but those of"),
        ("defects: {", "defects: {void: 207, ", "f:21:17: expected a defect code: text of 1 to 128 characters"),
        ("max: 70", "region: [0, 0, 2, 1]", "f:17:32: expected [x1, y1, x2, y2] in fractions of the image"),
        ("max: 70", "region: [0.5, 0, 0.5, 1]", "f:17:32: expected [x1, y1, x2, y2] in fractions of the image"),
        ("max: 70", "position: {at: [0, 2], tolerance: 1}", "f:17:39: expected [x, y] in fractions of the image"),
        ("max: 70", "position: {at: [0, 1], tolerance: 0}", "f:17:58: expected a fraction of the image's longer side"),
        ("max: 70", "position: {at: [0, 1]}", "f:17:24: missing key `tolerance`"),
        (
            "max: 70",
            "region: [0, 0, 0.5, 0.5], position: {at: [0.9, 0.1], tolerance: 0.1}",
            "f:17:65: expected a point inside this entry's region",
        ),
        ("time_limit: 20s", "share: 0", "f:3:12: expected a number above 0"),
        ("time_limit: 20s", "extras: yes", "f:3:13: expected 'allow' or 'refuse', found `yes`"),
        ("    components:\n", "    x:\n", "f:2:3: missing key `components`"),
    ],
)
def test_values_of_a_wrong_shape_are_mistakes(old: str, new: str, expected: str) -> None:
    assert any(line.startswith(expected) for line in mistakes(old, new)), mistakes(old, new)


def test_a_detector_that_decides_nothing_is_a_mistake() -> None:
    assert mistakes("steps:\n", "  idle: {expert: idle}\nsteps:\n") == [
        "f:19:3: detector `idle` decides nothing: expected at least one of fail_on, review_on, require, then"
    ]


def test_a_review_threshold_that_can_never_apply_is_a_mistake() -> None:
    assert mistakes("    require:", "    review_on: {bridge: 0.6}\n    require:") == [
        "f:16:25: expected less than the 0.4 from which `bridge` fails (line 15): at 0.6 it can never be a review"
    ]


def test_branches_without_pass_labels_need_somebody_to_pass() -> None:
    found = mistakes("pass: [ok, turned]", "then: {odd: solder}")
    assert len(found) == 1
    assert found[0].startswith(
        "f:9:3: no image can pass `R*`: expected labels such as `pass: [ok]`, or `on_clear: pass`"
    )
    assert mistakes("pass: [ok, turned]", "then: {odd: solder}\n    on_clear: pass") == []


def test_all_mistakes_come_at_once_in_the_order_of_the_file() -> None:
    text = RULES
    for old, new in [
        ("20s", "20"),
        ("R0402: 180", "R0402: 0"),
        ("U7]", "U1]"),
        ("0.90, then: solder", "9, thn: solder"),
        ("[ok, turned]", "[ok, turnd]"),
        ("void: 0.55", "void: 55"),
        ("min: 64", "min: 80"),
        ("smear: wash", "smear: wahs"),
        ("[clean]}", "[cleen]}"),
    ]:
        assert old in text
        text = text.replace(old, new, 1)
    with pytest.raises(RulesError) as raised:
        compile_rules(text, "f", CATALOG)
    places = [(problem.line, problem.column) for problem in raised.value.problems]
    assert places == [(3, 17), (5, 14), (6, 23), (8, 59), (8, 62), (11, 16), (15, 35), (17, 20), (18, 19), (20, 31)]
    assert str(raised.value).count("\n") == 9


def test_a_wrong_entry_does_not_make_its_components_look_unrouted() -> None:
    found = mistakes("QFP*: {expert:", "QFP*: {nonsense: 1, expert:", CATALOG)
    assert len(found) == 1
    assert found[0].startswith(
        "f:8:10: unknown key `nonsense`; expected one of `expert`, `pass`, `review_below`, `then`"
    )
    assert len(mistakes("  QFP*: {expert:", "  QFP*: 3 #", CATALOG)) == 1


def test_text_that_is_not_yaml_is_one_mistake() -> None:
    assert len(found := mistakes("QFP64: [", "QFP64: ]")) == 1
    assert found[0].startswith("f:6:")
