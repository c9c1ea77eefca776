"""Pictures of a line's results, with labels and boxes."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, exists, func, select

from daemon.storage.database.reader import by_inspection
from daemon.storage.database.reviews import DAEMON, counting_boxes
from daemon.storage.database.schema import detections, inspections, stages
from experts.catalog import Catalog
from experts.spec import ExpertId
from routing_rules.routes import ClassifierStep, Routes, taught_label
from tools.dataset.write import LabelledBox, Picture, file_name
from tools.query.rows import IMAGES, RowFilters
from tools.terminal.console import CommandError

_COLUMNS = (
    *("inspection_id", "board_type", "serial", "component", "image_path"),
    *("verdict", "defect", "decided_by", "daemon_verdict"),
)
#: Far below the number of variables that SQLite (32,766) and others take in one statement.
_IDS_PER_QUERY = 500
#: A drawn box has no confidence.
_BOX = ("label", "x1", "y1", "x2", "y2", "confidence")


def read_pictures(
    engine: Engine,
    filters: RowFilters,
    images: Path,
    routes: Routes,
    catalog: Catalog,
    limit: int,
    *,
    reviewed: bool,
    below: float | None,
) -> list[Picture]:
    """Return the kept pictures that match: only decided ones if `reviewed`, only with an answer less sure than `below`.

    Boxes are those that a person drew with the newest decision, else the detector's, with scores. Raises CommandError
    for more than `limit`.
    """
    number = inspections.c.inspection_id
    conditions = [*filters.conditions(IMAGES), inspections.c.image_path.is_not(None)]
    conditions += [IMAGES.columns["decided_by"] != DAEMON] if reviewed else []
    if below is not None:
        of_stage = [stages.c.expert.in_(filters.equal["expert"])] if "expert" in filters.equal else []
        is_unsure = stages.c.confidence < below
        conditions.append(exists().where(stages.c.inspection_id == number, is_unsure, *of_stage))
    chosen = select(number).select_from(IMAGES.tables).where(*conditions)
    columns = tuple(IMAGES.columns[name].label(name) for name in _COLUMNS)
    pictures: list[Picture] = []
    with engine.connect() as connection:
        count = connection.execute(chosen.with_only_columns(func.count())).scalar_one()
        if count > limit:
            fewer = "choose fewer (--lot, --since, --component, --reviewed …) or raise --limit"
            raise CommandError(f"{count} pictures match, and --limit is {limit}: {fewer}")
        numbers = connection.execute(chosen.order_by(number)).scalars().all()
        for start in range(0, len(numbers), _IDS_PER_QUERY):
            ids = numbers[start : start + _IDS_PER_QUERY]
            answers, boxes = by_inspection(connection, stages, ids), by_inspection(connection, detections, ids)
            drawn: defaultdict[int, list[Any]] = defaultdict(list)
            for box in connection.execute(counting_boxes(ids)).mappings():
                drawn[box["inspection_id"]].append(box)
            query = select(*columns).select_from(IMAGES.tables).where(number.in_(ids)).order_by(number)
            for row in connection.execute(query):
                on_it = drawn.get(row.inspection_id) or boxes[row.inspection_id]
                # A detector's stage has boxes, or neither them nor a label; a classifier's always has a label.
                is_searched = on_it or any(answer["label"] is None for answer in answers[row.inspection_id])
                labelled = [LabelledBox(*map(box.get, _BOX)) for box in on_it] if is_searched else None
                is_doubtful = row.verdict == "pass" != row.daemon_verdict and row.inspection_id not in drawn
                file, stem = images.parent / row.image_path, f"{row.inspection_id}-{file_name(row.serial)}"
                of_board = (
                    row.component,
                    f"{row.board_type}/{row.serial}",
                    _label(routes, catalog, row, answers[row.inspection_id]),
                )
                pictures.append(Picture(file, stem, *of_board, labelled, is_doubtful))
    return pictures


def _label(routes: Routes, catalog: Catalog, row: Any, answers: Sequence[Any]) -> str | None:
    """Return the label that a person's decision teaches the first classifier, None if it teaches none.

    Before there is such an expert, a defect without a label is its own label.
    """
    if row.decided_by == DAEMON or row.verdict not in ("pass", "fail"):
        return None
    step = routes.first_step(row.board_type, row.component)
    if not isinstance(step, ClassifierStep):
        return row.defect or row.verdict
    spec = catalog.get(ExpertId(step.expert))
    answer = next((answer for answer in answers if answer["expert"] == step.expert), None)
    if spec is not None and answer is not None:
        return taught_label(step, spec.classes, answer["label"], row.verdict, row.defect)
    if row.verdict == "pass":
        return step.pass_labels[0] if step.pass_labels else row.verdict
    return next((label for label, code in step.codes.items() if code == row.defect), row.defect or row.verdict)
