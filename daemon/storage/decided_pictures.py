"""Kept pictures that an expert answered and people decided about, each with the label that it can learn."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Row, Select, select

from daemon.storage.database.reviews import DAEMON, newest_of_each
from daemon.storage.database.schema import boards, inspections, reviews, stages
from routing_rules.routes import ClassifierStep, Routes, chain, taught_label

#: Pictures of one expert beyond this are left out, the oldest first.
MAX_PICTURES = 20_000


@dataclass(frozen=True, slots=True)
class DecidedPicture:
    """One picture: `label` as a person decided; `version` of the expert `answered` so; the path as in the row."""

    inspection_id: int
    serial: str
    image_path: str
    label: str
    answered: str | None
    version: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The pictures, the newest decision first; how many were left out, by reason; the labels that the rules pass."""

    pictures: Sequence[DecidedPicture]
    left_out: Mapping[str, int]
    passes: Sequence[str]

    @property
    def counts(self) -> dict[str, int]:
        return dict(sorted(Counter(picture.label for picture in self.pictures).items()))


def learned_files(catalog: Path, expert: str) -> tuple[Path, Path, Path]:
    """Return the files that `coserve learn` writes for the page Teach: report, worst pictures, confusion matrix."""
    folder, stem = catalog.parent / "reports", quote(expert, safe="")
    return folder / f"{stem}-learned.json", folder / f"{stem}-worst.png", folder / f"{stem}-confusion.png"


def decided_question(expert: str) -> Select[*tuple[Any, ...]]:
    """Select images of `expert` with a kept picture whose newest review is a person's, last reviewed first."""
    newest = newest_of_each()
    return (
        select(
            *(inspections.c.inspection_id, inspections.c.component, inspections.c.image_path),
            *(boards.c.board_type, boards.c.serial, reviews.c.verdict, reviews.c.defect),
            *(stages.c.label, stages.c.expert_version),
        )
        .select_from(newest)
        .join(reviews, reviews.c.review_id == newest.c.review_id)
        .join(inspections, inspections.c.inspection_id == newest.c.inspection_id)
        .join(boards, boards.c.board_id == inspections.c.board_id)
        .join(stages, stages.c.inspection_id == inspections.c.inspection_id)
        .where(stages.c.expert == expert, inspections.c.image_path.is_not(None), reviews.c.reviewer != DAEMON)
        .order_by(newest.c.review_id.desc())
        .limit(MAX_PICTURES)
    )


def decided_pictures(rows: Iterable[Row[Any]], routes: Routes, expert: str, labels: Sequence[str]) -> Decided:
    pictures, left_out = list[DecidedPicture](), Counter[str]()
    passes: dict[str, None] = {}
    for row in {row.inspection_id: row for row in rows}.values():  # a chain may ask it twice
        step = _step_of(routes, row.board_type, row.component, expert)
        label = step and taught_label(step, labels, row.label, row.verdict, row.defect)
        if step is None:
            left_out["the rules no longer ask this expert about the component"] += 1
        elif label is None:
            decided = f"{row.verdict} {row.defect}" if row.defect else row.verdict
            left_out[f"decided {decided}, which says nothing about this expert's answer"] += 1
        else:
            passes |= dict.fromkeys(step.pass_labels)
            of_image = row.inspection_id, row.serial, row.image_path
            pictures.append(DecidedPicture(*of_image, label, row.label, row.expert_version))
    return Decided(pictures, left_out, tuple(passes))


def _step_of(routes: Routes, board_type: str, component: str, expert: str) -> ClassifierStep | None:
    first = routes.first_step(board_type, component)
    steps = chain(first) if first is not None else ()
    return next((step for step in steps if step.expert == expert and isinstance(step, ClassifierStep)), None)
