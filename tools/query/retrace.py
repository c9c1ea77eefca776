"""A verdict judged again, from the stored answers and rules, by the functions that judge live.

What decided a step is said in the words of `routing_rules.reasons`, as on the pages.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from daemon.storage.image_archive import as_sent
from experts.errors import ImageHeaderError
from experts.spec import Detection
from experts.vision.structure import check_structure
from routing_rules.compile import RulesError, compile_rules
from routing_rules.document import Document, read_yaml_text
from routing_rules.reasons import JudgedAnswer, StoredAnswer, deciding_reason, judge_chain
from routing_rules.routes import DetectorStep, Judgement, Routes, Step, VerdictName, chain
from tools.query.reading import InspectionRecord, JudgedImage, Row

#: Width and height in pixels.
PictureSize = tuple[int, int]
_MAX_PIXELS = 2**31


@dataclass(frozen=True, slots=True)
class RetracedStep:
    """One step: its rule and line, its judgement `alone`, and that of the whole `chain` so far.

    `findings` say what decided a step that did not pass: `text`, `line` in the rules, `verdict`.
    """

    rule: str
    line: int
    findings: tuple[dict[str, Any], ...]
    alone: Judgement
    chain: Judgement
    onward: str
    is_detector: bool = False


@dataclass(frozen=True, slots=True)
class RetracedVerdict:
    """`gap` says why the verdict cannot be judged again, `contradiction` how the rules' verdict differs.

    `unanswered` is the rule, line and expert of a next step without an answer.
    """

    steps: tuple[RetracedStep, ...] = ()
    verdict: VerdictName | None = None
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
        return check_structure(payload, _MAX_PIXELS, raw_shape=shape)
    except (OSError, ValueError, ImageHeaderError):
        return None


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
    steps = tuple(_retraced_step(document, n, part, size) for n, part in enumerate(judged if with_steps else ()))
    if len(judged) < len(answers):
        expected = f"the expert {step.expert}" if step else "no expert"
        answered = f"step {len(judged)} was answered by {answers[len(judged)].expert}"
        return RetracedVerdict(steps, contradiction=f"{answered}: the rules name {expected}")
    verdict = _compared(record, steps, judged[-1][2] if judged else None, is_size_known=is_size_known)
    is_judged = record.inspection["status"] == "done" and record.inspection["reason"] is None
    if not with_steps or step is None or is_judged:
        return verdict
    rule, line = _rule_of(document, step, len(steps))
    return replace(verdict, unanswered={"rule": rule, "line": line, "expert": step.expert})


def _stored_answer(row: Row) -> StoredAnswer:
    boxes = [
        Detection(box["label"], box["confidence"], (box["x1"], box["y1"], box["x2"], box["y2"])) for box in row["boxes"]
    ]
    return StoredAnswer(row["expert"], row["label"], row["confidence"], boxes)


def _retraced_step(document: Document, number: int, judged: JudgedAnswer, size: PictureSize | None) -> RetracedStep:
    step, answer, so_far = judged
    alone = answer.judged(step, None, size)
    findings: tuple[dict[str, Any], ...] = ()
    if alone.verdict != "pass":
        text, keys = deciding_reason(step, answer, alone, size)
        findings = ({"text": text, "line": _rule_of(document, step, number, *keys)[1], "verdict": alone.verdict},)
    onward = _onward(alone, so_far, is_first=number == 0)
    return RetracedStep(
        *_rule_of(document, step, number), findings, alone, so_far, onward, isinstance(step, DetectorStep)
    )


def _rule_of(document: Document, step: Step, number: int, *keys: str) -> tuple[str, int]:
    """Return a step's entry in the rules, as a person looks for it, and the line of it or of a key of it."""
    section = "classifiers" if number == 0 else "detectors" if isinstance(step, DetectorStep) else "steps"
    return f'{section}: "{step.name}"', document.where((section, step.name, *keys), key=True)[0]


def _compared(
    record: JudgedImage, steps: tuple[RetracedStep, ...], judgement: Judgement | None, *, is_size_known: bool
) -> RetracedVerdict:
    inspection = record.inspection
    if inspection["status"] != "done":
        return RetracedVerdict(steps)
    stored = (inspection["verdict"], inspection["defect"])
    verdict: VerdictName = "unknown"
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


def _onward(alone: Judgement, so_far: Judgement, *, is_first: bool) -> str:
    whole = "" if is_first else f", {_shown(so_far.verdict, so_far.defect)} for the whole chain"
    verdict = f"{_shown(alone.verdict, alone.defect)}{whole}"
    if so_far.next is not None:
        return f"{verdict}; it goes on to `{so_far.next.name}`"
    if so_far.verdict == "fail" and alone.next is not None:
        return f"{verdict}; a failure ends the chain"
    return f"{verdict}; the chain ends here"
