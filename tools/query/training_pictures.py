"""`coserve export --training`: stored pictures in the folders that `coserve train classifier` reads."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import Engine, select

from daemon.storage.database.reviews import DAEMON
from daemon.storage.database.schema import inspections
from routing_rules.routes import ClassifierStep, Routes
from tools.query.reading import BoardSelection
from tools.query.rows import IMAGES

#: The folder of pictures that nobody has decided about, by component: a network learns nothing from its own answers.
UNSORTED = "unsorted"
_ILLEGAL = str.maketrans({"/": "_", "\0": "_"})


def write_training_pictures(
    engine: Engine, selection: BoardSelection, images: Path, routes: Routes, out: Path
) -> Mapping[str, Mapping[str, int]]:
    """Copy pictures to `out/COMPONENT/LABEL`, undecided ones to `out/unsorted`; return their number by both."""
    names = ("inspection_id", "board_type", "serial", "component", "verdict", "defect", "decided_by", "image_path")
    query = (
        select(*(IMAGES.columns[name].label(name) for name in names))
        .select_from(IMAGES.tables)
        .where(selection.condition(), IMAGES.is_finished, inspections.c.image_path.is_not(None))
        .order_by(inspections.c.inspection_id)
    )
    counts: dict[str, dict[str, int]] = {}
    with engine.connect() as connection:
        for row in connection.execute(query):
            label = UNSORTED
            if row.decided_by != DAEMON and row.verdict in ("pass", "fail"):
                label = _label(routes, row.board_type, row.component, row.verdict, row.defect)
            source, component = images.parent / row.image_path, _folder_name(row.component)
            folder = out / UNSORTED / component if label == UNSORTED else out / component / _folder_name(label)
            target = folder / f"{row.inspection_id}-{_folder_name(row.serial)[:60]}{source.suffix}"
            if not source.is_file():  # retention deleted it meanwhile
                continue
            folder.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copyfile(source, target)
            of_component = counts.setdefault(row.component, {})
            of_component[label] = of_component.get(label, 0) + 1
    return counts


def _label(routes: Routes, board_type: str, component: str, verdict: str, defect: str | None) -> str:
    """Return the classifier's label for a decision; `fail` or the defect's own name where the rules have none."""
    step = routes.first_step(board_type, component)
    if not isinstance(step, ClassifierStep):
        return defect or verdict
    if verdict == "pass":
        return step.pass_labels[0] if step.pass_labels else verdict
    return next((label for label, code in step.codes.items() if code == defect), defect or verdict)


def _folder_name(name: str) -> str:
    """Return a name that stays in its folder."""
    return name.translate(_ILLEGAL).lstrip(".") or "_"
