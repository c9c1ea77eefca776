"""A verdict judged once more, from the recorded answers and the kept rules, by the very functions that judge live.

Also what each part of a rule says of an answer is asked of `judge`: with the rule cut down to that part. So no sentence
of an explanation can say something else than the verdict does.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from experts.spec import Detection
from routing_rules.compile import RulesError, compile_rules
from routing_rules.document import Document, KeyPath, read_yaml_text
from routing_rules.judge import Seen
from routing_rules.routes import (
    ANY_LABEL,
    ClassifierStep,
    DetectorStep,
    Judgement,
    Requirement,
    Step,
    Verdict,
    chain,
    judge,
)
from tools.query.explain.record import Record, Row

Size = tuple[int, int]
_UNJUDGED: Verdict = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one part of a rule says of an answer, with its line in the rules' text (None: a default says it)."""

    text: str
    line: int | None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Traced:
    """One step: the rule, its line, what it says of the answer, and the verdict of the chain behind it.

    `is_below`: the surest box of a detector stays under the limit that the rule sets for it.
    """

    rule: str
    line: int
    findings: tuple[Finding, ...]
    alone: Judgement
    so_far: Judgement
    onward: str
    is_detector: bool = False
    is_below: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The step that came next and gave no answer."""

    rule: str
    line: int
    expert: str


@dataclass(frozen=True, slots=True)
class Retraced:
    """`gap` says why the verdict cannot be judged once more, `contradiction` where it is not what the rules give."""

    steps: tuple[Traced, ...] = ()
    verdict: Verdict | None = None
    defect: str | None = None
    gap: str | None = None
    contradiction: str | None = None
    ended_at: Ended | None = None

    @property
    def agrees(self) -> bool:
        return self.verdict is not None and self.contradiction is None and self.gap is None


@dataclass(frozen=True, slots=True)
class Way:
    """The rules of an image as they are kept, and where its chain begins; `gap` where they cannot be had."""

    document: Document | None
    first: Step | None
    gap: str | None = None

    @property
    def places_boxes(self) -> bool:
        """Whether a rule on it asks where boxes lie, so that the picture's size is needed."""
        return self.first is not None and any(
            requirement.is_placed
            for step in chain(self.first)
            if isinstance(step, DetectorStep)
            for requirement in step.require
        )


def way_of(record: Record) -> Way:
    """Read the kept text of the rules that the image was judged by."""
    version = record.inspection["rules_version"]
    if record.rules is None:
        return Way(None, None, f"the text of rules version {version} is no longer in the database")
    text = record.rules["text"]
    if not hashlib.sha256(text.encode()).hexdigest().startswith(version):
        return Way(None, None, f"the text kept for rules version {version} is another one: its sha256 is not that")
    document = read_yaml_text(text, f"rules {version}")
    try:
        routes = compile_rules(document)
    except RulesError as error:
        return Way(None, None, f"this version of CoServe cannot read those rules any more: {error.problems[0]}")
    return Way(document, routes.first_step(record.board["board_type"], record.inspection["component"]))


def retrace(record: Record, way: Way, size: Size | None, *, is_size_known: bool = True) -> Retraced:
    """`size` is (width, height) of the picture; with `is_size_known` false it is a guess, or missing."""
    if way.document is None:
        return Retraced(gap=way.gap)
    step, judgement = way.first, None
    traced: list[Traced] = []
    for number, row in enumerate(record.stages):
        if step is None or step.expert != row["expert"]:
            wanted = f"the expert {step.expert}" if step else "no expert"
            return Retraced(
                tuple(traced), contradiction=f"step {number} was answered by {row['expert']}: the rules name {wanted}"
            )
        boxes = [_seen(box) for box in record.boxes[row["step"]]]
        alone = judge(step, row["label"], row["confidence"], boxes, None, size)
        judgement = judge(step, row["label"], row["confidence"], boxes, judgement, size)
        rule = _rule_of(way.document, step, number)
        if isinstance(step, ClassifierStep):
            findings = tuple(_label_findings(rule, step, row))
        else:
            findings = (*_box_findings(rule, step, boxes, size), *_counts(rule, step, boxes, size))
        onward = _onward(alone, judgement, is_first=number == 0)
        below = isinstance(step, DetectorStep) and _is_below(step, boxes, size)
        is_detector = isinstance(step, DetectorStep)
        traced.append(Traced(rule.name, rule.line(), findings, alone, judgement, onward, is_detector, below))
        step = judgement.next
    found = _compared(record, tuple(traced), judgement, is_size_known=is_size_known)
    if step is None or (record.inspection["status"] == "done" and record.inspection["reason"] is None):
        return found
    rule = _rule_of(way.document, step, len(traced))
    return replace(found, ended_at=Ended(rule.name, rule.line(), step.expert))


