"""Every kind of mistake in rules: its line, its column, and the name that was meant."""

from dataclasses import replace

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
NO_ENTRY = "is not an entry of detectors or steps"
A_SHARE = "expected a number from 0 to 1"
AN_AMOUNT = "expected a quantity (a whole number from 1) or a list of designators"
AT_THE_RIGHT = "position: {at: [0.9, 0.1], tolerance: 0.1}"
DEFECTS = "defects: {tombstone: D101, bridge: D207}"
ALARM = f"{DEFECTS}\nalarms: {{it: "
A_WINDOW = "expected how far it looks back: to `200 boards`, to `1000 images`, or a duration to 168h such as 10m"
ON_THE_BOARD = "of board `mainboard-a`, line 6)"
IS_A_DETECTOR = "is a detector, expected a classifier; a detector goes under `detectors:`"


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


#: Spoilt rules by what is wrong with them: (the right text, the wrong text, how the one message about it begins).
MISTAKES = {
    "an unknown key, with the nearest right one": [
        ("boards:", "bords:", "f:1:1: unknown key `bords`; did you mean `boards`?"),
        ("max: 70", "maximum: 70", "f:17:24: unknown key `maximum`"),
        ("QFP*: {", "QFP*: {x: 1, ",
         "f:8:10: unknown key `x`; expected one of `expert`, `pass`, `review_below`, `then`"),
    ],
    "an entry without an expert": [
        ("    expert: resistor\n", "", "f:9:3: missing key `expert`"),
    ],
    "a component that no pattern matches": [
        ("R0402: 180", "r0402: 180", "f:5:7: no classifier pattern matches component `r0402`; the nearest is `R*`"),
        ("QFP64: [", "QFB64: [", "f:6:7: no classifier pattern matches component `QFB64`; the nearest is `QFP*`"),
    ],
    "a pattern of a wrong shape": [
        ("  R*:", '  "[QR]*":',
         "f:9:3: expected a pattern in which only * (any text) and ? (one character) are wild, no brackets"),
        ("  R*:", "  R**:", "f:9:3: expected a pattern with single stars: ** means no more than *, found `R**`"),
        ("  R*:", '  "":', "f:9:3: expected a pattern of component types such as QFP*"),
    ],
    "a reference to nothing": [
        ("then: solder", "then: sodler", f"f:8:71: `sodler` {NO_ENTRY}; did you mean `solder`?"),
        ("then: solder", "then: yolo-solder",
         f"f:8:71: `yolo-solder` {NO_ENTRY} but an expert; did you mean `solder`?"),
        ("then: solder", "then: R*", f"f:8:71: `R*` {NO_ENTRY} but a pattern of classifiers: a later classifier"),
    ],
    "a name or a key that is there twice": [
        ("  wash: {", "  solder: {expert: s, pass: [ok]}\n  wash: {",
         "f:20:3: `solder` is already the name of an entry of detectors, line 13: expected another name"),
        ("[U1, U2, U7]", "[U1, U2, U1]", "f:6:23: designator `U1` is already in line 6: expected once per board"),
        ("R0402: 180", "R0402: [R1, U7]",
         "f:6:23: designator `U7` is already in line 5, `R0402`: expected once per board"),
        ("QFP64: [", "R0402: [", "f:6:7: duplicate key `R0402`: it is already in line 5; keep one of them"),
    ],
    "an expert in two uses": [
        ("expert: resistor", "expert: yolo-solder",
         "f:10:13: expert `yolo-solder` is used as a detector in line 14: expected a classifier"),
    ],
    "a threshold outside 0 to 1": [
        ("review_below: 0.90", "review_below: 1.2", f"f:8:59: {A_SHARE}, found `1.2`"),
        ("review_below: 0.90", "review_below: .nan", f"f:8:59: {A_SHARE}, found `.nan`"),
    ],
    "an alarm that can never be raised, or that nobody could remember": [
        (DEFECTS, f"{ALARM}{{count: 4, same: [designator], within: 3 boards}}}}",
         "f:22:22: it can never be raised: expected at most 3, the boards of `within`"),
        (DEFECTS, f"{ALARM}{{count: 3, same: [designator], within: 600 images}}}}",
         "f:22:53: expected 546 images or fewer: the boards have 183 designators"),
        (DEFECTS, f'{ALARM}{{count: 3, component: "QFB*", within: 1h}}}}',
         "f:22:36: no component of `boards` matches `QFB*`; expected one of `R0402`, `QFP64`"),
    ],
    "an alarm of a wrong shape": [
        (DEFECTS, f"{ALARM}{{within: 3 boards}}}}", "f:22:10: missing key `count`"),
        (DEFECTS, f"{ALARM}{{count: 0, within: 1h}}}}", "f:22:22: expected a count: a whole number from 1 to 1000"),
        (DEFECTS, f"{ALARM}{{count: 1, within: 1h, verdict: pass}}}}",
         "f:22:46: expected 'fail', 'review' or 'unknown', found `pass`"),
        (DEFECTS, f"{ALARM}{{count: 1, within: 1h, same: [defekt]}}}}",
         "f:22:44: expected 'board_type', 'component', 'designator' or 'defect', found `defekt`"),
        (DEFECTS, f"{ALARM}{{count: 1, within: 200h}}}}", f"f:22:33: {A_WINDOW}, found `200h`"),
    ],
    "a count that cannot be": [
        ("min: 64, max: 70", "min: 64, max: 7", "f:17:20: a count that cannot be: min 64 is more than max 7"),
        ("{min: 64, max: 70}", "[{min: 1}, {min: 3, max: 2}]",
         "f:17:31: a count that cannot be: min 3 is more than max 2"),
        ("min: 64, max: 70", "min: 0", "f:17:20: min 0 requires nothing: expected min of 1 or more, or a max"),
        ("R0402: 180", "R0402: 0", "f:5:14: expected a quantity: a whole number from 1 to 1000000, found `0`"),
        ("R0402: 180", "R0402: many", f"f:5:14: {AN_AMOUNT}, found `many`"),
    ],
    "a value of a wrong shape": [
        ("[ok, turned]", "[]", "f:9:3: no image can pass `R*`: expected labels such as `pass: [ok]`"),
        ("[ok, turned]", "[ok, '*']", "f:11:16: expected a label: text of 1 to 128 characters; `*` for all labels"),
        ("[ok, turned]", "ok", "f:11:11: expected a list, found `ok`"),
        ("[U1, U2, U7]", "[U1, 02]", "f:6:19: expected a designator: text of 1 to 128 characters"),
        ("pass: [ok],", "pass: [ok], on_clear: x,", "f:8:55: expected 'pass' or 'review', found `x`"),
        (" then: {smear: wash}", " then: [wash]", "f:18:11: expected the name of an entry of detectors or steps, or a"),
        ('expert: "{component}"', "expert: {component}", "f:8:18: expected the name of an expert, in quotes where it"),
        ('"{component}"', '"{compnent}"', "f:8:18: expected the name of an expert, with no braces but those of"),
        ("max: 70", "region: [0, 0, 2, 1]", "f:17:32: expected [x1, y1, x2, y2] in fractions of the image"),
        ("max: 70", "position: {at: [0, 1], tolerance: 0}", "f:17:58: expected a fraction of the image's longer side"),
        ("max: 70", f"region: [0, 0, 0.5, 0.5], {AT_THE_RIGHT}",
         "f:17:65: expected a point inside this entry's region"),
        ("time_limit: 20s", "share: 0", "f:3:12: expected a number above 0"),
        ("time_limit: 20s", "extras: yes", "f:3:13: expected 'allow' or 'refuse', found `yes`"),
        ("    components:\n      R0402: 180\n      QFP64: [U1, U2, U7]\n", "", "f:2:3: missing key `components`"),
        ("  QFP*: {expert:", "  QFP*: 3 #", "f:8:9: expected a mapping"),
    ],
    "an entry that decides nothing": [
        ("steps:\n", "  idle: {expert: idle}\nsteps:\n",
         "f:19:3: detector `idle` decides nothing: expected at least one of fail_on, review_on, require, then"),
        ("    require:", "    review_on: {bridge: 0.6}\n    require:",
         "f:16:25: expected less than the 0.4 from which `bridge` fails (line 15): at 0.6 it can never be a review"),
        ("pass: [ok, turned]", "then: {odd: solder}",
         "f:9:3: no image can pass `R*`: expected labels such as `pass: [ok]`, or `on_clear: pass`"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [pytest.param(*row, id=f"{kind} {number}") for kind, rows in MISTAKES.items() for number, row in enumerate(rows)],
)
def test_every_mistake_is_reported_once_with_its_place(old: str, new: str, expected: str) -> None:
    (message,) = mistakes(old, new)
    assert message.startswith(expected)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("expert: resistor", "expert: resistr",
         "f:10:13: no expert `resistr` in the catalog; did you mean `resistor`?"),
        ("QFP64: [", "QFP6: [", f"f:8:18: no expert `QFP6` in the catalog (for component `QFP6` {ON_THE_BOARD}"),
        ("yolo-solder", '"yolo-{component}"',
         f"f:14:13: no expert `yolo-QFP64` in the catalog (for component `QFP64` {ON_THE_BOARD}"),
        ("[ok, turned]", "[ok, turnd]", "f:11:16: expert `resistor` has no label `turnd`; did you mean `turned`?"),
        ("{bridge: 0.40", "{brigde: 0.40",
         "f:15:15: expert `yolo-solder` has no label `brigde`; did you mean `bridge`?"),
        ("    fail_on:", "    review_on: {viod: 0.2}\n    fail_on:",
         "f:15:17: expert `yolo-solder` has no label `viod`"),
        ("joint: {", "joints: {", "f:17:7: expert `yolo-solder` has no label `joints`; did you mean `joint`?"),
        ("{tombstone:", "{tombstoned:",
         "f:21:11: no expert of these rules has the label `tombstoned`; did you mean `tombstone`?"),
        ("{tombstone:", "{mising_joint:",
         "f:21:11: no expert of these rules has the label `mising_joint`; did you mean `missing_joint`?"),
        ("expert: resistor", "expert: yolo-solder", f"f:10:13: expert `yolo-solder` {IS_A_DETECTOR}"),
        ("yolo-solder", "resistor",
         "f:14:13: expert `resistor` is a classifier, expected a detector; a classifier goes under `classifiers:`"),
    ],
)  # fmt: skip
def test_every_mistake_against_the_catalog_is_reported_once(old: str, new: str, expected: str) -> None:
    (message,) = mistakes(old, new, CATALOG)
    assert message.startswith(expected)


