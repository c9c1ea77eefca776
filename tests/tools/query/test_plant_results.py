"""`coserve results --plant`: rows of all lines from a real PostgreSQL, as Python finds them."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import Result

from daemon.plant.reading import open_hub_for_reading
from tests.daemon.plant.page.plant_rows import (
    LINES,
    WALKER,
    PlantRows,
    Record,
    a_plant_file,
    filled,
    some_weeks,
    utc_now,
)
from tests.daemon.storage.database.postgresql_server import WANTED, Server, programs
from tests.tools.run_commands import coserve
from tools.query import reading
from tools.query.plant_rows import PLANT_BOARDS, PLANT_IMAGES
from tools.query.reading import ResultsQuery, count_rows, read_batches
from tools.query.rows import RowFilters

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)


@pytest.fixture(scope="module")
def plant() -> PlantRows:
    return some_weeks(utc_now(), boards=40)


@pytest.fixture(scope="module")
def file(plant: PlantRows, postgresql: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    url = postgresql.url("results")
    with filled(url, plant, dict.fromkeys(LINES, plant.now)):
        yield a_plant_file(tmp_path_factory.mktemp("plant"), url, "http://127.0.0.1:9480")


@pytest.fixture
def results(file: Path) -> Callable[..., Result]:
    return partial(coserve, "results", "--plant", file)


def images(plant: PlantRows, **equal: Any) -> list[Record]:
    return [one for one in plant.rows["inspections"] if all(one[name] == value for name, value in equal.items())]


def test_filters_count_what_the_lines_sent(plant: PlantRows, results: Callable[..., Result]) -> None:
    day = plant.now - timedelta(days=3)
    recent = [one for one in images(plant) if one["at"] >= day]
    final = [one for one in images(plant) if plant.final_verdict(one) == "fail"]
    boards = [one for one in plant.rows["boards"] if one["final_verdict"] == "fail"]
    for arguments, expected in (
        ((), images(plant)),
        (("--line", "line-2"), images(plant, line="line-2")),
        (("--line", "line-2", "--line", "line-3", "--component", "C0603"),
         images(plant, line="line-2", component="C0603") + images(plant, line="line-3", component="C0603")),
        (("--verdict", "fail"), final),
        (("--daemon-verdict", "fail"), images(plant, verdict="fail")),
        (("--since", f"{day:%Y-%m-%dT%H:%M:%SZ}"), recent),
        (("--until", f"{day:%Y-%m-%dT%H:%M:%SZ}"), [one for one in images(plant) if one["at"] < day]),
        (("--expert", "QFP64", "--expert-version", "v1"), images(plant, expert="QFP64", expert_version="v1")),
        (("--expert", "QFP64", "--expert-version", "v3"), []),
        (("--serial", WALKER), images(plant, board_serial=WALKER)),
        (("--late",), []),
        (("--boards", "--verdict", "fail"), boards),
        (("--boards", "--lot", "L2"), [one for one in plant.rows["boards"] if one["lot"] == "L2"]),
    ):  # fmt: skip
        assert results("--count", *arguments).stdout.strip() == str(len(expected)), arguments


@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_every_row_comes_once_and_in_order_over_many_batches(
    plant: PlantRows, file: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH_ROWS", 7)
    engine = open_hub_for_reading(json.loads(file.read_text())["database"])
    try:
        for kind, table in ((PLANT_IMAGES, "inspections"), (PLANT_BOARDS, "boards")):
            query = ResultsQuery(kind, ("completed_at", "line", "seq"), RowFilters(), order)
            rows = [tuple(row) for batch in read_batches(engine, query) for row in batch]
            assert len(rows) == count_rows(engine, query) == len(plant.rows[table])
            assert {row[1:] for row in rows} == {(one["line"], one["seq"]) for one in plant.rows[table]}
            times = [row[0] for row in rows]
            assert times == sorted(times, reverse=order == "newest")
    finally:
        engine.dispose()


def test_no_row_is_lost_or_read_twice_where_the_server_keeps_another_time_than_utc(postgresql: Server) -> None:
    summer_time_ends = datetime(2026, 10, 26, 11, 50, tzinfo=UTC)
    plant = PlantRows(summer_time_ends)
    for hour in range(60):
        plant.board("line-1", f"S{hour}", {"R1": "pass"}, timedelta(hours=hour))
    late = f"{summer_time_ends - timedelta(minutes=5):%Y-%m-%dT%H:%M:%SZ}"
    url = postgresql.url("zones")
    with filled(url, plant, {"line-1": plant.now}):
        for zone in ("Europe/Berlin", "Asia/Kolkata"):
            with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
                connection.execute(f"ALTER DATABASE {connection.info.dbname} SET timezone = '{zone}'")
            engine = open_hub_for_reading(url)
            query = ResultsQuery(PLANT_BOARDS, ("serial",), RowFilters())
            serials = sorted(row[0] for batch in read_batches(engine, query) for row in batch)
            assert serials == sorted(one["board_serial"] for one in plant.rows["boards"]), zone
            assert count_rows(engine, ResultsQuery(PLANT_BOARDS, ("serial",), RowFilters(since=late))) == 1, zone
            engine.dispose()


def test_a_reviewed_image_shows_the_person_s_verdict_and_the_line_s_own(results: Callable[..., Result]) -> None:
    rows = list(csv.DictReader(io.StringIO(results("--serial", WALKER, "--csv").stdout)))
    (reviewed,) = (row for row in rows if row["decided_by"] == "Eva")
    assert {name: reviewed[name] for name in ("line", "verdict", "daemon_verdict", "daemon_defect", "note")} == {
        "line": "line-1", "verdict": "pass", "daemon_verdict": "fail", "daemon_defect": "bridge", "note": "a shadow",
    }  # fmt: skip
    boards = json.loads(results("--boards", "--serial", WALKER, "--order", "oldest", "--json").stdout)
    assert [(row["line"], row["verdict"], row["daemon_verdict"], row["decided_by"]) for row in boards] == [
        ("line-1", "pass", "fail", "Eva"),
        ("line-2", "review", "review", "daemon"),
        ("line-3", "pass", "pass", "daemon"),
    ]
    assert json.loads(boards[0]["failed"]) == [{"designator": "U1", "component": "QFP64", "defect": "bridge"}]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--stages",), "--stages goes with one line"),
        (("--shift", "early"), "--shift: no shift 'early'"),
        (("--expert-settings", "x"), "images at the hub have no expert_settings"),
        (("--columns", "board_id"), "no column board_id: images at the hub have line, seq, "),
    ],
)
def test_what_a_hub_does_not_have_is_refused_by_name(
    results: Callable[..., Result], arguments: tuple[str, ...], problem: str
) -> None:
    answer = results(*arguments, status=2)
    assert problem in " ".join(answer.stderr.split())
