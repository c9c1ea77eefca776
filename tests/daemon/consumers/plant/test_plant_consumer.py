"""The consumer of a plant's hub over a real PostgreSQL: every row once, whoever fails, and one line to a name."""

import asyncio
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from daemon.consumers.protocol import ReviewAnswerError
from daemon.dashboard.site.database import Database
from daemon.delivery import runner as runner_module
from daemon.delivery.deliveries import SharedStatusPage
from daemon.plant.page.app import PlantSite, board_attempts
from daemon.plant.reading import open_hub_for_reading
from daemon.plant.schema import make_schema
from daemon.storage.database.store import Store
from daemon.storage.decisions import Decision
from routing_rules.defects import defect_in_words
from tests.daemon.consumers.plant.hub_database import HubDatabase, LineSide, hub, sending
from tests.daemon.delivery.results_database import ResultsDatabase
from tests.daemon.storage.database.postgresql_server import WANTED, Server, programs
from tests.small_disk import small_disk
from tests.waiting import in_a_loop, soon
from tools.query.plant_rows import PLANT_BOARDS, PLANT_IMAGES
from tools.query.reading import ResultsQuery, read_batches
from tools.query.rows import RowFilters

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)
__all__ = ["hub"]


@pytest.fixture
def database(tmp_path: Path) -> ResultsDatabase:
    database = ResultsDatabase(tmp_path / "inspection.db")
    database.begin_epoch()
    return database


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_POLL_S", 0.02)
    monkeypatch.setattr(runner_module, "_FIRST_BACK_OFF_S", 0.05)
    monkeypatch.setattr(runner_module, "_LONGEST_BACK_OFF_S", 0.2)
    monkeypatch.setattr("daemon.consumers.plant.consumer._REVIEWS_EVERY_S", 0.05)


def counts(hub: HubDatabase) -> tuple[int, ...]:
    return tuple(hub.value(f"SELECT count(*) FROM {table}") for table in ("inspections", "boards", "reviews"))  # noqa: S608


def materialised(hub: HubDatabase) -> tuple[int, ...]:
    (row,) = hub.ask("SELECT sum(inspected) AS i, sum(passed) AS p, sum(boards) AS b FROM yields_by_hour")
    return int(row["i"]), int(row["p"]), int(row["b"])


def fail(database: ResultsDatabase, inspection_id: int) -> None:
    with closing(sqlite3.connect(database.file)) as rows, rows:
        rows.execute("UPDATE inspections SET verdict = 'fail', defect = 'D1' WHERE inspection_id = ?", (inspection_id,))


@pytest.mark.promise(
    "Delivery to the plant",
    "Every result of a line is at the plant's hub once and is counted once, even if the hub is "
    "[killed](#the-hub-killed-in-each-phase) in any phase of a transfer",
)
@in_a_loop
async def test_every_row_and_every_count_arrives_once_also_by_day_and_after_a_restart(
    hub: HubDatabase, database: ResultsDatabase
) -> None:
    last = database.grow(4000)  # an hour and seven minutes
    async with sending(hub, database) as runner:
        await soon(lambda: runner.position == last)
    last = database.grow(10)
    async with sending(hub, database) as runner:
        await soon(lambda: runner.position == last)
    assert counts(hub) == (8020, 4010, 0)
    assert materialised(hub) == (8020, 8020, 4010)
    assert hub.value("SELECT count(*) FROM yields_by_hour") == 2
    (line,) = hub.ask("SELECT * FROM lines")
    assert (line["line"], line["last_seq"], line["host"]) == ("line-1", last, line["host"])
    assert [row["kind"] for row in hub.ask("SELECT kind FROM events")] == ["joined"]
    day = hub.value("SELECT DISTINCT tableoid::regclass::text FROM inspections")
    assert day == "inspections_20261120"


@in_a_loop
async def test_reviews_change_the_boards_final_verdict_and_the_yield_in_the_boards_hour(
    hub: HubDatabase, database: ResultsDatabase
) -> None:
    database.grow(2)
    fail(database, 1)
    with closing(sqlite3.connect(database.file)) as rows, rows:
        rows.execute("UPDATE boards SET verdict = 'fail' WHERE board_id = 1")
    async with sending(hub, database) as runner:
        await soon(lambda: runner.position == 6)
        assert hub.ask("SELECT first_boards, first_passed, first_final_passed FROM yields_by_hour") == [
            {"first_boards": 2, "first_passed": 1, "first_final_passed": 1}
        ]
        store = Store(database.url)
        with closing(store):
            store.review(Decision(1, "Eva", None, "pass", None, "a shadow"))
            store.review(Decision(None, "Ben", None, "fail", board_id=2))
        await soon(lambda: runner.position == 8)
    assert hub.ask("SELECT first_passed, first_final_passed FROM yields_by_hour") == [
        {"first_passed": 1, "first_final_passed": 1}  # one more, one less
    ]
    assert [row["final_verdict"] for row in hub.ask("SELECT final_verdict FROM boards ORDER BY seq")] == [
        "pass",
        "fail",
    ]
    assert hub.ask("SELECT reviewer, verdict_by_line, note FROM reviews ORDER BY seq") == [
        {"reviewer": "Eva", "verdict_by_line": "fail", "note": "a shadow"},
        {"reviewer": "Ben", "verdict_by_line": None, "note": None},
    ]
    assert hub.ask("SELECT component, defect, count FROM defects_by_hour") == [
        {"component": "P", "defect": "D1", "count": 1}
    ]


