"""A verdict judged again, from the stored answers and rules, by the functions that judge live."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from daemon.storage.image_archive import as_sent
from experts.errors import ImageHeaderError
from experts.spec import Detection
from experts.vision.structure import check_structure
from routing_rules.compile import RulesError, compile_rules
from routing_rules.document import Document, read_yaml_text
from routing_rules.reasons import JudgedAnswer, StoredAnswer, judge_chain
from routing_rules.routes import DetectorStep, Routes, Step, VerdictName, chain, guarded
from tools.query.reading import JudgedImage, Row

#: Width and height in pixels.
PictureSize = tuple[int, int]
_MAX_PIXELS = 2**31


@dataclass(frozen=True, slots=True)
class RetracedVerdict:
    """`gap` says why the verdict cannot be judged again, `contradiction` how the rules' verdict differs.

    `judged` are the stored answers with their judgements, `next` is the step after them. `size` is the kept picture's
    if a rule depends on where boxes lie.
    """

    verdict: VerdictName | None = None
    defect: str | None = None
    gap: str | None = None
    contradiction: str | None = None
    judged: Sequence[JudgedAnswer] = ()
    next: Step | None = None
    size: PictureSize | None = None


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

    def first_step(self, record: JudgedImage) -> Step | None:
        if self.routes is None:
            return None
        return self.routes.first_step(record.board["board_type"], record.inspection["component"])

    def places_boxes(self, record: JudgedImage) -> bool:
        """Return True if a rule of the chain depends on places of boxes, and so on the picture's size."""
        first = self.first_step(record)
        detectors = [step for step in chain(first) if isinstance(step, DetectorStep)] if first is not None else []
        return any(requirement.is_placed for step in detectors for requirement in step.require)


def _picture_size(images: Path, image_path: str | None) -> PictureSize | None:
    """Return the size in a kept picture's header; None without a sound picture."""
    if image_path is None:
        return None
    path = images.parent / image_path
    try:
        payload, shape = as_sent(path.read_bytes(), path.suffix)
        return check_structure(payload, _MAX_PIXELS, raw_shape=shape)
    except (OSError, ValueError, ImageHeaderError):
        return None


def retrace(record: JudgedImage, rules: StoredRules, images: Path) -> RetracedVerdict:
    """Judge the stored answers."""
    if rules.routes is None:
        return RetracedVerdict(gap=rules.gap)
    needs_size = rules.places_boxes(record)
    size = _picture_size(images, record.inspection["image_path"]) if needs_size else None
    answers = [_stored_answer(row) for row in record.stages]
    judged, step = judge_chain(rules.first_step(record), answers, size)
    if len(judged) < len(answers):
        expected = f"the expert {step.expert}" if step else "no expert"
        answered = f"step {len(judged)} was answered by {answers[len(judged)].expert}"
        return RetracedVerdict(contradiction=f"{answered}: the rules name {expected}", judged=judged, size=size)
    compared = _compared(record, judged, is_size_known=size is not None or not needs_size)
    return replace(compared, judged=judged, next=step, size=size)


def _stored_answer(row: Row) -> StoredAnswer:
    boxes = [
        Detection(box["label"], box["confidence"], (box["x1"], box["y1"], box["x2"], box["y2"])) for box in row["boxes"]
    ]
    return StoredAnswer(row["expert"], row["label"], row["confidence"], boxes)


def _compared(record: JudgedImage, judged: Sequence[JudgedAnswer], *, is_size_known: bool) -> RetracedVerdict:
    inspection = record.inspection
    if inspection["status"] != "done":
        return RetracedVerdict()
    stored = (inspection["verdict"], inspection["defect"])
    verdict: VerdictName = "unknown"
    defect, unfinished, guard = None, None, None
    if stored[0] != "unknown":  # else the chain was cut short, with any answers
        if not judged:
            return RetracedVerdict(contradiction="it has a verdict, and no expert's answer is stored")
        judgement = judged[-1][2]
        defect, unfinished = judgement.defect, judgement.next
        verdict, guard = guarded(judgement.verdict, (inspection["reason"] or "",))
        if guard != inspection["reason"]:
            return RetracedVerdict(contradiction=f"{inspection['reason']} is for a pass, not {shown(verdict, defect)}")
    if (verdict, defect) == stored and unfinished is None:
        return RetracedVerdict(verdict, defect)
    result = f"the rules give {shown(verdict, defect)}" + (f", and go on to `{unfinished.name}`" if unfinished else "")
    if not is_size_known:
        gap = f"where its boxes lie cannot be judged: the picture is not kept, and so its size ({result})"
        return RetracedVerdict(gap=gap)
    return RetracedVerdict(verdict, defect, contradiction=f"{result}; stored is {shown(*stored)}")


def shown(verdict: str, defect: str | None) -> str:
    return f"{verdict} {defect}" if defect else verdict