def _rule_of(document: Document, step: Step, number: int) -> "_Rule":
    section = "classifiers" if number == 0 else "detectors" if isinstance(step, DetectorStep) else "steps"
    return _Rule(document, (section, step.name))


def _compared(
    record: Record, traced: tuple[Traced, ...], judgement: Judgement | None, *, is_size_known: bool
) -> Retraced:
    inspection = record.inspection
    if inspection["status"] != "done":
        return Retraced(traced)
    stored = (inspection["verdict"], inspection["defect"])
    if inspection["reason"] is not None:
        # What was not judged to its end is unknown, whatever its answers were.
        verdict, defect, unfinished = _UNJUDGED, None, None
    elif judgement is None:
        return Retraced(traced, contradiction="it has a verdict, and no expert's answer is stored")
    else:
        verdict, defect, unfinished = judgement.verdict, judgement.defect, judgement.next
    if (verdict, defect) == stored and unfinished is None:
        return Retraced(traced, verdict, defect)
    said = f"the rules give {_shown(verdict, defect)}" + (f", and go on to `{unfinished.name}`" if unfinished else "")
    contradiction = f"{said}; stored is {_shown(*stored)}"
    if not is_size_known:
        return Retraced(
            traced, gap=f"where its boxes lie cannot be judged: the picture is not kept, and so its size ({said})"
        )
    return Retraced(traced, verdict, defect, contradiction=contradiction)


def _shown(verdict: str, defect: str | None) -> str:
    return f"{verdict} {defect}" if defect else verdict


def _seen(box: Row) -> Detection:
    return Detection(box["label"], box["confidence"], (box["x1"], box["y1"], box["x2"], box["y2"]))


class _Rule:
    """An entry of the rules' text: its name as one would look for it, and the lines of its keys."""

    def __init__(self, document: Document, path: KeyPath) -> None:
        self._document, self._path = document, path
        self.name = f'{path[0]}: "{path[1]}"'

    def line(self, *keys: str) -> int:
        return self._document.where((*self._path, *keys), key=True)[0]

    def line_if_said(self, *keys: str) -> int | None:
        """None where the text does not have the key, and its default counts."""
        return self.line(*keys) if self._document.value((*self._path, *keys)) is not None else None

    def defect_line(self, label: str) -> int | None:
        path = ("defects", label)
        return self._document.where(path, key=True)[0] if self._document.value(path) is not None else None


def _label_findings(rule: _Rule, step: ClassifierStep, row: Row) -> Iterator[Finding]:
    label, confidence = row["label"], row["confidence"]
    if label is None:
        yield Finding("it gave no label, which is never sure", rule.line())
        return
    passing = ", ".join(step.pass_labels) or "none"
    if label in step.pass_labels:
        yield Finding(f"{label} is a label that passes ({passing})", rule.line_if_said("pass"))
    else:
        yield Finding(f"{label} is no label that passes ({passing})", rule.line_if_said("pass"))
    # Sure is what would pass if the label did.
    is_sure = judge(replace(step, pass_labels=(label,)), label, confidence, (), None).verdict == "pass"
    said = "none" if confidence is None else f"{confidence:.6g}"
    compared = "is not below" if is_sure else "is below" if confidence is not None else "is not above"
    meant = "sure" if is_sure else "unsure, so at best a person's look"
    yield Finding(
        f"its confidence {said} {compared} review_below {step.review_below:g}: {meant}",
        rule.line_if_said("review_below"),
    )
    if label not in step.pass_labels and label in step.codes:
        yield Finding(f"the defect code of {label} is {step.codes[label]}", rule.defect_line(label))
    if step.goes_to(label) is not None:
        yield Finding(f"for {label}, `then` names `{step.goes_to(label).name}`", rule.line_if_said("then"))  # type: ignore[union-attr]


