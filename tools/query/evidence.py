"""Checks of the evidence (`coserve db check`, `coserve export`): the rows must agree with each other.

Texts are compared with their sha256, verdicts with the stored answers and rules, closed boards with the images judged
before they closed, reviews with each other. A changed value that leaves everything in agreement, such as a confidence
on the same side of its limit, shows only beside a signed package (`coserve export --verify --compare`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, exists, func, or_, select, text, true
from sqlalchemy.exc import SQLAlchemyError

from daemon.storage.database.boards import Attempt, positions_text, stored_recipe
from daemon.storage.database.schema import (
    FINAL_BOARDS,
    boards,
    changes,
    expert_settings,
    expert_versions,
    inspections,
    recipes,
    reviews,
    rules_versions,
    runs,
    stages,
)
from daemon.storage.image_archive import is_as_sent
from daemon.units import count_text
from routing_rules.routes import Recipe
from tools.query.reading import JudgedImage, Row, read_stages
from tools.query.retrace import StoredRules, retrace

#: Boards that one transaction reads, and images of them that are in memory at a time.
_BOARDS_PER_READ = 100
_IMAGES_PER_READ = 1000
_MAX_PROBLEMS = 100
_CLOSING = ("verdict", "reason", "inspected")
_LISTS = ("failed", "missing", "review", "unknown")
Connect = Callable[[], AbstractContextManager[Connection]]


class Evidence:
    """A check of rows: how many were read, and the problems by table and key, of which 100 are named."""

    def __init__(self, connect: Connect, images: Path, *, with_pictures: bool = False) -> None:
        self.boards = self.images = self.pictures = 0
        self.not_judged: Counter[str] = Counter()
        self._connect, self._folder, self._with_pictures = connect, images, with_pictures
        self._problems: list[str] = []
        self._more = 0
        self._rules_of, self._recipe = cache(self._read_rules), cache(self._read_recipe)

    def add(self, problem: str) -> None:
        if len(self._problems) < _MAX_PROBLEMS:
            self._problems.append(problem)
        else:
            self._more += 1

    @property
    def problems(self) -> list[str]:
        return self._problems + ([f"and {self._more:,} more problems"] if self._more else [])

    @property
    def counts(self) -> dict[str, Any]:
        numbers = {"boards": self.boards, "images": self.images, "pictures": self.pictures}
        return {**numbers, "not_judged": dict(self.not_judged)}

    @property
    def gaps(self) -> list[str]:
        return [
            f"not judged once more: {count_text(count, 'image')}: {reason}" for reason, count in self.not_judged.items()
        ]

    def check_boards(self, is_chosen: ColumnElement[bool] | None) -> None:
        for board, images in read_boards(self._connect, is_chosen):
            self._check(board, images)

    def check_tables(self, *, whole: bool) -> None:
        """Check texts, and with `whole` the rows that name them and the append-only tables."""
        checks = (_text_problems, _missing_texts, _review_problems) if whole else (_text_problems,)
        with self._connect() as connection:
            for check in checks:
                for problem in check(connection):
                    self.add(problem)

    def _check(self, board: Row, images: Iterable[JudgedImage]) -> None:
        recipe = self._recipe(board["rules_version"], board["board_type"])
        attempt = Attempt(board["board_id"], board["attempt"], recipe or Recipe(board["board_type"], {}))
        for image in images:
            self.images += 1
            self._check_image(image)
            self._count(attempt, board, image.inspection)
        self.boards += 1
        if recipe is not None:
            self._check_board(board, attempt, recipe)

    def _count(self, attempt: Attempt, board: Row, row: Row) -> None:
        """Repeat the writer's calls: an image without a verdict when its board closed counts as pending."""
        number, place = row["inspection_id"], (row["component"], row["designator"])
        if not (row["late"] and row["surplus"]):  # else it came when the board was closed
            attempt.count_image(*place)
        if row["status"] != "done" or row["verdict"] is None or row["seq"] is None:
            return
        is_late = board["seq"] is not None and row["seq"] > board["seq"]
        if not is_late:
            attempt.judge(number, *place, row["verdict"], row["defect"], row["reason"])
        if bool(row["late"]) != is_late:
            self.add(f"inspections {number}: late is {row['late']}, its seq and its board's give {is_late:d}")

    def _check_board(self, board: Row, attempt: Attempt, recipe: Recipe) -> None:
        expected: dict[str, Any] = {"inspected": attempt.inspected, "expected": recipe.expected}
        if board["verdict"] is not None:
            closing = attempt.closing("complete" if attempt.is_complete else "time_limit")
            expected |= {name: closing[name] for name in (*_CLOSING, *_LISTS)}
        for name, value in expected.items():
            stored = json.loads(board[name] or "null") if name in _LISTS else board[name]
            if stored != value:
                what = f"{board['board_type']} {board['serial']}, attempt {board['attempt']}"
                self.add(
                    f"boards {board['board_id']} ({what}): {name} is {_shown(stored)}, its images give {_shown(value)}"
                )

    def _check_image(self, image: JudgedImage) -> None:
        row, board = image.inspection, image.board
        what = f"inspections {row['inspection_id']} ({board['serial']} {row['designator']})"
        if row["rules_version"] != board["rules_version"]:
            opened = board["rules_version"]
            self.add(f"{what}: rules_version is {row['rules_version']}, its board opened with {opened}")
        for answer in image.stages:
            self._check_answer(f"stages ({row['inspection_id']}, {answer['step']})", answer)
        judged = retrace(image, self._rules_of(row["rules_version"]), self._folder)
        if judged.contradiction:
            self.add(f"{what}: {judged.contradiction}")
        elif judged.gap:
            self.not_judged[judged.gap.partition(" (the rules")[0]] += 1
        if self._with_pictures and row["image_path"]:
            self._check_picture(what, row)

    def _check_answer(self, what: str, answer: Row) -> None:
        if answer["boxes"]:
            best = max(answer["boxes"], key=lambda box: box["confidence"])
            if (answer["label"], answer["confidence"]) != (best["label"], best["confidence"]):
                self.add(
                    f"{what}: its answer is {answer['label']} {answer['confidence']}, its surest box is"
                    f" {best['label']} {best['confidence']}"
                )

    def _check_picture(self, what: str, row: Row) -> None:
        path = self._folder.parent / row["image_path"]
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return  # the check of files names it
        self.pictures += 1
        if not is_as_sent(content, path.suffix, row["image_sha256"]):
            self.add(f"{what}: {path} is not the picture that was sent (sha256)")

    def _read_rules(self, version: str) -> StoredRules:
        with self._connect() as connection:
            query = select(rules_versions.c.text).where(rules_versions.c.rules_version == version)
            return StoredRules.of(version, connection.execute(query).scalar())

    def _read_recipe(self, version: str, board_type: str) -> Recipe | None:
        """Return the recipe from the rules' text, which their version confirms; the row in `recipes` must equal it."""
        query = select(recipes.c.positions, recipes.c.time_limit_s).where(
            recipes.c.rules_version == version, recipes.c.board_type == board_type
        )
        with self._connect() as connection:
            row = connection.execute(query).first()
        routes = self._rules_of(version).routes
        if routes is not None:
            recipe = routes.recipes.get(board_type) or Recipe(board_type, {})
        else:
            recipe = None if row is None else stored_recipe(board_type, *row)
        if recipe is None or row is None or tuple(row) != (positions_text(recipe), recipe.time_limit_s):
            self.add(f"recipes ({version}, {board_type}): it is not the recipe of the rules' text")
        return recipe