def put_back(database: ResultsDatabase, backup: Path) -> None:
    for name in ("inspection.db-wal", "inspection.db-shm"):
        database.file.with_name(name).unlink(missing_ok=True)
    shutil.copy(backup, database.file)
    database.begin_epoch()  # as the daemon does at its next start
    database.begin = database.begin.replace(day=24)


@pytest.mark.promise(
    "Delivery to the plant",
    "A line that was restored from a backup is reported at the hub and has a new epoch; it overwrites nothing",
)
@in_a_loop
async def test_a_line_put_back_from_a_backup_is_told_and_overwrites_nothing(
    hub: HubDatabase, database: ResultsDatabase, tmp_path: Path
) -> None:
    common = database.grow(20)
    backup = shutil.copy(database.file, tmp_path / "backup.db")
    last = database.grow(30, serial="before{}")
    async with sending(hub, database) as runner:
        await soon(lambda: runner.position == last)
    old = hub.ask("SELECT * FROM boards ORDER BY seq")
    put_back(database, backup)
    again = database.grow(5, serial="after{}")
    shutil.rmtree(tmp_path / "consumers-pc-1")  # the position went with the disk
    async with sending(hub, database) as runner:
        await soon(lambda: runner.position == again)
    assert hub.ask("SELECT * FROM boards WHERE epoch = %s ORDER BY seq", old[0]["epoch"]) == old
    new = hub.ask("SELECT seq, board_serial FROM boards WHERE epoch <> %s ORDER BY seq", old[0]["epoch"])
    assert [row["seq"] for row in new] == [common + 3 * number for number in range(1, 6)]
    assert new[0]["board_serial"] == "after21"
    assert materialised(hub)[2] == 55
    (event,) = hub.ask("SELECT text FROM events WHERE kind = 'restored'")
    assert f"its results after seq {common} are counted again" in event["text"]
    assert f"up to seq {last}, stays" in event["text"]


OTHER_LINE = """{"line": "line-2", "epoch": "", "identity": "", "host": "", "last_seq": 0, "pictures_seq": 0,
                 "accepts": false, "defects": {"D1": "void"}}"""


def finish(database: ResultsDatabase, board: int, image: int, designator: str) -> None:
    """Make a board and one of its images fail, as a run of the database's epoch finished them."""
    with closing(sqlite3.connect(database.file)) as rows, rows:
        rows.execute("INSERT INTO runs (started_at, version, epoch) SELECT '', '0', epoch FROM stream_position")
        for table in ("inspections", "boards"):
            rows.execute(f"UPDATE {table} SET run_id = (SELECT max(run_id) FROM runs) WHERE run_id IS NULL")  # noqa: S608
        rows.execute("UPDATE boards SET verdict = 'fail' WHERE board_id = ?", (board,))
        rows.execute("UPDATE inspections SET designator = ? WHERE inspection_id = ?", (designator, image))
    fail(database, image)


def decide(database: ResultsDatabase, image: int, reviewer: str, verdict: str) -> None:
    with closing(Store(database.url)) as store:
        store.review(Decision(image, reviewer, None, verdict))