def _by_themselves(step: DetectorStep) -> DetectorStep:
    return replace(step, require=(), branches=(), otherwise=None)


def _is_below(step: DetectorStep, boxes: Sequence[Detection], size: Size | None) -> bool:
    """Whether the rule has a limit for the surest box, and the box stays under it."""
    if not boxes:
        return False
    best = max(boxes, key=lambda box: box.confidence)
    limits = {**dict(step.fail_on), **dict(step.review_on)}
    has_limit = best.label in limits or ANY_LABEL in limits
    return has_limit and judge(_by_themselves(step), None, None, [best], None, size).verdict == "pass"


def _box_findings(rule: _Rule, step: DetectorStep, boxes: Sequence[Detection], size: Size | None) -> Iterator[Finding]:
    """What boxes say by themselves, those of one label and verdict together, the most confident first."""
    by_themselves = _by_themselves(step)
    kinds: dict[tuple[str, Verdict], list[float]] = {}
    for box in sorted(boxes, key=lambda box: -box.confidence):
        verdict = judge(by_themselves, None, None, [box], None, size).verdict
        kinds.setdefault((box.label, verdict), []).append(box.confidence)
    if not boxes:
        yield Finding("it found no box", None)
    for (label, verdict), confidences in kinds.items():
        many = f"{len(confidences)} × {label} ({confidences[0]:.6g}"
        many += f" to {confidences[-1]:.6g})" if len(confidences) > 1 else ")"
        thresholds: list[str] = []
        line = None
        for key, listed in (("fail_on", dict(step.fail_on)), ("review_on", dict(step.review_on))):
            named = label if label in listed else ANY_LABEL
            if named in listed:
                thresholds.append(f"{key} {named}: {listed[named]:g}")
                line = line or rule.line_if_said(key, named)
        if thresholds and step.review_below:
            thresholds.append(f"review_below: {step.review_below:g}")
        held = f"held against {', '.join(thresholds)}" if thresholds else "no threshold is set for it"
        yield Finding(f"{many}: {held}", line, verdict)


def _counts(rule: _Rule, step: DetectorStep, boxes: Sequence[Detection], size: Size | None) -> Iterator[Finding]:
    for requirement in step.require:
        alone = replace(step, fail_on=(), review_on=(), require=(requirement,), branches=(), otherwise=None)
        found = judge(alone, None, None, boxes, None, size)
        seen: Sequence[Seen] = [box for box in boxes if box.label == requirement.label]
        where = ""
        if requirement.is_placed:
            where = " in its place" if size is not None else ", and where they lie is not known"
            seen = [box for box in seen if size is None or requirement.holds(box.box, size)]
        sure = sum(box.confidence >= requirement.confidence for box in seen)
        counted = f"{sure} sure" + (f" and {len(seen) - sure} unsure" if len(seen) > sure else "")
        named = "" if found.defect is None else f": {found.defect}"
        yield Finding(
            f"required {_wanted(requirement)} {requirement.label}, found {counted}{where}{named}",
            rule.line_if_said("require", requirement.label),
            found.verdict,
        )


def _wanted(requirement: Requirement) -> str:
    if requirement.maximum is None:
        return f"at least {requirement.minimum}"
    if requirement.minimum == requirement.maximum:
        return f"{requirement.minimum}"
    return f"{requirement.minimum} to {requirement.maximum}"


def _onward(alone: Judgement, so_far: Judgement, *, is_first: bool) -> str:
    chain = "" if is_first else f", {_shown(so_far.verdict, so_far.defect)} for the whole chain"
    said = f"{_shown(alone.verdict, alone.defect)}{chain}"
    if so_far.next is not None:
        return f"{said}; it goes on to `{so_far.next.name}`"
    if so_far.verdict == "fail" and alone.next is not None:
        return f"{said}; a failure ends the chain"
    return f"{said}; the chain ends here"
