"""`coserve results`: filters, formats, limits; and all commands that take a serial use the index."""

import csv
import io
import json
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, time
from functools import partial
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from typer.testing import Result

from daemon.config.plant_time import PlantTime
from daemon.storage.database.connections import open_for_reading
from tests import ROOT
from tests.small_disk import small_disk
from tests.sql import sql
from tests.tools.query.sample_results import CONFIG, NEW, OLD, RULES, make
from tests.tools.run_commands import coserve, start_coserve
from tests.waiting import PATIENCE_S
from tools.query import reading
from tools.query.reading import ResultsQuery, read_batches
from tools.query.rows import BOARDS, IMAGES, STAGES, RowFilters
from tools.terminal.option_values import moment, shift_span

NASTY = ("=HYPERLINK(1)", "+1", "-1", "@SUM(A1)", "<b>x</b>", "[/red]", "'; DROP TABLE boards; --", "a\x1b[31mb", "ü")


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration and a database of 200 boards, some of whose serials have a meaning elsewhere."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "coserve.yaml").write_text(CONFIG, encoding="utf-8")
    make(folder / "inspection.db", boards=200)
    for number, serial in enumerate(NASTY, 1):
        sql(folder, "UPDATE boards SET serial = ? WHERE board_id = ?", values=(serial, number))
    return folder


@pytest.fixture
def results(line: Path) -> Callable[..., Result]:
    return partial(coserve, "results", "--config", line / "coserve.yaml")


def rows(results: Callable[..., Result], *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(row) for row in results(*arguments, "--jsonl").stdout.splitlines()]


def by_hand(line: Path, query: str, *values: Any) -> list[Any]:
    return [row[0] for row in sql(line, query, values=values)]


ANSWERED = "SELECT 1 FROM stages s WHERE s.inspection_id = i.inspection_id"
JOINED = (
    "SELECT i.inspection_id FROM inspections i JOIN boards b USING (board_id) JOIN final_verdicts f USING"
    " (inspection_id) WHERE {} ORDER BY i.seq DESC"
)


@pytest.mark.parametrize(
    ("options", "condition"),
    [
        (["--serial", "S0000100", "--serial", "S0000101"], "b.serial IN ('S0000100', 'S0000101')"),
        (["--type", "sensor-node", "--lot", "L3"], "b.board_type = 'sensor-node' AND b.lot = 'L3'"),
        (["--station", "ST1", "--attempt", "2"], "b.station = 'ST1' AND b.attempt = 2"),
        (["--component", "QFP64", "--designator", "Q2"], "i.component = 'QFP64' AND i.designator = 'Q2'"),
        (["--verdict", "fail", "--verdict", "review"], "f.verdict IN ('fail', 'review')"),
        (["--daemon-verdict", "fail"], "i.verdict = 'fail'"),
        (["--verdict", "pass", "--daemon-verdict", "fail"], "f.verdict = 'pass' AND i.verdict = 'fail'"),
        (["--defect", "tombstone"], "f.defect = 'tombstone'"),
        (["--reason", "deadline"], "i.reason = 'deadline'"),
        (["--decided-by", "anna"], "f.decided_by = 'anna'"),
        (["--source", "cam-ST1"], "i.source = 'cam-ST1'"),
        (["--rules-version", RULES[0]], f"i.rules_version = '{RULES[0]}'"),
        (["--late"], "i.late = 1"),
        (["--in-time", "--component", "R0402"], "i.late = 0 AND i.component = 'R0402'"),
        (["--latency-above", "1000"], "i.latency_ms > 1000"),
        (["--seq", "100:200"], "i.seq BETWEEN 100 AND 200"),
        (["--seq", "8000:"], "i.seq >= 8000"),
        (["--since", "2026-11-01", "--until", "2026-11-02"],
         "i.completed_at >= '2026-11-01' AND i.completed_at < '2026-11-03'"),
        (["--since", "2026-11-01T12:00+02:00", "--limit", "40"], "i.completed_at >= '2026-11-01T10:00'"),
        (["--expert", "solder"], f"EXISTS ({ANSWERED} AND s.expert = 'solder')"),
        (["--expert", "C0603", "--expert-version", NEW],
         f"EXISTS ({ANSWERED} AND s.expert = 'C0603' AND s.expert_version = '{NEW}')"),
    ],
)  # fmt: skip
def test_filters_choose_what_sql_chooses(
    line: Path, results: Callable[..., Result], options: list[str], condition: str
) -> None:
    expected = by_hand(line, JOINED.format(condition))
    assert expected
    if "--limit" in options:
        expected = expected[:40]
    else:
        assert results(*options, "--count").stdout == f"{len(expected)}\n"
    assert [row["inspection_id"] for row in rows(results, *options)] == expected
    assert json.loads(results(*options, "--json").stdout)[0]["inspection_id"] == expected[0]