def check_evidence(
    connect: Connect,
    images: Path,
    is_chosen: ColumnElement[bool] | None = None,
    *,
    with_tables: bool = True,
    with_pictures: bool = False,
    on_step: Callable[[str], None] = lambda _: None,
) -> Evidence:
    """Check all boards, or those of a condition, and texts; `with_tables` whole tables. A line may run."""
    evidence = Evidence(connect, images, with_pictures=with_pictures)
    steps: dict[str, Callable[[], None]] = {
        "texts and reviews": lambda: evidence.check_tables(whole=with_tables),
        "verdicts and boards": lambda: evidence.check_boards(is_chosen),
    }
    for name, step in steps.items():
        on_step(name)
        try:
            step()
        except SQLAlchemyError as error:  # a damaged page
            evidence.add(f"{name}: cannot be read: {getattr(error, 'orig', error)}")
    return evidence


def read_boards(
    connect: Connect, is_chosen: ColumnElement[bool] | None = None
) -> Iterator[tuple[Row, Iterator[JudgedImage]]]:
    """Yield each board with its images, streamed; one transaction per hundred boards."""
    after = 0
    while True:
        query = select(boards).where(true() if is_chosen is None else is_chosen, boards.c.board_id > after)
        with connect() as connection:
            limited = query.order_by(boards.c.board_id).limit(_BOARDS_PER_READ)
            rows = [dict(row) for row in connection.execute(limited).mappings()]
            for row in rows:
                yield row, _judged_images(connection, row)
        if not rows:
            return
        after = rows[-1]["board_id"]


