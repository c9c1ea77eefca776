"""`coserve explain`: the reasons for an image's verdict, judged again from the stored answers, in words.

`routing_rules.reasons` words what decided a step, here as on the pages.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from daemon.config.settings import Config
from daemon.storage.database.reviews import DAEMON
from daemon.units import count_text, printable
from routing_rules.reasons import REASONS, JudgedAnswer, deciding_reason
from routing_rules.routes import DetectorStep, Judgement, Step
from tools.experts.look import CatalogVersions
from tools.query.reading import InspectionName, InspectionRecord, Row, read_inspection
from tools.query.retrace import StoredRules, retrace, shown
from tools.terminal.console import console, print_json
from tools.terminal.open_line import opened, plant_time

_VERDICTS = {"pass": "passed", "fail": "failed", "review": "is for a person to look at", "unknown": "was not judged"}


def print_explanation(config: Path, name: InspectionName, *, as_json: bool) -> int:
    """Print why an inspection has its verdict; return 1 if the rules give another one than is stored."""
    with opened(config) as (settings, engine):
        record = read_inspection(engine, name)
    explanation = _Explanation(settings, record)
    lines = [printable(line) for line in explanation.in_words()]
    if as_json:
        print_json(explanation.document() | {"words": lines})
    else:
        console.print("\n".join(lines))
    return 1 if explanation.retraced.contradiction else 0


class _Explanation:
    """One image's rows and what the rules make of them, as a document and in words."""

    def __init__(self, settings: Config, record: InspectionRecord) -> None:
        self.record = record
        self._rules = StoredRules.of(record.inspection["rules_version"], (record.rules or {}).get("text"))
        self.retraced = retrace(record, self._rules, settings.images)
        self._today = CatalogVersions.from_catalog(settings.catalog)
        self._at = partial(plant_time, settings.plant.clock())
        judged = [self._step(number, part) for number, part in enumerate(self.retraced.judged)]
        self._stages = list(zip_longest(record.stages, judged))
        inspection, step = record.inspection, self.retraced.next
        is_judged = inspection["verdict"] not in {None, "unknown"}
        self._unanswered: dict[str, Any] | None = None
        if step is not None and not is_judged:
            rule, line = self._rule_of(step, len(judged))
            self._unanswered = {"rule": rule, "line": line, "expert": step.expert}

    def _rule_of(self, step: Step, number: int, *keys: str) -> tuple[str, int]:
        """Return a step's entry in the rules, as a person looks for it, and the line of it or of a key of it."""
        assert self._rules.document is not None
        section = "classifiers" if number == 0 else "detectors" if isinstance(step, DetectorStep) else "steps"
        return f'{section}: "{step.name}"', self._rules.document.where((section, step.name, *keys), key=True)[0]

    def _step(self, number: int, judged: JudgedAnswer) -> tuple[dict[str, Any], list[str]]:
        step, answer, so_far = judged
        alone, (rule, line) = answer.judged(step, None, self.retraced.size), self._rule_of(step, number)
        said = "nothing" if answer.label is None else answer.label
        if answer.label is not None and answer.confidence is not None:
            said += f", confidence {answer.confidence:.6g}"
        surest = isinstance(step, DetectorStep) and answer.label is not None
        words = [f"Step {number + 1}: by {rule} (line {line})"]
        words.append(f"  {answer.expert}{': its surest box is' if surest else ' answered'} {said}")
        findings: list[dict[str, Any]] = []
        if alone.verdict != "pass":
            text, keys = deciding_reason(step, answer, alone, self.retraced.size)
            at = self._rule_of(step, number, *keys)[1]
            findings.append({"text": text, "line": at, "verdict": alone.verdict})
            words.append(f"  it {text} → {alone.verdict} (line {at})")
        fields = {"rule": rule, "rule_line": line, "findings": findings}
        fields |= {"verdict": alone.verdict, "defect": alone.defect, "chain_verdict": so_far.verdict}
        fields["goes_on_to"] = so_far.next.name if so_far.next else None
        return fields, [*words, f"  = {_onward(alone, so_far, is_first=number == 0)}"]

    def document(self) -> dict[str, Any]:
        record, again = self.record, self.retraced
        agrees = again.verdict is not None and again.contradiction is None and again.gap is None
        of_line = {**record.inspection, "reviewer": DAEMON if record.inspection["verdict"] else None}
        final = record.reviews[-1] if record.reviews else of_line
        return {
            "inspection": record.inspection,
            "board": record.board,
            "rules": {
                "version": record.inspection["rules_version"],
                "loaded_at": (record.rules or {}).get("loaded_at"),
                "is_kept": record.rules is not None,
            },
            "stages": [self._stage_document(row) | (step[0] if step else {"rule": None}) for row, step in self._stages],
            "ended_at": self._unanswered,
            "recomputed": {name: getattr(again, name) for name in ("verdict", "defect", "gap", "contradiction")}
            | {"agrees": agrees},
            "reviews": record.reviews,
            "final": {"verdict": final["verdict"], "defect": final["defect"], "decided_by": final["reviewer"]},
            "other_images": record.others,
            "run": record.run,
        }

    def _stage_document(self, row: Row) -> dict[str, Any]:
        settings = self.record.settings.get((row["expert"], row["expert_settings"]))
        return {
            **row,
            "settings": json.loads(settings) if settings is not None else None,
            "version_today": self._today.standing(row["expert"], row["expert_version"], settings),
            "settings_today": [asdict(change) for change in self._today.differing(row["expert"], settings)],
        }

    def in_words(self) -> list[str]:
        sections = [self._about_image(), self._about_rules()]
        sections += [self._about_stage(number, *stage) for number, stage in enumerate(self._stages, start=1)]
        sections += [self._about_unanswered(), self._about_outcome(), self._about_reviews()]
        lines = [line for section in map(list, sections) if section for line in (*section, "")]
        return lines[:-1]

    def _about_image(self) -> Iterator[str]:
        image, board, others = self.record.inspection, self.record.board, self.record.others
        where = "".join(f", {name} {board[name]}" for name in ("lot", "station") if board[name] is not None)
        verdict = "waits for its verdict"
        if image["status"] == "done":
            why = image["defect"] or image["reason"]
            verdict = _VERDICTS[image["verdict"]] + (f" ({why})" if why else "")
        yield f"Inspection {image['inspection_id']}: {image['designator']}, type {image['component']}, {verdict}"
        closing = "still open"
        if board["verdict"]:
            closing = f"closed {self._at(board['completed_at'])} as {board['verdict']}"
        yield f"  board {board['serial']} ({board['board_type']}{where}), attempt {board['attempt']}: {closing}"
        if board["attributes"]:
            yield "  " + ", ".join(f"{name}: {text}" for name, text in json.loads(board["attributes"]).items())
        picture = f"kept as {image['image_path']}" if image["image_path"] else "not kept"
        yield f"  image {image['source']}/{image['image_id']}, {image['image_bytes']:,} bytes, {picture}"
        if others:
            yield f"  other images of this place: {', '.join(map(str, others))}"

    def _about_rules(self) -> Iterator[str]:
        version, rules = self.record.inspection["rules_version"], self.record.rules
        if rules is None:
            yield f"Rules {version}: the database no longer has their text"
        else:
            yield f"Rules {version}, in force from {self._at(rules['loaded_at'])}; lines are those of this text"

    def _about_stage(self, number: int, row: Row, step: tuple[dict[str, Any], list[str]] | None) -> Iterator[str]:
        yield from step[1] if step else [f"Step {number}: answered by {row['expert']}; its rule is not known"]
        expert, version = row["expert"], row["expert_version"]
        past, origin = "nothing more is known of it", self.record.versions.get((expert, version))
        if origin:
            past = f"{origin['architecture']}, first used {self._at(origin['first_used_at'])}"
        settings = self.record.settings.get((expert, row["expert_settings"]))
        yield f"  version {version}, {past}; {self._today.in_words(expert, version, settings)}"
        if settings is not None:
            values = json.loads(settings)
            names = ("input_size", "temperature", "confidence_floor", "nms_iou", "max_detections", "dtype")
            told = ", ".join(f"{name} {values[name]}" for name in names if name in values)
            yield f"  settings {row['expert_settings']}: {told}, classes {', '.join(values.get('classes', ()))}"
        loading = f"its load held it up for {row['load_ms']:.1f} ms" if row["load_ms"] else "it was resident already"
        yield (
            f"  on {row['executor']} ({row['device']}): queued {row['queued_ms']:.1f} ms, {loading}; batch"
            f" {row['batch_id']} ({count_text(row['batch_size'], 'image')}) took {row['infer_ms']:.1f} ms"
        )

    def _about_unanswered(self) -> Iterator[str]:
        if (step := self._unanswered) is not None:
            yield f"Step {len(self._stages) + 1}: by {step['rule']} (line {step['line']})"
            yield f"  {step['expert']} gave no answer"

    def _about_outcome(self) -> Iterator[str]:
        image, run, again = self.record.inspection, self.record.run, self.retraced
        if image["status"] != "done":
            yield "It has no verdict yet: `coserve queues` shows what waits."
            return
        if image["reason"]:
            why = ". ".join(REASONS.get(image["reason"], ("see the daemon log",)))
            yield f"Verdict: {image['verdict']}, because of {image['reason']}: {why}."
        else:
            yield f"Verdict: {shown(image['verdict'], image['defect'])}{self._deciding_step()}."
        times = f"accepted {self._at(image['accepted_at'])}, verdict {self._at(image['completed_at'])}"
        limit = "" if image["deadline_ms"] is None else f"; the camera gave it {image['deadline_ms']} ms"
        yield f"  {times}, {image['latency_ms'] or 0:.1f} ms later{limit}"
        if run is not None:
            yield f"  judged by CoServe {run['version']}, in run {run['run_id']} since {self._at(run['started_at'])}"
        if image["late"]:
            yield "  it came after its board had closed: the board's verdict does not contain it"
        if again.contradiction:
            yield f"  CONTRADICTION: {again.contradiction}. A row or a text was changed, or this is a bug of CoServe"
        elif again.gap:
            yield f"  not judged once more: {again.gap}"
        elif image["verdict"] != "unknown":
            yield "  judged once more from the stored answers by those rules: the same"

    def _deciding_step(self) -> str:
        verdict = self.record.inspection["verdict"]
        steps = [(number, step[0]) for number, (_, step) in enumerate(self._stages, start=1) if step]
        deciding = [(number, step) for number, step in steps if step["verdict"] == verdict]
        if not deciding:
            return ""
        if verdict == "pass":
            return ", every step passed"
        number, step = deciding[-1]
        return f", decided at step {number} by {step['rule']} (line {step['rule_line']})"

    def _about_reviews(self) -> Iterator[str]:
        verdict, reviews = self.record.inspection["verdict"], self.record.reviews
        if not reviews and verdict == "review":
            yield "It waits for a person's decision: the page Review, or `coserve review`."
        elif not reviews and verdict is not None:
            yield "It has no review: the daemon's verdict is final."
        for review in reviews:
            note = f", “{review['note']}”" if review["note"] else ""
            given = shown(review["verdict"], review["defect"])
            yield f"Review {self._at(review['at'])} by {review['reviewer']}: {given}{note}"
        if reviews:
            last = reviews[-1]
            effects = {("fail", "pass"): ", so a false call", ("pass", "fail"): ", so an escape"}
            effect = effects.get((str(verdict), last["verdict"]), "")
            yield f"Final verdict: {last['verdict']}, decided by {last['reviewer']}{effect}."


def _onward(alone: Judgement, so_far: Judgement, *, is_first: bool) -> str:
    whole = "" if is_first else f", {shown(so_far.verdict, so_far.defect)} for the whole chain"
    verdict = f"{shown(alone.verdict, alone.defect)}{whole}"
    if so_far.next is not None:
        return f"{verdict}; it goes on to `{so_far.next.name}`"
    if so_far.verdict == "fail" and alone.next is not None:
        return f"{verdict}; a failure ends the chain"
    return f"{verdict}; the chain ends here"