def test_boards_and_stages_are_rows_too(line: Path, results: Callable[..., Result]) -> None:
    boards = rows(results, "--boards", "--verdict", "fail", "--lot", "L2")
    query = "SELECT board_id FROM boards JOIN final_boards USING (board_id) WHERE final_boards.{} = 'fail'"
    query += " AND boards.lot = 'L2' ORDER BY seq DESC"
    assert [row["board_id"] for row in boards] == by_hand(line, query.format("verdict"))
    by_line = rows(results, "--boards", "--daemon-verdict", "fail", "--lot", "L2")
    assert [row["board_id"] for row in by_line] == by_hand(line, query.format("verdict_by_line"))
    cleared = rows(results, "--boards", "--daemon-verdict", "fail", "--verdict", "pass", "--decided-by", "anna")
    assert cleared
    assert {row["decided_by"] for row in cleared} == {"anna"}
    assert all(row["decided_at"] > row["completed_at"] for row in cleared)
    stages = rows(results, "--stages", "--expert", "solder", "--order", "oldest")
    query = (
        "SELECT inspection_id FROM stages JOIN inspections USING (inspection_id) WHERE expert = 'solder' ORDER BY seq"
    )
    assert [row["inspection_id"] for row in stages] == by_hand(line, query)
    assert {(row["step"], row["expert_version"]) for row in stages} == {(1, OLD)}


@pytest.mark.promise(
    "Queries and exports",
    "A filter is a value, whatever it contains; no serial can control a terminal, a spreadsheet or a file system",
)
def test_a_filter_is_a_value_whatever_stands_in_it(line: Path, results: Callable[..., Result]) -> None:
    for number, serial in enumerate(NASTY, 1):
        counts = by_hand(line, "SELECT count(*) FROM inspections WHERE board_id = ?", number)
        assert len(rows(results, f"--serial={normalize('NFD', serial)}")) == counts[0]
    assert rows(results, "--lot", "L1' OR '1'='1") == []
    assert rows(results, "--component", "%") == []
    assert RowFilters(equal={"lot": ["L1"]}).equal == {"lot": ["L1"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--boards", "--component", "R0402"], "boards have no component"),
        (["--boards", "--stages"], "either --boards or --stages"),
        (["--order", "latency_ms", "--csv"], "needs a --limit"),
        (["--order", "nonsense"], "images have seq, completed_at"),
        (["--columns", "verdikt"], "no column verdikt"),
        (["--limit", "1000000"], "at most 10000 rows"),
        (["--out", "x.csv"], "--out goes with"),
        (["--csv", "--out", "no/folder/x.csv"], "no folder"),
        (["--since", "soon"], "--since: expected a day"),
        (["--serial", ":warning:", "--order", ":warning:"], ":warning:"),
    ],
)
def test_wrong_use_is_status_2_and_one_sentence(
    results: Callable[..., Result], arguments: list[str], message: str
) -> None:
    assert message in results(*arguments, status=2).stderr


def test_csv_runs_nothing_in_a_spreadsheet_and_json_is_exact(results: Callable[..., Result]) -> None:
    for serial in NASTY:
        options = [f"--serial={serial}", "--limit", "1"]
        (row,) = csv.DictReader(io.StringIO(results(*options, "--csv").stdout))
        assert row["serial"] == (f"'{serial}" if serial[0] in "=+-@" else serial.replace("; --", ";' --"))
        assert float(row["latency_ms"]) > 0
        assert rows(results, *options)[0]["serial"] == serial


