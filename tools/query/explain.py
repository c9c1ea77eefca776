"""`coserve explain`: the reasons for an image's verdict, judged again from the stored answers, in words."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from daemon.config.plant_time import PlantTime
from daemon.config.settings import Config
from daemon.storage.database.reviews import DAEMON
from daemon.units import count_text, printable
from tools.experts.look import CatalogVersions
from tools.query.reading import InspectionName, InspectionRecord, Row, read_inspection, similar_pictures
from tools.query.retrace import PictureSize, RetracedStep, RetracedVerdict, StoredRules, picture_size, retrace
from tools.terminal.console import console, print_json
from tools.terminal.open_line import opened, plant_time

_REASONS = {
    "deadline": (
        "its time was over, or could not suffice, before its verdict was stored. Look at what made it wait"
        " (the times of each step, `coserve queues`, question 7 of docs/results.md), or have the camera give more time"
    ),
    "expert_failed": (
        "an expert could not be loaded, or ended with an error. `coserve experts` lists what failed, `coserve check`"
        " reads every weights file, and the daemon's log has the error (events inference_failed, expert_load_failed)"
    ),
    "bad_image": (
        "its bytes could not be decoded, although its header was sound. Look at camera and cable; the daemon's log"
        " says what is wrong and where a copy lies (event image_quarantined)"
    ),
    "edition_gone": (
        "its board began in an edition of rules and experts that was replaced, and that does not serve any more. Send"
        " the board again as a new attempt"
    ),
}
_VERDICTS = {"pass": "passed", "fail": "failed", "review": "is for a person to look at", "unknown": "was not judged"}


def print_explanation(config: Path, name: InspectionName, *, as_json: bool) -> int:
    """Print why an inspection has its verdict; return 1 if the rules give another one than is stored."""
    with opened(config) as (settings, engine):
        record = read_inspection(engine, name)
        rules = StoredRules.of_record(record)
        size, size_note = _picture_size(settings, engine, record) if rules.places_boxes(record) else (None, None)
    retraced = retrace(record, rules, size, is_size_known=size_note is None)
    today, plant = CatalogVersions.from_catalog(settings.catalog), settings.plant.clock()
    lines = [printable(line) for line in _in_words(_by_plants_clock(record, plant), retraced, today, size_note)]
    if as_json:
        print_json(_document(record, retraced, today) | {"words": lines})
    else:
        console.print("\n".join(lines))
    return 1 if retraced.contradiction else 0


def _picture_size(settings: Config, engine: Engine, record: InspectionRecord) -> tuple[PictureSize | None, str | None]:
    """Return the picture's width and height, and a note if they are another's, or if no picture is kept."""
    own = record.inspection["image_path"]
    if own and (size := picture_size(settings.images, own)):
        return size, None
    for similar in similar_pictures(engine, record.inspection):
        if size := picture_size(settings.images, similar):
            taken = "{} × {}".format(*size)
            return size, f"its picture is not kept: its size is taken from another of this camera, {taken}"
    return None, "its picture is not kept, nor one like it: where boxes lie cannot be judged"


def _document(record: InspectionRecord, retraced: RetracedVerdict, today: CatalogVersions) -> dict[str, Any]:
    rules = record.rules or {}
    agrees = retraced.verdict is not None and retraced.contradiction is None and retraced.gap is None
    return {
        "inspection": record.inspection,
        "board": record.board,
        "rules": {
            "version": record.inspection["rules_version"],
            "loaded_at": rules.get("loaded_at"),
            "is_kept": record.rules is not None,
        },
        "stages": [
            _stage_document(record, row, step, today) for row, step in zip_longest(record.stages, retraced.steps)
        ],
        "ended_at": retraced.unanswered,
        "recomputed": {
            "verdict": retraced.verdict,
            "defect": retraced.defect,
            "agrees": agrees,
            "gap": retraced.gap,
            "contradiction": retraced.contradiction,
        },
        "reviews": record.reviews,
        "final": _final_verdict(record),
        "other_images": record.others,
        "run": record.run,
    }


def _stage_document(
    record: InspectionRecord, row: Row, step: RetracedStep | None, today: CatalogVersions
) -> dict[str, Any]:
    """Return one expert's row, its settings then, and what the rule made of its answer, if known."""
    settings = record.settings.get((row["expert"], row["expert_settings"]))
    fields = {
        **row,
        "settings": json.loads(settings) if settings is not None else None,
        "version_today": today.standing(row["expert"], row["expert_version"], settings),
        "settings_today": [asdict(change) for change in today.differing(row["expert"], settings)],
    }
    if step is None:
        return fields | {"rule": None}
    return fields | {
        "rule": step.rule,
        "rule_line": step.line,
        "findings": list(step.findings),
        "verdict": step.alone.verdict,
        "defect": step.alone.defect,
        "chain_verdict": step.chain.verdict,
        "goes_on_to": step.chain.next.name if step.chain.next else None,
    }


