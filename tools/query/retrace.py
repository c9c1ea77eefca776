"""A verdict judged again, from the stored answers and rules, by the functions that judge live.

The finding of each part of a rule also comes from `judge`, with the rule cut down to that part: no sentence of an
explanation can contradict the verdict.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from daemon.storage.image_archive import as_sent
from experts.errors import ImageHeaderError
from experts.spec import Detection
from experts.vision.structure import check_structure
from routing_rules.compile import RulesError, compile_rules
from routing_rules.document import Document, KeyPath, read_yaml_text
from routing_rules.reasons import (
    JudgedAnswer,
    StoredAnswer,
    boxes_by_themselves,
    counted,
    judge_chain,
    requirement_alone,
    wanted,
)
from routing_rules.routes import (
    ANY_LABEL,
    ClassifierStep,
    DetectorStep,
    Judgement,
    Routes,
    Seen,
    Step,
    Verdict,
    chain,
    judge,
    threshold,
)
from tools.query.reading import InspectionRecord, JudgedImage, Row

#: Width and height in pixels.
PictureSize = tuple[int, int]
_MAX_PIXELS = 2**31


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """The finding of one part of a rule about an answer, with its line in the rules' text (None: a default)."""

    text: str
    line: int | None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class RetracedStep:
    """One step: its rule and line, its findings, its judgement `alone`, and that of the whole `chain` so far."""

    rule: str
    line: int
    findings: tuple[RuleFinding, ...]
    alone: Judgement
    chain: Judgement
    onward: str
    is_detector: bool = False
    is_below: bool = False


@dataclass(frozen=True, slots=True)
class RetracedVerdict:
    """`gap` says why the verdict cannot be judged again, `contradiction` how the rules' verdict differs.

    `unanswered` is the rule, line and expert of a next step without an answer.
    """

    steps: tuple[RetracedStep, ...] = ()
    verdict: Verdict | None = None
    defect: str | None = None
    gap: str | None = None
    contradiction: str | None = None
    unanswered: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StoredRules:
    """The stored rules of one version; `gap` says why there are none."""

    document: Document | None = None
    routes: Routes | None = None
    gap: str | None = None

    @staticmethod
    def of(version: str, text: str | None) -> "StoredRules":
        if text is None:
            return StoredRules(gap=f"the text of rules version {version} is no longer in the database")
        if not hashlib.sha256(text.encode()).hexdigest().startswith(version):
            return StoredRules(gap=f"the text stored for rules version {version} was changed: its sha256 differs")
        document = read_yaml_text(text, f"rules {version}")
        try:
            return StoredRules(document, compile_rules(document))
        except RulesError as error:
            return StoredRules(gap=f"this version of CoServe cannot read those rules any more: {error.problems[0]}")

    @staticmethod
    def of_record(record: InspectionRecord) -> "StoredRules":
        text = None if record.rules is None else record.rules["text"]
        return StoredRules.of(record.inspection["rules_version"], text)

    def first_step(self, record: JudgedImage) -> Step | None:
        if self.routes is None:
            return None
        return self.routes.first_step(record.board["board_type"], record.inspection["component"])

    def places_boxes(self, record: JudgedImage) -> bool:
        """Return True if a rule of the chain depends on places of boxes, and so on the picture's size."""
        first = self.first_step(record)
        detectors = [step for step in chain(first) if isinstance(step, DetectorStep)] if first is not None else []
        return any(requirement.is_placed for step in detectors for requirement in step.require)


def picture_size(images: Path, image_path: str) -> PictureSize | None:
    """Return the size in a kept picture's header; None without a sound picture."""
    path = images.parent / image_path
    try:
        payload, shape = as_sent(path.read_bytes(), path.suffix)
        facts = check_structure(payload, _MAX_PIXELS, raw_shape=shape)
    except (OSError, ValueError, ImageHeaderError):
        return None
    return facts.width, facts.height