def as_german_excel(text: str) -> list[list[str]]:
    """Return the cells that Excel shows: formulas evaluated; with a comma's decimals."""
    cells = csv.reader(io.StringIO(text.removeprefix("\ufeff")), delimiter=";")
    return [[cell[2:-1].replace('""', '"') if cell.startswith('="') else cell for cell in row] for row in cells]


#: Excel makes numbers, dates and formulas of such text.
CHANGED_BY_EXCEL = ("0012", "1E41", "8949020000123481514", "3-4", "MAR1", "1,5", "µ;7", 'a"b', "-A17", "=1+1", "Müller")


@pytest.mark.promise("Queries and exports", "`results --excel` writes what Excel opens, and text stays text")
def test_a_table_for_excel_keeps_umlauts_leading_zeros_and_what_looks_like_a_date(
    line: Path, results: Callable[..., Result]
) -> None:
    for number, serial in enumerate(CHANGED_BY_EXCEL, 101):
        sql(line, "UPDATE boards SET serial = ?, lot = 'Excel' WHERE board_id = ?", values=(serial, number))
    options = ("--lot", "Excel", "--columns", "serial,latency_ms,completed_at,verdict", "--excel")
    text = results(*options, LC_ALL="de_DE.UTF-8").stdout
    assert text.startswith("\ufeffserial;latency_ms;completed_at;verdict\n")
    shown, exact = as_german_excel(text)[1:], rows(results, "--lot", "Excel")
    assert {row[0] for row in shown} == {*CHANGED_BY_EXCEL}
    assert [float(row[1].replace(",", ".")) for row in shown] == [row["latency_ms"] for row in exact]
    assert not any("." in row[1] for row in shown), "a German Excel reads 12.345 as twelve thousand"
    assert [row[2:] for row in shown] == [[row["completed_at"], row["verdict"]] for row in exact]
    assert results(*options, "--csv", LC_ALL="C.UTF-8").stdout.startswith("\ufeffserial,latency_ms,")
    plain = results(*options[:-1], "--csv", "--delimiter", "tab").stdout
    assert plain.startswith("serial\tlatency_ms\t")
    assert "\n0012\t" in plain
    for wrong in (["--csv", "--delimiter", ";;"], ["--delimiter", ";"]):
        assert "--delimiter goes with --csv, and is one character" in results(*wrong, status=2).stderr


def test_json_has_all_rows_and_a_table_says_of_how_many_it_shows_fifty(
    line: Path, results: Callable[..., Result]
) -> None:
    (images,) = by_hand(line, "SELECT count(*) FROM inspections")
    assert len(json.loads(results("--json").stdout)) == images
    assert results().stdout.startswith(f"Images: the newest 50 of {images} (--limit for more)")
    by_latency = results("--order", "latency_ms", "--limit", "3").stdout
    assert by_latency.startswith(f"Images: the first 3 of {images} by latency_ms (--limit for more)")


def test_a_narrow_table_has_component_and_reason_and_names_a_zone_only_beside_times(
    results: Callable[..., Result],
) -> None:
    shown = results("--reason", "deadline", "--limit", "1", COLUMNS="80").stdout
    title, _, heading, *_ = shown.splitlines()
    assert ("component" in heading, "reason" in heading, "completed_at" in heading) == (True, True, False)
    assert "times of" not in title
    assert "defect" not in shown, "no row has one"
    assert "times of UTC" in results("--limit", "1", COLUMNS="140").stdout.splitlines()[0]


def test_no_serial_steers_the_terminal(results: Callable[..., Result]) -> None:
    for serial in NASTY:
        shown = results(f"--serial={serial}", "--limit", "1", COLUMNS="120").stdout
        assert "\x1b" not in shown
        assert serial.replace("\x1b", r"\x1b") in shown