def test_sections_that_are_missing_are_named() -> None:
    assert mistakes(RULES, "") == [
        "f:1:1: no boards: expected at least one entry under `boards:`",
        "f:1:1: no classifiers: expected at least one entry under `classifiers:`",
    ]


@pytest.mark.parametrize(("first", "covered"), [('"*"', "R*"), ("R*", "R0402"), ("'?*'", "'*'"), ("'*0*'", "R*04*2")])
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


def test_every_cycle_is_found_once() -> None:
    messages = mistakes(
        "{smear: wash}", "{smear: wash, a: solder, b: solder}\n  x: {expert: x, then: y}\n  y: {expert: y, then: x}"
    )
    assert [problem.split(": ")[0] for problem in messages] == ["f:18:28", "f:18:39", "f:20:24"]


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


def test_a_template_is_checked_for_each_component_of_each_recipe() -> None:
    messages = mistakes("QFP64: [U1, U2, U7]\n", "QFP64: 1\n      QFP100: 1\n      QFP32: 2\n", CATALOG)
    assert [line.split("`")[1] for line in messages] == ["QFP100", "QFP32"]
    assert all(line.startswith("f:10:18: ") for line in messages)


def test_a_label_that_several_experts_of_a_template_lack_is_one_mistake() -> None:
    catalog = CATALOG | {"QFP32": CATALOG["QFP64"]}
    text = RULES.replace("QFP64: [U1, U2, U7]\n", "QFP64: 1\n      QFP32: 2\n").replace("pass: [ok],", "pass: [okay],")
    with pytest.raises(RulesError) as raised:
        compile_rules(text, "f", catalog)
    assert [str(problem) for problem in raised.value.problems] == [
        "f:9:40: expert `QFP64` has no label `okay` (nor have 1 others); did you mean `ok`?"
    ]


