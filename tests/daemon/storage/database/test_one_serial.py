"""One serial with any number of images, as a scanner reports that reads no code: it costs the others nothing."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.exc import DatabaseError
from structlog.testing import capture_logs

from daemon.records import Image, WriteFailed
from daemon.storage.database import inspections
from tests.daemon.storage.database.store_parts import Line, a_line, a_verdict, an_image

SERIAL = "NOREAD"
#: Each image of `tiny` completes an attempt; `mainboard-a` stays open, since other components never come.
BOARD_TYPES = ("tiny", "mainboard-a")


def inspect(line: Line, board_type: str, verdict="pass") -> None:
    line.images += 1
    image = an_image(f"{board_type}-{line.images}", "R0402", "R1", type=board_type, serial=SERIAL)
    (image,) = line.accept(image)
    line.judge(a_verdict(image, verdict))


def a_long_past(folder: Path, board_type: str, images: int) -> Line:
    """A line with `images` of one serial; all but three are copies of the last one's rows."""
    folder.mkdir(exist_ok=True)
    line = a_line(folder)
    for _ in range(3):
        inspect(line, board_type)
    if board_type == "tiny":
        later = "strftime('%Y-%m-%dT%H:%M:%fZ', completed_at, n || ' seconds')"
        copy_last(line, "boards", images, {"board_id": "n", "attempt": "n", "seq": "-n", "completed_at": later})
    board = {"board_id": "n"} if board_type == "tiny" else {}
    copy_last(line, "inspections", images, {"inspection_id": "n", "image_id": "'x' || n", "seq": "n + 1e9"} | board)
    line.rows("UPDATE stream_position SET last_inspection_id = ?, last_board_id = ?, last_seq = 1e10", images, images)
    line.reopen()
    return line


def copy_last(line: Line, table: str, until: int, new: dict[str, str]) -> None:
    names = [name for _, name, *_ in line.rows(f"PRAGMA table_info({table})")]
    values = ", ".join(new.get(name, name) for name in names)
    numbers = "WITH RECURSIVE numbers(n) AS (SELECT 4 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)"
    copies = f"INSERT INTO {table} SELECT {values} FROM numbers, {table} WHERE {names[0]} = 3"  # noqa: S608
    line.rows(f"{numbers} {copies}", until)


def steps(line: Line, work: Callable[[], None]) -> int:
    """Return the steps of SQLite's machine that `work` costs, in hundreds."""
    counted = 0

    def count() -> None:
        nonlocal counted
        counted += 1

    with closing(line.store.engine.raw_connection()) as connection:
        driver = connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.set_progress_handler(count, 100)
    work()
    driver.set_progress_handler(None, 0)
    return counted


@pytest.mark.promise(
    "Containment",
    "One serial with any number of images or attempts, as a scanner reports that reads no code, costs the "
    "others nothing: in the writer, after a failed commit, at a start",
)
@pytest.mark.parametrize("board_type", BOARD_TYPES)
def test_a_serial_costs_the_same_after_thousands_of_images(tmp_path: Path, board_type: str) -> None:
    few, many = (costs_of_one(a_long_past(tmp_path / str(n), board_type, n), board_type) for n in (10, 20_000))
    assert all(after <= 2 * before + 5 for before, after in zip(few, many, strict=True)), (few, many)


def costs_of_one(line: Line, board_type: str) -> list[int]:
    """Return what an image costs after a start, what the next costs, and what one costs after a failed commit."""
    first, second = (steps(line, lambda: inspect(line, board_type)) for _ in range(2))
    line.rows("CREATE TRIGGER no BEFORE INSERT ON inspections BEGIN SELECT RAISE(ABORT, 'not now'); END")
    with pytest.raises(DatabaseError, match="not now"):
        inspect(line, board_type)
    line.rows("DROP TRIGGER no")
    after_failure = steps(line, lambda: inspect(line, board_type))
    line.store.close()
    return [first, second, after_failure]


@pytest.mark.parametrize("board_type", BOARD_TYPES)
def test_a_start_does_not_read_the_past_of_a_serial(tmp_path: Path, board_type: str) -> None:
    line = a_long_past(tmp_path, board_type, 20_000)
    line.rows("ANALYZE")  # as upkeep does: statistics must not lead to another plan
    line.reopen()
    assert steps(line, line.store.recover) < 400  # of the newest thousand it looks for the last batch
    line.store.close()


def test_a_serial_whose_open_attempt_gets_too_many_images_is_told_once(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspections, "_MUCH_SURPLUS", 10)
    with capture_logs() as log:
        for _ in range(13):
            inspect(line, "mainboard-a")
    (told,) = [entry for entry in log if entry["event"] == "serial_repeats"]
    assert (told["serial"], told["times"], told["source"]) == (SERIAL, 10, "cam1")


def test_an_attempt_is_the_same_after_a_restart_though_only_what_matters_is_read(line: Line) -> None:
    (early,) = line.accept(an_image("early", "R0402", "R1", serial=SERIAL))
    for verdict in ("pass", "fail", "pass", "fail", "unknown", "pass"):
        inspect(line, "mainboard-a", verdict)
    line.judge(a_verdict(early, "fail", "D7"))
    assert line.rows("SELECT count(*), count(surplus) FROM inspections") == [(7, 4)]
    line.reopen()
    for designator in ("U1", "U2"):
        line.inspect("QFP64", designator, type="mainboard-a", serial=SERIAL)
    published = line.inspect("R0402", "R2", type="mainboard-a", serial=SERIAL)
    (board,) = [item.body for item in published if "failed" in item.body]
    assert (board["verdict"], board["inspected"], board["expected"]) == ("fail", 4, 4)
    assert board["failed"] == [{"designator": "R1", "component": "R0402", "defect": "D7"}]
    assert (board["unknown"], board["review"]) == ([], [])


@pytest.mark.promise("Containment", "Any number of boards whose time is over at a start hold up no other image")
def test_overdue_attempts_close_a_few_at_a_time_and_take_nothing_more(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspections, "_CLOSED_AT_ONCE", 10)
    line.accept(*(an_image(str(n), "R0402", "R1", serial=SERIAL, attempt=n) for n in range(1, 26)))
    line.reopen(down_s=3600.0)
    closed = [message.body["board"]["attempt"] for message in line.store.write_results().published]
    assert closed == list(range(1, 11))
    answers = line.ask(an_image("late", "R0402", "R2", serial=SERIAL), an_image("other", "R0402", "R1", serial="S2"))
    assert [type(answer) for answer in answers] == [WriteFailed, Image]
    while line.store.wait_s() == 0.0:
        closed += [message.body["board"]["attempt"] for message in line.store.write_results().published]
    assert closed == list(range(1, 26))
    (late,) = line.accept(an_image("late", "R0402", "R2", serial=SERIAL))
    assert (late.attempt, late.late) == (25, True)