def _judged_images(connection: Connection, board: Row) -> Iterator[JudgedImage]:
    query = select(inspections).where(inspections.c.board_id == board["board_id"]).order_by(inspections.c.inspection_id)
    rows = connection.execute(query, execution_options={"yield_per": _IMAGES_PER_READ}).mappings()
    for part in rows.partitions():
        answers = read_stages(connection, [row["inspection_id"] for row in part])
        for row in map(dict, part):
            yield JudgedImage(row, board, answers[row["inspection_id"]])


def _text_problems(connection: Connection) -> Iterator[str]:
    """Compare stored texts with the sha256 that names them."""
    for table, key, content in (
        (rules_versions, "rules_version", "text"),
        (expert_settings, "expert_settings", "settings"),
    ):
        for row in connection.execute(select(table)).mappings():
            sha256 = hashlib.sha256(row[content].encode()).hexdigest()
            name = " ".join(str(row[column.name]) for column in table.primary_key.columns)
            if not sha256.startswith(row[key]) or row.get("sha256", sha256) != sha256:
                yield f"{table.name} {name}: its {content} was changed, or its name: the sha256 is {sha256}"
    for row in connection.execute(select(expert_versions)).mappings():
        if not row["sha256"].startswith(row["expert_version"]):
            yield f"expert_versions {row['expert']} {row['expert_version']}: its sha256 is that of another version"


def _missing_texts(connection: Connection) -> Iterator[str]:
    """Find rules and settings that rows name and that are gone; reads every image and answer."""
    for table, named in ((inspections, rules_versions), (stages, expert_settings)):
        keys = [column.name for column in named.primary_key.columns]
        used = [table.c[key] for key in keys]
        is_there = exists().where(*(named.c[key] == table.c[key] for key in keys))
        gone = select(*used).distinct().where(*(column.is_not(None) for column in used), ~is_there)
        for row in connection.execute(gone):
            yield f"{named.name} {' '.join(row)}: its row is gone, and rows of {table.name} name it"


def _review_problems(connection: Connection) -> Iterator[str]:
    """Check that append-only tables are complete, that undoing fits, and that boards have final verdicts."""
    for table in (reviews, changes, runs):
        yield from _deleted_rows(connection, table)
    first = reviews.alias("undone")
    of_another = or_(
        first.c.review_id.is_(None),
        first.c.inspection_id.is_distinct_from(reviews.c.inspection_id),
        first.c.board_id.is_distinct_from(reviews.c.board_id),
    )
    undo = select(reviews.c.review_id, reviews.c.undo_of).outerjoin(first, first.c.review_id == reviews.c.undo_of)
    for number, undone in connection.execute(undo.where(reviews.c.undo_of.is_not(None), of_another)):
        yield f"reviews {number}: undo_of is {undone}, which is not a review of the same image or board"
    on_board = func.coalesce(reviews.c.board_id, inspections.c.board_id)
    newest = (
        select(on_board.label("board_id"), func.max(reviews.c.review_id).label("review_id"))
        .outerjoin(inspections, inspections.c.inspection_id == reviews.c.inspection_id)
        .where(reviews.c.seq.is_not(None))
        .group_by(on_board)
        .subquery("newest")
    )
    later = exists().where(inspections.c.board_id == newest.c.board_id, inspections.c.seq > reviews.c.seq)
    final = (
        select(reviews.c.review_id, reviews.c.board_verdict, FINAL_BOARDS.c.verdict)
        .join(newest, newest.c.review_id == reviews.c.review_id)
        .join(FINAL_BOARDS, FINAL_BOARDS.c.board_id == newest.c.board_id)
        .where(reviews.c.board_verdict != FINAL_BOARDS.c.verdict, ~later)
    )
    for number, stored, verdict in connection.execute(final):
        yield f"reviews {number}: board_verdict is {stored}, the decisions about its board give {verdict}"


def _deleted_rows(connection: Connection, table: Table) -> Iterator[str]:
    """Find gaps in the numbers of an append-only table, also at its end: no row of it is ever deleted."""
    (key,) = table.primary_key.columns
    last = connection.execute(text("SELECT seq FROM sqlite_sequence WHERE name = :name"), {"name": table.name}).scalar()
    numbers = select(key, func.lag(key, 1, 0).over(order_by=key).label("before")).subquery()
    gaps = connection.execute(select(numbers).where(numbers.c[key.name] > numbers.c.before + 1)).all()
    end = connection.execute(select(func.coalesce(func.max(key), 0))).scalar_one()
    for number, before in (*gaps, *([(last + 1, end)] if last is not None and last > end else [])):
        what = f"{before + 1}" if number == before + 2 else f"{before + 1} to {number - 1}"
        yield f"{table.name} {what}: deleted, and no row of this table ever is"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