def _final_verdict(record: InspectionRecord) -> dict[str, Any]:
    of_line = {**record.inspection, "reviewer": DAEMON if record.inspection["verdict"] else None}
    final = record.reviews[-1] if record.reviews else of_line
    return {"verdict": final["verdict"], "defect": final["defect"], "decided_by": final["reviewer"]}


# The same in words, section by section


def _by_plants_clock(record: InspectionRecord, plant: PlantTime) -> InspectionRecord:
    def shown(row: Row) -> Row:  # not the whole text: a serial may look like a time
        return {name: plant_time(plant, value) if f"_{name}".endswith("_at") else value for name, value in row.items()}

    return replace(
        record,
        inspection=shown(record.inspection),
        board=shown(record.board),
        rules=record.rules and shown(record.rules),
        run=record.run and shown(record.run),
        reviews=[shown(review) for review in record.reviews],
        versions={key: shown(row) for key, row in record.versions.items()},
    )


def _in_words(
    record: InspectionRecord, retraced: RetracedVerdict, today: CatalogVersions, size_note: str | None
) -> list[str]:
    sections = [
        _about_image(record),
        _about_rules(record),
        *(
            [*_about_step(number, row, step), *_about_expert(record, row, today), _about_times(row)]
            for number, (row, step) in enumerate(zip_longest(record.stages, retraced.steps), start=1)
        ),
        _about_unanswered(len(record.stages) + 1, retraced),
        _about_outcome(record, retraced, size_note),
        _about_reviews(record),
    ]
    lines = [line for section in map(list, sections) if section for line in (*section, "")]
    return lines[:-1]


def _about_image(record: InspectionRecord) -> Iterator[str]:
    image, board = record.inspection, record.board
    where = "".join(f", {name} {board[name]}" for name in ("lot", "station") if board[name] is not None)
    if image["status"] == "done":
        why = image["defect"] or image["reason"]
        verdict = _VERDICTS[image["verdict"]] + (f" ({why})" if why else "")
    else:
        verdict = "waits for its verdict"
    yield f"Inspection {image['inspection_id']}: {image['designator']}, type {image['component']}, {verdict}"
    closing = f"closed {board['completed_at']} as {board['verdict']}" if board["verdict"] else "still open"
    yield f"  board {board['serial']} ({board['board_type']}{where}), attempt {board['attempt']}: {closing}"
    if board["attributes"]:
        yield "  " + ", ".join(f"{name}: {text}" for name, text in json.loads(board["attributes"]).items())
    picture = f"kept as {image['image_path']}" if image["image_path"] else "not kept"
    yield f"  image {image['source']}/{image['image_id']}, {image['image_bytes']:,} bytes, {picture}"
    if record.others:
        yield f"  other images of this place: {', '.join(map(str, record.others))}"


def _about_rules(record: InspectionRecord) -> Iterator[str]:
    version = record.inspection["rules_version"]
    if record.rules is None:
        yield f"Rules {version}: the database no longer has their text"
    else:
        yield f"Rules {version}, in force from {record.rules['loaded_at']}; lines are those of this text"


def _about_step(number: int, row: Row, step: RetracedStep | None) -> Iterator[str]:
    if step is None:
        yield f"Step {number}: answered by {row['expert']}; its rule is not known"
        return
    yield f"Step {number}: by {step.rule} (line {step.line})"
    answer = "nothing" if row["label"] is None else row["label"]
    if row["label"] is not None and row["confidence"] is not None:
        answer += f", confidence {row['confidence']:.6g}"
    if step.is_detector and row["label"] is not None:
        yield f"  {row['expert']}: its surest box is {answer}"
    else:
        yield f"  {row['expert']} answered {answer}"
    for finding in step.findings:
        yield f"  it {finding['text']} → {finding['verdict']} (line {finding['line']})"
    yield f"  = {step.onward}"