def retrace(
    record: JudgedImage,
    rules: StoredRules,
    size: PictureSize | None,
    *,
    is_size_known: bool = True,
    with_steps: bool = True,
) -> RetracedVerdict:
    """Judge the stored answers. With `is_size_known` false, `size` is a guess, or missing.

    Without `with_steps` only the verdict is judged: the parts' findings take most of the time.
    """
    document = rules.document
    if document is None:
        return RetracedVerdict(gap=rules.gap)
    answers = [_stored_answer(row) for row in record.stages]
    judged, step = judge_chain(rules.first_step(record), answers, size)
    parts = enumerate(judged) if with_steps else ()
    steps = tuple(_retraced_step(_rule_of(document, part[0], number), part, size) for number, part in parts)
    if len(judged) < len(answers):
        expected = f"the expert {step.expert}" if step else "no expert"
        answered = f"step {len(judged)} was answered by {answers[len(judged)].expert}"
        return RetracedVerdict(steps, contradiction=f"{answered}: the rules name {expected}")
    verdict = _compared(record, steps, judged[-1][2] if judged else None, is_size_known=is_size_known)
    is_judged = record.inspection["status"] == "done" and record.inspection["reason"] is None
    if not with_steps or step is None or is_judged:
        return verdict
    rule = _rule_of(document, step, len(steps))
    return replace(verdict, unanswered={"rule": rule.name, "line": rule.line(), "expert": step.expert})


def _stored_answer(row: Row) -> StoredAnswer:
    boxes = [
        Detection(box["label"], box["confidence"], (box["x1"], box["y1"], box["x2"], box["y2"])) for box in row["boxes"]
    ]
    return StoredAnswer(row["expert"], row["label"], row["confidence"], boxes)


def _retraced_step(rule: "_RuleText", judged: JudgedAnswer, size: PictureSize | None) -> RetracedStep:
    step, answer, so_far = judged
    alone = answer.judged(step, None, size)
    if isinstance(step, ClassifierStep):
        findings = tuple(_label_findings(rule, step, answer))
    else:
        findings = (*_box_findings(rule, step, answer.boxes, size), *_count_findings(rule, step, answer.boxes, size))
    return RetracedStep(
        rule=rule.name,
        line=rule.line(),
        findings=findings,
        alone=alone,
        chain=so_far,
        onward=_onward(alone, so_far, is_first=rule.is_first),
        is_detector=isinstance(step, DetectorStep),
        is_below=isinstance(step, DetectorStep) and _is_below(step, answer.boxes, size),
    )


def _rule_of(document: Document, step: Step, number: int) -> "_RuleText":
    section = "classifiers" if number == 0 else "detectors" if isinstance(step, DetectorStep) else "steps"
    return _RuleText(document, (section, step.name))


def _compared(
    record: JudgedImage, steps: tuple[RetracedStep, ...], judgement: Judgement | None, *, is_size_known: bool
) -> RetracedVerdict:
    inspection = record.inspection
    if inspection["status"] != "done":
        return RetracedVerdict(steps)
    stored = (inspection["verdict"], inspection["defect"])
    verdict: Verdict = "unknown"
    defect, unfinished = None, None
    if inspection["reason"] is None:  # else the chain was cut short: unknown, with any answers
        if judgement is None:
            return RetracedVerdict(steps, contradiction="it has a verdict, and no expert's answer is stored")
        verdict, defect, unfinished = judgement.verdict, judgement.defect, judgement.next
    if (verdict, defect) == stored and unfinished is None:
        return RetracedVerdict(steps, verdict, defect)
    result = f"the rules give {_shown(verdict, defect)}" + (f", and go on to `{unfinished.name}`" if unfinished else "")
    if not is_size_known:
        gap = f"where its boxes lie cannot be judged: the picture is not kept, and so its size ({result})"
        return RetracedVerdict(steps, gap=gap)
    return RetracedVerdict(steps, verdict, defect, contradiction=f"{result}; stored is {_shown(*stored)}")


def _shown(verdict: str, defect: str | None) -> str:
    return f"{verdict} {defect}" if defect else verdict


class _RuleText:
    """An entry of the rules' text: its name, as a person looks for it, and the lines of its keys."""

    def __init__(self, document: Document, path: KeyPath) -> None:
        self._document, self._path = document, path
        self.name = f'{path[0]}: "{path[1]}"'
        self.is_first = path[0] == "classifiers"

    def line(self, *keys: str) -> int:
        return self._document.where((*self._path, *keys), key=True)[0]

    def line_if_present(self, *keys: str) -> int | None:
        """Return None if the text lacks the key, so that its default counts."""
        return self.line(*keys) if self._document.value((*self._path, *keys)) is not None else None

    def defect_line(self, label: str) -> int | None:
        path = ("defects", label)
        return self._document.where(path, key=True)[0] if self._document.value(path) is not None else None


