"""The ten questions of docs/plant.md on a real PostgreSQL, some of them as Python counts the rows."""

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


COUNTED: dict[int, Callable[[PlantRows, datetime], Answer]] = {1: yield_by_line, 6: healed, 7: false_calls}


@pytest.mark.parametrize("number", QUESTIONS)
def test_every_question_has_an_answer_and_some_are_counted_again(
    number: int, connection: Connection, plant: PlantRows
) -> None:
    now = connection.exec_driver_sql("SELECT now()").scalar_one()
    answer = [
        tuple(float(value) if type(value).__name__ == "Decimal" else value for value in row)
        for row in connection.exec_driver_sql(QUESTIONS[number])
    ]
    assert answer, "the rows must give the question something to answer"
    if number in COUNTED:
        assert answer == COUNTED[number](plant, now)