def _about_unanswered(number: int, retraced: RetracedVerdict) -> Iterator[str]:
    if (step := retraced.unanswered) is not None:
        yield f"Step {number}: by {step['rule']} (line {step['line']})"
        yield f"  {step['expert']} gave no answer"


def _about_expert(record: InspectionRecord, row: Row, today: CatalogVersions) -> Iterator[str]:
    expert, version = row["expert"], row["expert_version"]
    origin = record.versions.get((expert, version))
    past = (
        f"{origin['architecture']}, first used {origin['first_used_at']}" if origin else "nothing more is known of it"
    )
    settings = record.settings.get((expert, row["expert_settings"]))
    yield f"  version {version}, {past}; {today.in_words(expert, version, settings)}"
    if settings is not None:
        values = json.loads(settings)
        told = (name for name in ("temperature", "confidence_floor", "nms_iou", "max_detections") if name in values)
        shown = ", ".join(f"{name} {values[name]}" for name in ("input_size", *told, "dtype") if name in values)
        yield f"  settings {row['expert_settings']}: {shown}, classes {', '.join(values.get('classes', ()))}"


def _about_times(row: Row) -> str:
    loading = f"its load held it up for {row['load_ms']:.1f} ms" if row["load_ms"] else "it was resident already"
    return (
        f"  on {row['executor']} ({row['device']}): queued {row['queued_ms']:.1f} ms, {loading}; batch"
        f" {row['batch_id']} ({count_text(row['batch_size'], 'image')}) took {row['infer_ms']:.1f} ms"
    )


def _about_outcome(record: InspectionRecord, retraced: RetracedVerdict, size_note: str | None) -> Iterator[str]:
    image = record.inspection
    if image["status"] != "done":
        yield "It has no verdict yet: `coserve queues` shows what waits."
        return
    shown = " ".join(filter(None, (image["verdict"], image["defect"])))
    if image["reason"]:
        yield f"Verdict: unknown, because of {image['reason']}: {_REASONS.get(image['reason'], 'see the daemon log')}."
    else:
        yield f"Verdict: {shown}{_deciding_step(record, retraced)}."
    times = f"accepted {image['accepted_at']}, verdict {image['completed_at']}, {image['latency_ms'] or 0:.1f} ms later"
    if image["deadline_ms"] is not None:
        times += f"; the camera gave it {image['deadline_ms']} ms"
    yield f"  {times}"
    if record.run is not None:
        run = record.run
        yield f"  judged by CoServe {run['version']}, in run {run['run_id']} since {run['started_at']}"
    if image["late"]:
        yield "  it came after its board had closed: the board's verdict does not contain it"
    if retraced.contradiction:
        yield f"  CONTRADICTION: {retraced.contradiction}. A row or a text was changed, or this is a bug of CoServe"
    elif retraced.gap:
        yield f"  not judged once more: {retraced.gap}"
    elif image["reason"] is None:
        yield "  judged once more from the stored answers by those rules: the same"
    if size_note:
        yield f"  {size_note}"


def _deciding_step(record: InspectionRecord, retraced: RetracedVerdict) -> str:
    verdict = record.inspection["verdict"]
    steps = enumerate(retraced.steps, start=1)
    deciding = [(number, step) for number, step in steps if step.alone.verdict == verdict]
    if not deciding:
        return ""
    if verdict == "pass":
        return ", every step passed"
    number, step = deciding[-1]
    return f", decided at step {number} by {step.rule} (line {step.line})"


def _about_reviews(record: InspectionRecord) -> Iterator[str]:
    verdict = record.inspection["verdict"]
    if not record.reviews:
        if verdict is not None:
            yield "It has no review: the daemon's verdict is final."
        return
    for review in record.reviews:
        note = f", “{review['note']}”" if review["note"] else ""
        defect = f" {review['defect']}" if review["defect"] else ""
        yield f"Review {review['at']} by {review['reviewer']}: {review['verdict']}{defect}{note}"
    last = record.reviews[-1]
    effects = {("fail", "pass"): ", so a false call", ("pass", "fail"): ", so an escape"}
    effect = effects.get((verdict, last["verdict"]), "")
    yield f"Final verdict: {last['verdict']}, decided by {last['reviewer']}{effect}."
