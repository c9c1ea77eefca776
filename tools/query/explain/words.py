"""The explanation in plain words, section by section."""

from collections.abc import Iterator
from typing import Any

from tools.query.explain.experts_now import ExpertsNow
from tools.query.explain.record import Record, Row
from tools.query.explain.retrace import Finding, Retraced, Traced

_REASONS = {
    "deadline": (
        "its time was over, or could not suffice, before its verdict was stored. Look at what made it wait"
        " (the times of each step, `coserve queues`, sql-cookbook: the slowest hour), or have the camera give more time"
    ),
    "expert_failed": (
        "an expert could not be loaded, or ended with an error. `coserve experts` lists what failed, `coserve check`"
        " reads every weights file, and the daemon's log has the error (events inference_failed, expert_load_failed)"
    ),
    "bad_image": (
        "its bytes could not be decoded, although its header was sound. Look at camera and cable; the daemon's log"
        " says what is wrong and where a copy lies (event image_quarantined)"
    ),
    "rules_changed": (
        "the rules that its board opened under cannot be carried out any more: rules or catalog were changed while it"
        " waited, and the expert that it needs is gone. Put the expert back, and send the board again"
    ),
}
_VERDICTS = {"pass": "passed", "fail": "failed", "review": "is for a person to look at", "unknown": "was not judged"}


def in_words(record: Record, retraced: Retraced, now: ExpertsNow, size_note: str | None) -> list[str]:
    """Lines of text; an empty one between sections."""
    sections = [
        list(_image(record)),
        list(_rules(record)),
        *(
            [*_step(number, row, traced), *_expert(record, row, now), *_times(row)]
            for number, (row, traced) in enumerate(_paired(record, retraced))
        ),
        list(_unanswered(len(record.stages), retraced)),
        list(_outcome(record, retraced, size_note)),
        list(_afterwards(record)),
    ]
    lines = [line for section in sections if section for line in (*section, "")]
    return lines[:-1]


def _paired(record: Record, retraced: Retraced) -> Iterator[tuple[Row, Traced | None]]:
    for number, row in enumerate(record.stages):
        yield row, retraced.steps[number] if number < len(retraced.steps) else None


def _image(record: Record) -> Iterator[str]:
    image, board = record.inspection, record.board
    where = "".join(f", {name} {board[name]}" for name in ("lot", "station") if board[name] is not None)
    yield f"Inspection {image['inspection_id']}: {image['designator']}, type {image['component']}, {_ended(image)}"
    yield (
        f"  board {board['serial']} ({board['board_type']}{where}), attempt {board['attempt']}: "
        + (f"closed {board['completed_at']} as {board['verdict']}" if board["verdict"] else "still open")
    )
    yield f"  image {image['source']}/{image['image_id']}, {image['image_bytes']:,} bytes, " + (
        f"kept as {image['image_path']}" if image["image_path"] else "not kept"
    )
    if record.others:
        yield f"  other images of this place: {', '.join(map(str, record.others))}"


def _ended(image: Row) -> str:
    if image["status"] != "done":
        return "waits for its verdict"
    why = image["defect"] or image["reason"]
    return f"{_VERDICTS[image['verdict']]}{f' ({why})' if why else ''}"


def _rules(record: Record) -> Iterator[str]:
    version = record.inspection["rules_version"]
    if record.rules is None:
        yield f"Rules {version}: their text is no longer in the database"
    else:
        yield f"Rules {version}, in force from {record.rules['loaded_at']}; lines are those of this text"


def _step(number: int, row: Row, traced: Traced | None) -> Iterator[str]:
    if traced is None:
        yield f"Step {number}: answered by {row['expert']}; its rule cannot be told"
        return
    yield f"Step {number}: by {traced.rule} (line {traced.line})"
    if traced.is_detector and row["label"] is not None:
        below = ", under its limit" if traced.is_below else ""
        yield f"  {row['expert']}: its surest box is {_answer(row)}{below}"
    else:
        yield f"  {row['expert']} answered {_answer(row)}"
    for finding in traced.findings:
        yield f"  - {_finding(finding)}"
    yield f"  = {traced.onward}"


def _unanswered(number: int, retraced: Retraced) -> Iterator[str]:
    ended = retraced.ended_at
    if ended is not None:
        yield f"Step {number}: by {ended.rule} (line {ended.line})"
        yield f"  {ended.expert} gave no answer"


