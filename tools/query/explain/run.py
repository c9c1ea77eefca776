"""What `coserve explain` does: read, judge once more, tell."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from daemon.config.settings import Config
from daemon.storage.raw_pixels import as_sent
from experts.errors import ImageError
from experts.vision.decode import decode
from tools.cli.console import console, fail, print_json
from tools.cli.open_line import opened
from tools.query.explain.experts_now import ExpertsNow
from tools.query.explain.record import Record, Row, UnknownInspectionError, Wanted, read_record, similar_pictures
from tools.query.explain.retrace import Retraced, Size, Way, retrace, way_of
from tools.query.explain.words import final, in_words, readable


def explain(config: Path, wanted: Wanted, *, as_json: bool) -> int:
    """Print why an inspection has its verdict; 1 where the rules give another one than is stored."""
    with opened(config) as (settings, engine):
        try:
            record = read_record(engine, wanted)
        except UnknownInspectionError as error:
            fail(str(error), status=1)
        way = way_of(record)
        size, size_note = _size(settings, engine, record, way)
    retraced = retrace(record, way, size, is_size_known=size_note is None)
    now = ExpertsNow.of(settings.catalog)
    lines = [readable(line) for line in in_words(record, retraced, now, size_note)]
    if as_json:
        print_json(_document(record, retraced, now) | {"words": lines})
    else:
        console.print("\n".join(lines), markup=False)
    return 1 if retraced.contradiction else 0


def _document(record: Record, retraced: Retraced, now: ExpertsNow) -> dict[str, Any]:
    rules = record.rules
    return {
        "inspection": dict(record.inspection),
        "board": dict(record.board),
        "rules": {
            "version": record.inspection["rules_version"],
            "loaded_at": None if rules is None else rules["loaded_at"],
            "is_kept": rules is not None,
        },
        "stages": [_stage(record, retraced, now, at, row) for at, row in enumerate(record.stages)],
        "ended_at": asdict(retraced.ended_at) if retraced.ended_at else None,
        "recomputed": {
            "verdict": retraced.verdict,
            "defect": retraced.defect,
            "agrees": retraced.agrees,
            "gap": retraced.gap,
            "contradiction": retraced.contradiction,
        },
        "reviews": [dict(review) for review in record.reviews],
        "final": final(record),
        "other_images": list(record.others),
    }


def _stage(record: Record, retraced: Retraced, now: ExpertsNow, at: int, row: Row) -> dict[str, Any]:
    """One expert's row with its boxes, and beside it what the rule made of it where that can be told."""
    said = {
        **row,
        "boxes": [dict(box) for box in record.boxes[row["step"]]],
        "version_today": now.standing(row["expert"], row["expert_version"]),
    }
    if at >= len(retraced.steps):
        return said | {"rule": None}
    traced = retraced.steps[at]
    return said | {
        "rule": traced.rule,
        "rule_line": traced.line,
        "findings": [asdict(finding) for finding in traced.findings],
        "verdict": traced.alone.verdict,
        "defect": traced.alone.defect,
        "chain_verdict": traced.so_far.verdict,
        "goes_on_to": traced.so_far.next.name if traced.so_far.next else None,
    }


def _size(settings: Config, engine: Engine, record: Record, way: Way) -> tuple[Size | None, str | None]:
    """The picture's width and height where a rule asks for them, and what to say where they are not its own."""
    if not way.places_boxes:
        return None, None
    own = record.inspection["image_path"]
    size = _size_of(settings, own) if own else None
    if size is not None:
        return size, None
    for path in similar_pictures(engine, record.inspection):
        size = _size_of(settings, path)
        if size is not None:
            return (
                size,
                f"its picture is not kept: its size is taken from another of this camera, {size[0]} × {size[1]}",
            )
    return None, "its picture is not kept, nor one like it: where boxes lie cannot be judged"


def _size_of(settings: Config, image_path: str) -> Size | None:
    path = settings.images.parent / image_path
    try:
        payload, shape = as_sent(path.read_bytes(), path.suffix)
        height, width = (shape or decode(payload, "image").shape)[:2]
    except (OSError, ValueError, ImageError):
        return None
    return width, height