def test_a_full_disk_is_named_and_leaves_nothing(line: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="200k") as disk:
        done = start_coserve("results", "--jsonl", "--out", disk / "all.jsonl", "--config", line / "coserve.yaml")
        assert done.returncode == 1
        assert "all.jsonl: No space left on device; make room" in done.stderr
        assert list(disk.iterdir()) == []


def test_parquet_has_real_types(results: Callable[..., Result], tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    target = tmp_path / "lot.parquet"
    results("--lot", "L1", "--parquet", str(target))
    table = parquet.read_table(target)
    types = {field.name: str(field.type) for field in table.schema}
    assert (types["completed_at"], types["latency_ms"], types["seq"], types["serial"]) == (
        *("timestamp[ms, tz=UTC]", "double", "int64", "string"),
    )
    expected, written = rows(results, "--lot", "L1"), table.to_pylist()
    assert [row["seq"] for row in written] == [row["seq"] for row in expected]
    assert written[0]["completed_at"] == datetime.fromisoformat(expected[0]["completed_at"])
    results("--serial", "nobody", "--parquet", str(target))
    assert parquet.read_table(target).num_rows == 0


@pytest.mark.parametrize(
    ("kind", "table", "number"),
    [(IMAGES, "inspections", "inspection_id"), (STAGES, "stages", "inspection_id"), (BOARDS, "boards", "board_id")],
)
@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_batches_and_windows_lose_nothing_and_repeat_nothing(
    line: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, table: str, number: str, order: str
) -> None:
    monkeypatch.setattr(reading, "BATCH_ROWS", 97)
    monkeypatch.setattr(reading, "WINDOW", 1009)
    engine = open_for_reading(f"sqlite:///{line}/inspection.db")
    query = ResultsQuery(kind, ("seq", number, *(["step"] if kind is STAGES else [])), RowFilters(), order)
    whole = [tuple(row) for batch in read_batches(engine, query) for row in batch]
    engine.dispose()
    assert [len(whole)] == by_hand(line, f"SELECT count(*) FROM {table}")  # noqa: S608
    assert len(set(whole)) == len(whole)
    seqs = [row[0] for row in whole]
    assert seqs == sorted(seqs, reverse=order == "newest")


@pytest.mark.promise(
    "Queries and exports", "A slow reader of many rows holds no transaction, and its memory does not grow with them"
)
def test_the_log_can_be_brought_into_the_database_while_rows_are_read(line: Path, tmp_path: Path) -> None:
    """No read transaction stays open between batches, however slow the reader of the answer is."""
    path = tmp_path / "inspection.db"
    shutil.copy(line / "inspection.db", path)
    engine = open_for_reading(f"sqlite:///{path}")
    batches = read_batches(engine, ResultsQuery(IMAGES, ("seq",), RowFilters()))
    first = next(batches)
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("UPDATE boards SET station = 'elsewhere'")
        assert writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
    rest = [row for batch in batches for row in batch]
    engine.dispose()
    assert [len(first) + len(rest)] == by_hand(line, "SELECT count(*) FROM inspections")


#: The command, by small batches, and the peak of its own memory: getrusage tells its parent's, where that was larger.
PEAK = """\
import re, sys
from pathlib import Path
from tools.query import reading
from tools.cli.main import app
reading.BATCH_ROWS = 200
try: app()
finally: print(re.search(r"VmHWM:\\s+([0-9]+)", Path("/proc/self/status").read_text())[1], file=sys.stderr)
"""


def test_memory_does_not_grow_with_the_rows(line: Path, tmp_path: Path) -> None:
    def peak_kib(*arguments: str | Path) -> int:
        words = ("results", "--config", line / "coserve.yaml", "--stages", "--jsonl", "--out", *arguments)
        command = [sys.executable, "-c", PEAK, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        return int(done.stderr.split()[-1])

    few = peak_kib(tmp_path / "few", "--limit", "100")
    all_of_them = peak_kib(tmp_path / "all")
    assert (tmp_path / "all").stat().st_size > 50 * (tmp_path / "few").stat().st_size
    assert all_of_them < few + (tmp_path / "all").stat().st_size / 1024


NOW = datetime(2026, 11, 22, 8, 30, tzinfo=UTC)
UTC_PLANT = PlantTime()
BERLIN = PlantTime("Europe/Berlin", (("early", time(6)), ("late", time(14)), ("night", time(22))))


@pytest.mark.parametrize(
    ("plant", "text", "begin", "end"),
    [
        (UTC_PLANT, "20261121", "2026-11-21T00:00:00.000Z", "2026-11-22T00:00:00.000Z"),
        (UTC_PLANT, "2026-11-21 09:28:11.123Z", "2026-11-21T09:28:11.123Z", "2026-11-21T09:28:11.123Z"),
        (UTC_PLANT, "2026-11-21T09:28+02:00", "2026-11-21T07:28:00.000Z", "2026-11-21T07:28:00.000Z"),
        (UTC_PLANT, "2h", "2026-11-22T06:30:00.000Z", "2026-11-22T06:30:00.000Z"),
        (UTC_PLANT, "now", "2026-11-22T08:30:00.000Z", "2026-11-22T08:30:00.000Z"),
        (BERLIN, "today", "2026-11-21T23:00:00.000Z", "2026-11-22T23:00:00.000Z"),
        (BERLIN, "2026-10-25", "2026-10-24T22:00:00.000Z", "2026-10-25T23:00:00.000Z"),
        (BERLIN, "2026-11-21T09:28", "2026-11-21T08:28:00.000Z", "2026-11-21T08:28:00.000Z"),
        (BERLIN, "09:30", "2026-11-22T08:30:00.000Z", "2026-11-22T08:30:00.000Z"),
        (BERLIN, "9:31", "2026-11-21T08:31:00.000Z", "2026-11-21T08:31:00.000Z"),  # still to come today: yesterday's
    ],
)
def test_moments_are_read_as_a_person_means_them(plant: PlantTime, text: str, begin: str, end: str) -> None:
    assert (moment(text, NOW, "begin", plant), moment(text, NOW, "end", plant)) == (begin, end)


@pytest.mark.parametrize(
    ("text", "day", "since"),
    [
        ("early", "2026-11-22", "2026-11-22T05:00:00.000Z"),
        ("late", "2026-11-21", "2026-11-21T13:00:00.000Z"),  # today's has not begun
        ("night@today", "2026-11-22", "2026-11-22T21:00:00.000Z"),
        ("night@yesterday", "2026-11-21", "2026-11-21T21:00:00.000Z"),
        ("early@2026-03-29", "2026-03-29", "2026-03-29T04:00:00.000Z"),
    ],
)
def test_a_shift_is_the_newest_or_that_of_a_day(text: str, day: str, since: str) -> None:
    shift = shift_span(text, NOW, BERLIN)
    assert (shift.day.isoformat(), shift.since) == (day, since)


@pytest.fixture(scope="module")
def tokyo(line: Path) -> Path:
    config = line / "tokyo.yaml"
    plant = 'plant: {timezone: Asia/Tokyo, shifts: {early: "06:00", late: "18:00"}}\n'
    config.write_text(CONFIG + plant, encoding="utf-8")
    return config


def test_the_cookbook_groups_by_the_plants_shifts(line: Path, tokyo: Path) -> None:
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    (query,) = re.findall(r"^```\n(SELECT p\.day.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    (oldest,) = by_hand(line, "SELECT min(completed_at) FROM boards")
    shifts = coserve("db", "shifts", "--config", tokyo, "--since", oldest).stdout
    with closing(sqlite3.connect(f"file:{line / 'inspection.db'}?mode=ro", uri=True)) as database:
        database.executescript(shifts)
        found = database.execute(query).fetchall()
    boards = "SELECT count(*) FROM boards WHERE completed_at IS NOT NULL AND attempt = 1"
    assert [sum(row[2] for row in found)] == by_hand(line, boards)
    assert {row[1] for row in found} == {"early", "late"}


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01", "2026-11-31", "25:00", "2h30", "-2h", "999999w", "2026"])
def test_a_text_that_is_not_a_moment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a day"):
        moment(text, NOW, "begin")
