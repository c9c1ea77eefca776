"""The ten questions of docs/plant.md on a real PostgreSQL: each answer as Python counts it from the rows."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection

from tests import ROOT
from tests.daemon.plant.page.plant_rows import PlantRows, Record, filled, some_weeks, utc_now
from tests.daemon.storage.database.postgresql_server import WANTED, Server, programs

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)

PAGE = (ROOT / "docs/plant.md").read_text(encoding="utf-8")
QUESTIONS = {
    int(number): sql for number, sql in re.findall(r"^### (\d+)\.[^`]*```sql\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
}

Answer = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def plant() -> PlantRows:
    return some_weeks(utc_now())


@pytest.fixture(scope="module")
def connection(plant: PlantRows, postgresql: Server) -> Iterator[Connection]:
    seen = {"line-1": plant.now + timedelta(hours=1), "line-2": plant.now - timedelta(hours=3), "line-3": None}
    with filled(postgresql.url("cookbook"), plant, seen) as engine, engine.connect() as connection:
        yield connection  # one transaction: now() stands


def share(count: int, total: int) -> float:
    return round(count / total, 3)


def groups(rows: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    by_key: defaultdict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for row in rows:
        by_key[tuple(row[name] for name in names)].append(row)
    return dict(sorted(by_key.items()))


def in_hours(rows: Iterable[Record], since: datetime) -> list[Record]:
    """Return the rows whose whole hour begins after `since`."""
    return [row for row in rows if row["at"].replace(minute=0, second=0, microsecond=0) >= since]


def first_attempts(plant: PlantRows, now: datetime) -> list[Record]:
    return [one for one in in_hours(plant.rows["boards"], now - timedelta(days=7)) if one["attempt"] == 1]


def passed(boards: list[Record], name: str = "verdict") -> float:
    return share(sum(one[name] == "pass" for one in boards), len(boards))


def yield_by_line(plant: PlantRows, now: datetime) -> Answer:
    images = Counter(one["line"] for one in in_hours(plant.rows["inspections"], now - timedelta(days=7)))
    rows = [
        (line, images[line], len(boards), passed(boards), passed(boards, "final_verdict"))
        for (line,), boards in groups(first_attempts(plant, now), "line").items()
    ]
    return sorted(rows, key=lambda row: (row[3], row[0]))


def yield_by_type(plant: PlantRows, now: datetime) -> Answer:
    by_type: defaultdict[str, list[tuple[float, str, int]]] = defaultdict(list)
    for (board_type, line), boards in groups(first_attempts(plant, now), "board_type", "line").items():
        by_type[board_type].append((sum(one["verdict"] == "pass" for one in boards) / len(boards), line, len(boards)))
    return [
        (board_type, line, boards, round(part, 3), 1 + sum(other[0] > part for other in lines))
        for board_type, lines in sorted(by_type.items())
        for part, line, boards in sorted(lines, key=lambda row: (-row[0], row[1]))
    ]


def worst_defects(plant: PlantRows, now: datetime) -> Answer:
    images = in_hours(plant.rows["inspections"], now - timedelta(days=7))
    failed = [one for one in images if one["verdict"] == "fail"]
    rows = [
        (*key, len(rows), len({one["line"] for one in rows}), share(len(rows), len(failed)))
        for key, rows in groups(failed, "defect", "component").items()
    ]
    return sorted(rows, key=lambda row: (-row[2], row[0], row[1]))[:20]


def lot_or_line(plant: PlantRows, now: datetime) -> Answer:
    since = now - timedelta(days=7)
    boards = [one for one in plant.rows["boards"] if one["at"] >= since and one["attempt"] == 1]
    return [
        (*key, len(rows), share(sum(one["verdict"] == "fail" for one in rows), len(rows)))
        for key, rows in groups(boards, "lot", "line").items()
    ]


def ways(plant: PlantRows, now: datetime) -> Answer:
    return [
        (*key, ", ".join(f"{one['line']}: {one['final_verdict']}" for one in sorted(rows, key=lambda one: one["at"])))
        for key, rows in groups(plant.rows["boards"], "board_type", "board_serial").items()
        if len({one["line"] for one in rows}) > 1
    ]


def healed(plant: PlantRows, now: datetime) -> Answer:
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (line, _, _), rows in groups(plant.rows["boards"], "line", "board_type", "board_serial").items():
        verdicts = [one["verdict"] for one in sorted(rows, key=lambda one: one["attempt"])]
        if len(verdicts) > 1:
            counts[line].update(["retested"])
            counts[line]["healed"] += verdicts[0] != "pass" and verdicts[-1] == "pass"
            counts[line]["worse"] += verdicts[0] == "pass" and verdicts[-1] != "pass"
    return [(line, count["retested"], count["healed"], count["worse"]) for line, count in sorted(counts.items())]


def false_calls(plant: PlantRows, now: datetime) -> Answer:
    turns: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for image in plant.rows["inspections"]:
        decisions = plant.reviews_of(image)
        if decisions and decisions[-1]["reviewer"] != "daemon":
            turns[image["line"]].append((image["verdict"], decisions[-1]["verdict"]))
    return [
        (line, len(pairs), pairs.count(("fail", "pass")), pairs.count(("pass", "fail")))
        for line, pairs in sorted(turns.items())
    ]


def reviewers(plant: PlantRows, now: datetime) -> Answer:
    decisions = [one for one in plant.rows["reviews"] if one["reviewer"] != "daemon"]
    return [
        (*key, len(rows), passed(rows), share(sum(one["verdict"] != one["verdict_by_line"] for one in rows), len(rows)))
        for key, rows in groups(decisions, "reviewer", "line").items()
    ]


def versions(plant: PlantRows, now: datetime) -> Answer:
    images = [one for one in plant.rows["inspections"] if one["at"] >= now - timedelta(days=2)]
    return [
        (
            *key,
            len(rows),
            *(share(sum(one["verdict"] == verdict for one in rows), len(rows)) for verdict in ("fail", "unknown")),
        )
        for key, rows in groups(images, "expert", "expert_version", "line").items()
    ]


def silent(plant: PlantRows, now: datetime) -> Answer:
    away = now - (plant.now - timedelta(hours=3))
    last = {line: max(one["seq"] for one in plant.rows["boards"] + plant.rows["reviews"] if one["line"] == line)
            for line in ("line-2", "line-3")}  # fmt: skip
    return [
        ("line-3", "line-3-pc", None, last["line-3"], None),
        ("line-2", "line-2-pc", away - timedelta(microseconds=away.microseconds), last["line-2"], None),
    ]


COUNTED: dict[int, Callable[[PlantRows, datetime], Answer]] = dict(
    enumerate(
        (
            *(yield_by_line, yield_by_type, worst_defects, lot_or_line, ways),
            *(healed, false_calls, reviewers, versions, silent),
        ),
        1,
    )
)


@pytest.mark.parametrize("number", COUNTED)
def test_the_answer_of_a_question_is_what_python_counts(number: int, connection: Connection, plant: PlantRows) -> None:
    now = connection.exec_driver_sql("SELECT now()").scalar_one()
    answer = [
        tuple(float(value) if type(value).__name__ == "Decimal" else value for value in row)
        for row in connection.exec_driver_sql(QUESTIONS[number])
    ]
    expected = COUNTED[number](plant, now)
    assert expected, "the rows must give the question something to answer"
    assert answer == [
        pytest.approx(row) if all(isinstance(one, int | float) for one in row) else row for row in expected
    ]