def _label_findings(rule: _RuleText, step: ClassifierStep, answer: StoredAnswer) -> Iterator[RuleFinding]:
    label, confidence = answer.label, answer.confidence
    if label is None:
        yield RuleFinding("it gave no label, which is never sure", rule.line())
        return
    passing = ", ".join(step.pass_labels) or "none"
    passes = "is a label that passes" if label in step.pass_labels else "is not a label that passes"
    yield RuleFinding(f"{label} {passes} ({passing})", rule.line_if_present("pass"))
    # An answer is sure if it would pass with a label that passes.
    is_sure = judge(replace(step, pass_labels=(label,)), label, confidence, (), None).verdict == "pass"
    shown = "none" if confidence is None else f"{confidence:.6g}"
    compared = "is not below" if is_sure else "is below" if confidence is not None else "is not above"
    meant = "sure" if is_sure else "below the limit, so a person must review it"
    yield RuleFinding(
        f"its confidence {shown} {compared} review_below {step.review_below:g}: {meant}",
        rule.line_if_present("review_below"),
    )
    if label not in step.pass_labels and label in step.codes:
        yield RuleFinding(f"the defect code of {label} is {step.codes[label]}", rule.defect_line(label))
    following = step.goes_to(label)
    if following is not None:
        yield RuleFinding(f"for {label}, `then` names `{following.name}`", rule.line_if_present("then"))


def _is_below(step: DetectorStep, boxes: Sequence[Seen], size: PictureSize | None) -> bool:
    """Return True if the surest box is below a limit of the rule."""
    if not boxes:
        return False
    best = max(boxes, key=lambda box: box.confidence)
    has_limit = any(threshold(limits, best.label) is not None for limits in (step.fail_on, step.review_on))
    return has_limit and judge(boxes_by_themselves(step), None, None, [best], None, size).verdict == "pass"


def _box_findings(
    rule: _RuleText, step: DetectorStep, boxes: Sequence[Seen], size: PictureSize | None
) -> Iterator[RuleFinding]:
    """Yield findings about boxes by themselves, one for each label and verdict, the most confident first."""
    by_themselves = boxes_by_themselves(step)
    kinds: dict[tuple[str, Verdict], list[float]] = {}
    for box in sorted(boxes, key=lambda box: -box.confidence):
        verdict = judge(by_themselves, None, None, [box], None, size).verdict
        kinds.setdefault((box.label, verdict), []).append(box.confidence)
    if not boxes:
        yield RuleFinding("it found no box", None)
    for (label, verdict), confidences in kinds.items():
        many = f"{len(confidences)} × {label} ({confidences[0]:.6g}"
        many += f" to {confidences[-1]:.6g})" if len(confidences) > 1 else ")"
        thresholds: list[str] = []
        line = None
        for key, listed in (("fail_on", dict(step.fail_on)), ("review_on", dict(step.review_on))):
            named = label if label in listed else ANY_LABEL
            if named in listed:
                thresholds.append(f"{key} {named}: {listed[named]:g}")
                line = line or rule.line_if_present(key, named)
        if thresholds and step.review_below:
            thresholds.append(f"review_below: {step.review_below:g}")
        limits = f"compared with {', '.join(thresholds)}" if thresholds else "no threshold is set for it"
        yield RuleFinding(f"{many}: {limits}", line, verdict)


def _count_findings(
    rule: _RuleText, step: DetectorStep, boxes: Sequence[Seen], size: PictureSize | None
) -> Iterator[RuleFinding]:
    for requirement in step.require:
        judgement = judge(requirement_alone(step, requirement), None, None, boxes, None, size)
        where = ""
        if requirement.is_placed:
            where = " in its place" if size is not None else ", and where they lie is not known"
        sure, unsure = counted(requirement, boxes, size)
        count = f"{sure} sure" + (f" and {unsure} unsure" if unsure else "")
        defect = "" if judgement.defect is None else f": {judgement.defect}"
        yield RuleFinding(
            f"required {wanted(requirement)} {requirement.label}, found {count}{where}{defect}",
            rule.line_if_present("require", requirement.label),
            judgement.verdict,
        )


def _onward(alone: Judgement, so_far: Judgement, *, is_first: bool) -> str:
    whole = "" if is_first else f", {_shown(so_far.verdict, so_far.defect)} for the whole chain"
    verdict = f"{_shown(alone.verdict, alone.defect)}{whole}"
    if so_far.next is not None:
        return f"{verdict}; it goes on to `{so_far.next.name}`"
    if so_far.verdict == "fail" and alone.next is not None:
        return f"{verdict}; a failure ends the chain"
    return f"{verdict}; the chain ends here"