@pytest.mark.promise(
    "Delivery to the plant",
    "A decision counts at the hub for the image that a person saw, not for one with the same number after a restore",
)
@in_a_loop
async def test_a_decision_is_shown_on_the_image_that_a_person_saw_and_not_on_the_one_that_has_its_number_now(
    hub: HubDatabase, database: ResultsDatabase, tmp_path: Path
) -> None:
    database.grow(1, serial="kept")
    finish(database, 1, 1, "R9")
    backup = shutil.copy(database.file, tmp_path / "backup.db")
    database.grow(1, serial="again")
    finish(database, 2, 3, "R1")
    decide(database, 3, "Eva", "pass")
    async with sending(hub, database) as runner:
        await soon(lambda: runner.position == 7)
    put_back(database, backup)
    database.grow(1, serial="again")
    finish(database, 2, 3, "C5")
    decide(database, 1, "Ben", "pass")  # an image of the epoch before, which the backup has
    async with sending(hub, database) as runner:
        await soon(lambda: runner.position == 7)

    final, columns = [("pass", "Ben"), ("pass", "Eva"), ("fail", "daemon")], "final_verdict, decided_by"
    view = hub.ask(f"SELECT designator, {columns} FROM final_images WHERE verdict = 'fail' ORDER BY at")  # noqa: S608
    assert [tuple(row.values()) for row in view] == [
        (place, *one) for place, one in zip(("R9", "R1", "C5"), final, strict=True)
    ]
    boards = hub.ask(f"SELECT {columns} FROM final_boards ORDER BY at")  # noqa: S608
    assert [tuple(row.values()) for row in boards] == final
    assert hub.ask("SELECT verdict_by_line FROM reviews") == [{"verdict_by_line": "fail"}] * 2
    engine = open_hub_for_reading(hub.url)
    for kind in (PLANT_IMAGES, PLANT_BOARDS):
        query = ResultsQuery(kind, ("verdict", "decided_by"), RowFilters({"daemon_verdict": ("fail",)}), "oldest")
        assert [tuple(row[-2:]) for batch in read_batches(engine, query) for row in batch] == final
    engine.dispose()
    with closing(Database(hub.url, open_hub_for_reading)) as pages:
        attempts = board_attempts(pages, "pair", "again")
    assert [(board.decided_by, [one.designator for one in decided]) for board, _, decided in attempts] == [
        *(("Eva", ["R1"]), ("daemon", [])),
    ]
    found = [[(one.designator, one.verdict) for one in findings] for _, findings, _ in attempts]
    assert found == [[("R1", "pass")], [("C5", "fail")]]


@in_a_loop
async def test_defects_have_the_names_of_the_rules_at_the_hub(hub: HubDatabase, database: ResultsDatabase) -> None:
    text = "boards: {a: {components: {R: 1}}}\nclassifiers: {'*': {expert: e, pass: [ok]}}\ndefects: {cold_joint: D1}\n"
    with closing(sqlite3.connect(database.file)) as rows, rows:
        rows.execute("INSERT INTO rules_versions VALUES ('0123456789ab', '', '2026', ?)", (text,))
    database.grow(1)
    async with sending(hub, database) as runner:
        await soon(lambda: runner.position == 3)
    site = PlantSite.__new__(PlantSite)
    with closing(Database(hub.url, open_hub_for_reading)) as site.database:
        assert defect_in_words("D1", site.read_defect_names()) == "cold joint (D1)"
        hub.ask("INSERT INTO lines SELECT * FROM json_populate_record(NULL::lines, %s)", OTHER_LINE)
        assert site.read_defect_names() == {"D1": "cold_joint or void"}


def test_a_hub_of_the_schema_before_gets_the_columns_and_views_that_it_lacks(hub: HubDatabase) -> None:
    hub.ask("DROP VIEW final_images, final_boards, board_decisions")
    hub.ask("ALTER TABLE reviews DROP COLUMN of_epoch")
    hub.ask("ALTER TABLE lines DROP COLUMN defects")
    hub.ask("UPDATE schema_version SET version = version - 1")
    make_schema(hub.engine)
    assert hub.ask("SELECT of_epoch, defects FROM reviews, lines, final_images, final_boards") == []


@pytest.mark.promise(
    "Delivery to the plant",
    "Of two lines with one name the second is refused, until a person accepts it",
)
@in_a_loop
async def test_the_second_line_of_a_name_is_refused_until_a_person_accepts_it(
    hub: HubDatabase, database: ResultsDatabase, tmp_path: Path
) -> None:
    last = database.grow(5)
    other = ResultsDatabase(tmp_path / "other.db")
    other.begin_epoch()
    other.begin = other.begin.replace(day=22)
    others_last = other.grow(3, serial="other{}")
    page = SharedStatusPage.make("test")
    async with sending(hub, database) as runner:
        await soon(lambda: runner.position == last)
        async with sending(hub, other, identifier="pc-2", status_page=page):  # while the first is connected
            await soon(lambda: page.read().get("state") == "refused")
            assert "two lines have one name" in page.read()["last_error"]
    async with sending(hub, other, identifier="pc-2", status_page=page) as runner:  # and when it is not
        await soon(lambda: "coserve plant accept" in str(page.read().get("last_error")))
        assert counts(hub) == (10, 5, 0)
        hub.ask("UPDATE lines SET accepts = true WHERE line = 'line-1'")
        await soon(lambda: runner.position == others_last and counts(hub)[1] == 8)
    async with sending(hub, database, status_page=page):  # now that is the other one
        await soon(lambda: page.read().get("state") == "refused")
    page.close()
    kinds = {row["kind"] for row in hub.ask("SELECT kind FROM events")}
    assert kinds == {"joined", "name_taken", "replaced"}