@pytest.mark.parametrize("limit", ["20", "0s", "-3s", "20 sec", "soon", "s", "1e3s", "169h", "[20s]", "true"])
def test_a_time_limit_that_is_no_duration_is_a_mistake(limit: str) -> None:
    (message,) = mistakes("time_limit: 20s", f"time_limit: {limit}")
    assert message.startswith("f:3:17: expected a duration above 0 and to 168h, with its unit: 500ms, 20s, 2m or 1h")


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


@pytest.mark.parametrize(
    ("old", "new", "place", "least"),
    [
        ("", "", "15:23", "0.4"),
        ("void: 0.55}", "void: 0.9}\n    review_on: {smear: 0.3}", "16:24", "0.3"),
        ("min: 64", "confidence: 0.45, min: 64", "17:27", "0.45"),
    ],
)
def test_a_threshold_below_the_confidence_floor_of_its_detector_is_a_mistake(
    old: str, new: str, place: str, least: str
) -> None:
    catalog = CATALOG | {"yolo-solder": replace(CATALOG["yolo-solder"], floor=0.8)}
    says = (
        "expert `yolo-solder` reports no box below 0.8, its confidence_floor in the catalog: expected 0.8 or more here"
    )
    assert f"f:{place}: {says}, or a floor of {least} or less" in mistakes(old, new, catalog)


def test_a_class_that_no_key_names_is_a_warning_unless_it_is_ignored() -> None:
    catalog = CATALOG | {"yolo-solder": ExpertLabels("detect", ("bridge", "void", "joint", "smear", "silk", "dust"))}
    (warning,) = compile_rules(RULES, "f", catalog).warnings
    assert warning.startswith(
        "f:13:3: no key names `silk`, `dust` of expert `yolo-solder`, so boxes of it decide nothing"
    )
    ignoring = RULES.replace("then: {smear: wash}", "then: {smear: wash}\n    ignore: [silk, dust]")
    assert compile_rules(ignoring, "f", catalog).warnings == ()
    assert mistakes("then: {", "ignore: [void]\n    then: {", catalog) == [
        "f:18:14: another key names `void`: expected one that none names"
    ]
    assert "expert `yolo-solder` has no label `dirt`" in mistakes("then: {", "ignore: [dirt]\n    then: {", catalog)[0]