def _answer(row: Row) -> str:
    if row["label"] is None:
        return "nothing"
    return row["label"] if row["confidence"] is None else f"{row['label']}, confidence {row['confidence']:.6g}"


def _finding(finding: Finding) -> str:
    """Its line, where the text has one: what the text does not say is a default."""
    verdict = f" → {finding.verdict}" if finding.verdict else ""
    return finding.text + verdict + (f" (line {finding.line})" if finding.line else "")


def _expert(record: Record, row: Row, now: ExpertsNow) -> Iterator[str]:
    expert, version = row["expert"], row["expert_version"]
    known = record.versions.get((expert, version))
    what = (
        f", {known['architecture']}, first used {known['first_used_at']}" if known else ", nothing more is known of it"
    )
    yield f"  version {version}{what}; {now.said_of(expert, version)}"


def _times(row: Row) -> Iterator[str]:
    loading = f"its load held it up for {row['load_ms']:.1f} ms" if row["load_ms"] else "it was resident already"
    yield (
        f"  on {row['executor']} ({row['device']}): queued {row['queued_ms']:.1f} ms, {loading}; batch"
        f" {row['batch_id']} of {row['batch_size']} took {row['infer_ms']:.1f} ms"
    )


def _outcome(record: Record, retraced: Retraced, size_note: str | None) -> Iterator[str]:
    image = record.inspection
    if image["status"] != "done":
        yield "It has no verdict yet: `coserve queues` shows what waits."
        return
    shown = " ".join(filter(None, (image["verdict"], image["defect"])))
    if image["reason"]:
        yield f"Verdict: unknown, because of {image['reason']}: {_REASONS.get(image['reason'], 'see the daemon log')}."
    else:
        yield f"Verdict: {shown}{_decided(record, retraced)}."
    waited = (
        f"accepted {image['accepted_at']}, verdict {image['completed_at']}, {image['latency_ms'] or 0:.1f} ms later"
    )
    if image["deadline_ms"] is not None:
        waited += f"; the camera gave it {image['deadline_ms']} ms"
    yield f"  {waited}"
    if image["late"]:
        yield "  it came after its board had closed: the board's verdict does not contain it"
    if retraced.contradiction:
        yield f"  CONTRADICTION: {retraced.contradiction}. A row or a text was changed, or this is our defect"
    elif retraced.gap:
        yield f"  not judged once more: {retraced.gap}"
    elif image["reason"] is None:
        yield "  judged once more from the stored answers by those rules: the same"
    if size_note:
        yield f"  {size_note}"


def _decided(record: Record, retraced: Retraced) -> str:
    verdict = record.inspection["verdict"]
    deciding = [(number, traced) for number, traced in enumerate(retraced.steps) if traced.alone.verdict == verdict]
    if verdict == "pass" or not deciding:
        return ", every step passed" if verdict == "pass" and deciding else ""
    number, traced = deciding[-1]
    return f", decided at step {number} by {traced.rule} (line {traced.line})"


def _afterwards(record: Record) -> Iterator[str]:
    if not record.reviews:
        if record.inspection["status"] == "done":
            yield "Nobody has reviewed it: the daemon's verdict is final."
        return
    for review in record.reviews:
        note = f", “{review['note']}”" if review["note"] else ""
        defect = f" {review['defect']}" if review["defect"] else ""
        yield f"Review {review['at']} by {review['reviewer']}: {review['verdict']}{defect}{note}"
    last, was = record.reviews[-1], record.inspection["verdict"]
    meaning = {("fail", "pass"): ", so a false call", ("pass", "fail"): ", so an escape"}.get(
        (was, last["verdict"]), ""
    )
    yield f"Final verdict: {last['verdict']}, decided by {last['reviewer']}{meaning}."


def readable(text: str) -> str:
    """`text` without signs that steer a terminal: serials and notes come from outside."""
    return "".join(sign if sign.isprintable() else "�" for sign in text)


def final(record: Record) -> dict[str, Any]:
    """Verdict, defect and who decided, as the view `final_verdicts` has them."""
    if record.reviews:
        last = record.reviews[-1]
        return {"verdict": last["verdict"], "defect": last["defect"], "decided_by": last["reviewer"]}
    image = record.inspection
    return {
        "verdict": image["verdict"],
        "defect": image["defect"],
        "decided_by": "daemon" if image["verdict"] else None,
    }