@in_a_loop
async def test_a_hub_that_was_put_back_gets_again_what_it_lost(hub: HubDatabase, database: ResultsDatabase) -> None:
    last = database.grow(100)
    async with sending(hub, database) as runner:
        await soon(lambda: runner.position == last)
    hub.ask("DELETE FROM boards WHERE seq > 150")
    hub.ask("DELETE FROM inspections WHERE seq > 150")
    hub.ask("UPDATE lines SET last_seq = 150, last_at = NULL")
    async with sending(hub, database):
        await soon(lambda: counts(hub) == (200, 100, 0))


@pytest.mark.promise("Delivery to the plant", "A full disk at the hub loses nothing")
@in_a_loop
async def test_a_full_disk_at_the_hub_is_said_and_delivery_goes_on_when_there_is_room(
    hub: HubDatabase, database: ResultsDatabase
) -> None:
    last = database.grow(4000)
    page = SharedStatusPage.make("test")
    with tempfile.TemporaryDirectory(prefix="pgdisk") as folder, small_disk(Path(folder) / "disk", "256k") as disk:
        Path(folder).chmod(0o755)
        shutil.chown(disk, "postgres", "postgres")
        hub.ask(f"CREATE TABLESPACE tiny LOCATION '{disk}'")
        hub.ask("ALTER TABLE boards SET TABLESPACE tiny")
        async with sending(hub, database, status_page=page) as runner:
            await soon(lambda: "its disk is full" in str(page.read().get("last_error")))
            assert page.read()["state"] == "waiting"
            assert counts(hub)[1] < 4000
            hub.ask("ALTER TABLE boards SET TABLESPACE pg_default")  # a larger disk
            await soon(lambda: runner.position == last)
        hub.ask("DROP TABLESPACE tiny")
    page.close()
    assert counts(hub) == (8000, 4000, 0)
    assert materialised(hub) == (8000, 8000, 4000)


@in_a_loop
async def test_decisions_at_the_hub_reach_the_line_and_its_answer_comes_back(
    hub: HubDatabase, database: ResultsDatabase
) -> None:
    database.grow(1)
    side = LineSide(database)
    ask = (
        "INSERT INTO review_requests (line, epoch, inspection_id, verdict, defect, reviewer, newest)"
        " SELECT 'line-1', epoch, 1, 'fail', 'D9', 'Eva', %s FROM lines"
    )
    async with sending(hub, database, side=side) as runner:
        await soon(lambda: runner.position == 3)
        side.refuses = ReviewAnswerError("no daemon answers", is_final=False)
        hub.ask(ask, None)
        await asyncio.sleep(0.3)
        assert hub.value("SELECT state FROM review_requests") == "asked"
        side.refuses = None
        await soon(lambda: hub.value("SELECT state FROM review_requests") == "accepted")
        assert side.decisions == [{"inspection_id": 1, "verdict": "fail", "defect": "D9", "reviewer": "Eva"}]
        side.refuses = ReviewAnswerError("somebody decided in between", is_final=True)
        hub.ask(ask, 7)
        await soon(lambda: hub.value("SELECT count(*) FROM review_requests WHERE state = 'refused'") == 1)
        hub.ask(ask.replace("epoch, 1", "'old', 1"), None)
        await soon(lambda: hub.value("SELECT count(*) FROM review_requests WHERE state = 'refused'") == 2)
    answers = [row["answer"] for row in hub.ask("SELECT answer FROM review_requests ORDER BY request_id")]
    assert answers == [
        None,
        "somebody decided in between",
        "the line was restored since: its images have other numbers",
    ]


@in_a_loop
async def test_a_database_that_is_no_hub_or_lets_nobody_in_is_refused(
    postgresql: Server, hub: HubDatabase, database: ResultsDatabase
) -> None:
    database.grow(1)
    page = SharedStatusPage.make("test")
    url, hub.url = hub.url, postgresql.url("no_hub")
    async with sending(hub, database, status_page=page):
        await soon(lambda: "coserve plant run" in str(page.read().get("last_error")))
    hub.url = url.replace("/hub_", "/absent_")
    async with sending(hub, database, status_page=page):
        await soon(lambda: "create it, or correct `database`" in str(page.read().get("last_error")))
    assert page.read()["state"] == "refused"
    page.close()
