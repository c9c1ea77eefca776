"""The store, the views and a whole line on a real PostgreSQL server: what SQLite answers, it answers too."""

import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, TextClause, create_engine, func, insert, select, text
from sqlalchemy.exc import IntegrityError, OperationalError
from typer.testing import CliRunner, Result

from daemon.dashboard.site.database import Database, TooMuchToCount
from daemon.line.rulebook import Rulebook
from daemon.records import ExpertSwitch, ExpertVersion, TextOutcome, TextRequest
from daemon.storage.database.boards import has_serial, serial_range
from daemon.storage.database.connections import StoreError, open_for_reading, open_for_writing, redacted_url
from daemon.storage.database.generations import accept_texts, finish_texts
from daemon.storage.database.migrate import migrate
from daemon.storage.database.prune import (
    AgeLimit,
    forget_images,
    forget_others,
    kept_bytes,
    note_age,
    old_boards,
    oldest_kept,
    read_age_marks,
    unused_rules,
)
from daemon.storage.database.reviews import (
    ReviewDecision,
    ReviewRefusedError,
    calls_by_version,
    count_of,
    counting_boxes,
    history,
    recent_confidences,
    waiting,
)
from daemon.storage.database.rows import ImageCopy
from daemon.storage.database.schema import VIEWS, boards, generations, inspections, metadata, reviews, stream_position
from daemon.storage.database.shadow import add_answers, shadow_report
from daemon.storage.database.store import open_store
from experts.spec import digest_of
from experts.versions import Shadow
from tests import ROOT
from tests.contract.client import Line as RunningLine
from tests.daemon.storage.database.postgresql_server import WANTED, Server, a_server, programs
from tests.daemon.storage.database.store_parts import (
    RULES,
    SETTINGS,
    Line,
    MovingClock,
    a_box,
    a_stage,
    an_arrival,
    an_outcome,
    some_rules,
)
from tests.lines import a_jpeg
from tools.cli.main import app

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = [pytest.mark.skipif(programs() is None, reason=WANTED), pytest.mark.not_fast("starts processes")]


@dataclass
class _Line(Line):
    """A line whose database may be anywhere."""

    address: str = ""

    @property
    def url(self) -> str:
        return self.address


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with a_server() as server:
        yield server


@pytest.fixture(scope="module")
def lines(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[_Line]]:
    """Two lines with the same past, on SQLite and on PostgreSQL."""
    lines: list[_Line] = []
    for address in (f"sqlite:///{tmp_path_factory.mktemp('one')}/inspection.db", server.url("lines")):
        clock = MovingClock()
        store = open_store(address, clock=clock.clock, expert_version=_version)
        lines.append(_Line(tmp_path_factory.mktemp("line"), clock, Rulebook(some_rules()), store, address=address))
        _live(lines[-1])
    yield lines
    for line in lines:
        line.store.close()


def _version(expert: str, expert_version: str) -> ExpertVersion:
    return ExpertVersion(expert, expert_version, "0" * 64, "resnet18", ("ok", "Lötbrücke"), 4096, "float32", "")


def _live(line: _Line) -> None:
    """Boards that close, wait and come late, boxes, loads, texts, copies, decisions, a restart."""
    chain = (a_stage(), a_stage("yolo", 2, detections=(a_box(), a_box("void")), label=None))
    for n, serial in enumerate(("A%1", "a_2", "Ünï/板", "Z", "a")):
        first, second = line.accept(
            *(an_arrival(f"{n}/{k}", "R0402", f"R{k}", serial=serial, lot=f"L{n % 2}") for k in (1, 2))
        )
        line.judge(an_outcome(first.inspection_id), an_outcome(second.inspection_id, "fail", "D1", stages=chain))
        line.clock.pass_s(3600.0)
        line.judge()  # closes what waits for U1 and U2 in vain
    line.inspect("R0402", "R1", "review", type="tiny", serial="T", attempt=2**40)
    line.accept(an_arrival("waits", "R0402", "R9", type="loose", serial="W", deadline_ms=60_000))
    switch = ExpertSwitch(line.clock.set_s, "cpu", "cpu", "r50", ("yolo",), 4096, 1.5, "disk", "demand")
    line.store.write((), [switch], [ImageCopy(2, "images/2026-11-21/000000/2.jpg")])
    answer = {"inspection_id": 2, "expert": "r50", "expert_version": "feedfeedfeed", "step": 0, "label": None}
    answer |= {"confidence": 0.5, "infer_ms": 1.5, "outcome": "fail Lötbrücke", "outcome_in_service": "pass"}
    for inspection_id in (1, 2, 2, 2**40):  # none twice, and none of an image that is gone
        line.store.transact(add_answers, [answer | {"inspection_id": inspection_id}])
    line.store.transact(note_age, 5, 4.0, 60)
    request = TextRequest("mes", "g1", "m", "what\0 is it?", 2**40, None, 900, None, None, stream=True)
    (text_row,) = line.store.transact(accept_texts, [request])
    line.store.transact(finish_texts, [TextOutcome(text_row.generation_id, None, "expert_failed")])  # type: ignore[union-attr]
    boxes = (("Lötbrücke", 0.1, 2.0, 30.5, 4e6), ("void", 0.0, 0.0, 1 / 3, 1.0))
    line.store.review(ReviewDecision(2, "Žofie", None, "pass", None, "100 % clean_", boxes=boxes))
    line.store.review(ReviewDecision(4, "Žofie", None, "fail", "D2", boxes=boxes))
    line.store.review(ReviewDecision(4, "Jan", 2, None))
    line.reopen(60.0)
    line.accept(an_arrival("is here", "R0402", "R9", type="loose", serial="V"))
    line.inspect("R0402", "R1", type="tiny", serial="T2")


@contextmanager
def asking(url: str) -> Iterator[Connection]:
    engine = open_for_reading(url)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def all_of(name: str) -> TextClause:
    return text(f'SELECT * FROM "{name}"')  # noqa: S608 - our tables and views


def rows(connection: Connection, query: Any) -> list[str]:
    """Return the rows in a sorted order, each with the digits that both databases agree on; 1 is not 1.0."""
    answers = connection.execute(query)
    return sorted(repr([round(value, 12) if isinstance(value, float) else value for value in row]) for row in answers)


def alike(lines: list[_Line], question: Any) -> Any:
    """Return the answer of `question(connection)`, which both databases give."""
    answers = []
    for line in lines:
        with asking(line.url) as connection:
            answers.append(question(connection))
    assert answers[0] == answers[1]
    return answers[1]


def test_the_migrations_make_the_schema_of_the_models_and_a_second_start_nothing(server: Server):
    url = server.url("empty")
    engine = open_for_writing(url, 2000)
    try:
        migrate(engine)
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert migrate(engine) is None
    finally:
        engine.dispose()


def test_keys_and_values_of_the_contract_are_enforced(lines: list[_Line]):
    engine = lines[1].store.engine
    texts = {"serial": "S", "board_type": "a", "first_seen_at": "", "rules_version": ""}
    board = texts | {"board_id": 900, "attempt": 1, "expected": 1}
    image = dict.fromkeys(("source", "image_id", "component", "designator", "accepted_at", "image_sha256"), "")
    image |= {"inspection_id": 900, "board_id": 900, "image_bytes": 1, "status": "done", "rules_version": ""}
    for wrong, says in (
        (insert(boards).values(board | {"verdict": "maybe"}), "ck_boards_verdict"),
        (insert(boards).values(board | {"seq": select(func.max(boards.c.seq)).scalar_subquery()}), "uq_boards_seq"),
        (insert(inspections).values(image), "fk_inspections_board_id"),
        (insert(reviews).values(inspection_id=900, at="", reviewer="", verdict="pass"), "fk_reviews_inspection_id"),
    ):
        with pytest.raises(IntegrityError, match=says), engine.begin() as connection:
            connection.execute(wrong)


def test_a_line_s_past_is_the_same_row_for_row_and_message_for_message(lines: list[_Line]):
    streams = []
    for line in lines:
        with closing(line.reader()) as reader:
            streams.append(reader.results_since(0))
            assert reader.last_seq() == len(streams[-1]["items"])
            assert reader.find("cam1", "waits") is not None
            assert reader.find("cam1", "missing") is None
            assert reader.find_text("mes", "g1") is not None
            assert reader.open_rules("loose", "V", None) == line.rulebook.current.version
    assert streams[0] == streams[1]
    assert lines[0].store.recover() == lines[1].store.recover()
    assert lines[0].store.copies_to_make() == lines[1].store.copies_to_make()
    for name in (*VIEWS, *metadata.tables):
        if name in ("expert_settings", "changes", "runs"):
            alike(lines, lambda connection, name=name: rows(connection, all_of(name)))
        elif name == "stream_position":  # each database has an epoch of its own
            assert alike(lines, lambda connection: connection.execute(select(stream_position.c.last_seq)).all())
        elif name != "generations":  # it alone has a text with the sign U+0000
            assert alike(lines, lambda connection, name=name: rows(connection, all_of(name))), name


def test_a_sign_that_postgresql_has_not_becomes_another_and_loses_no_row(lines: list[_Line]):
    with asking(lines[1].url) as connection:
        assert connection.execute(select(generations.c.prompt)).scalar() == "what\ufffd is it?"
        assert connection.execute(has_serial_query("\0")).all() == []


def has_serial_query(*serials: str):
    return select(boards.c.serial).where(has_serial(*serials)).order_by(boards.c.serial)


@pytest.mark.parametrize("begins", ["a", "A", "ü", "Ü", "z", "%", "a_", "W"])
def test_serials_are_found_whole_and_by_their_beginning(lines: list[_Line], begins: str):
    first, after = serial_range(begins)
    folded = func.lower(boards.c.serial)
    where = (folded >= first) & (folded < after)
    alike(lines, lambda connection: connection.execute(select(boards.c.serial).where(where)).scalars().all())
    alike(lines, lambda connection: connection.execute(has_serial_query(begins, "Z", "z")).all())
    with asking(lines[1].url) as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        plan = connection.execute(text("EXPLAIN SELECT 1 FROM boards WHERE lower(serial) >= 'a'")).scalars().all()
    assert any("ix_boards_serial" in step for step in plan)


def test_what_became_of_answers_and_decisions_is_the_same(lines: list[_Line]):
    assert alike(lines, calls_by_version)
    assert alike(lines, recent_confidences)
    assert alike(lines, lambda connection: rows(connection, waiting()))
    assert alike(lines, lambda connection: connection.execute(count_of(waiting(), 3)).scalar()) == 3
    counting = alike(lines, lambda connection: [tuple(row) for row in connection.execute(counting_boxes([2, 4]))])
    assert [(row[2], *row[-3:-1]) for row in counting] == [("Lötbrücke", 2, "Žofie"), ("void", 2, "Žofie")]
    assert [review.reviewer for review in alike(lines, lambda connection: history(connection, 4))] == [
        "Žofie",
        "daemon",
    ]
    with pytest.raises(ReviewRefusedError):
        lines[1].store.review(ReviewDecision(4, "Jan", 1, "pass"))


def test_a_version_in_shadow_is_compared_alike(lines: list[_Line]):
    in_force = ("0123456789ab", digest_of(SETTINGS))
    shadow = Shadow(version="feedfeedfeed", images=2, agreement=0.5)
    report = alike(
        lines, lambda connection: shadow_report(lambda query: connection.execute(query).all(), "r50", in_force, shadow)
    )
    assert (report["images"], report["outcomes"][0]["shadow"], report["holds"]) == (2, "fail Lötbrücke", False)


def test_what_may_be_pruned_is_the_same_and_goes(lines: list[_Line]):
    assert alike(lines, kept_bytes) == len(b"\xff\xd8\xffimage")
    assert alike(lines, lambda connection: oldest_kept(connection, 10, None))
    for line in lines:
        line.store.write(copies=[ImageCopy(6, "images/2026-11-21/000000/6.jpg")])
    old = AgeLimit("2027-01-01T00:00:00.000Z")
    boards = alike(lines, lambda connection: old_boards(connection, old, "", 10))
    assert alike(lines, lambda connection: oldest_kept(connection, 10, old))
    gone = [line.store.forget_boards([board.board_id for board in boards], old) for line in lines]
    assert gone[0] == gone[1]
    assert gone[1].boards > 1
    assert lines[0].store.transact(forget_others, old, 10) == lines[1].store.transact(forget_others, old, 10) > 0
    for line in lines:
        line.store.transact(note_age, 10, 5.0, 60)
        line.store.transact(note_age, 75, 6.0, 60)  # the first mark is not needed any more
        line.store.transact(forget_images, [2])
        line.store.keep_rules(some_rules(RULES.replace("20s", "21s")))
        line.store.keep_rules(some_rules(RULES.replace("20s", "22s")))
    assert [mark.running_s for mark in alike(lines, read_age_marks)] == [10, 75]
    unused, last_id = alike(lines, lambda connection: unused_rules(connection, old))
    assert len(unused) >= 2
    for line in lines:
        line.store.forget_rules(unused, last_id)
    left, _ = alike(lines, lambda connection: unused_rules(connection, old))
    assert left == [some_rules(RULES.replace("20s", "22s")).version]  # they are in force
    assert alike(lines, kept_bytes) == 0


def test_a_question_that_takes_too_long_is_broken_off_and_only_asked_rows_are_made(lines: list[_Line]):
    database = Database(lines[1].url)
    try:
        with pytest.raises(TooMuchToCount):
            database.rows("SELECT pg_sleep(60)", limit=1, timeout_s=0.05)
        endless = "SELECT generate_series(1, 1000000000)"
        assert [n for (n,) in database.rows(endless, limit=3, timeout_s=120.0)] == [1, 2, 3]
    finally:
        database.close()


def test_a_second_daemon_is_refused_until_the_first_has_gone(server: Server, monkeypatch: pytest.MonkeyPatch):
    url = server.url("shared")
    first = open_store(url)
    with monkeypatch.context() as patched:
        patched.setattr("daemon.storage.database.postgresql._LOCK_WAIT_MS", 50)
        with pytest.raises(StoreError, match=r"coserve:\*\*\*@.*another daemon writes"):
            open_store(url)
    first.close()
    open_store(url).close()


def test_a_server_misses_a_daemon_whose_cable_was_cut_before_that_gives_up_waiting(server: Server):
    from daemon.storage.database.postgresql import _LOCK_WAIT_MS

    engine = open_for_writing(server.url("cut", host="127.0.0.1"), 2000)
    with engine.connect() as connection:

        def setting(name: str) -> int:
            return int(connection.execute(text("SELECT current_setting(:name)"), {"name": name}).scalar_one())

        idle_s, every_s, count = (setting(f"tcp_keepalives_{name}") for name in ("idle", "interval", "count"))
        assert 0 < 1000 * (idle_s + every_s * count) < _LOCK_WAIT_MS
        assert 0 < setting("tcp_user_timeout") < _LOCK_WAIT_MS
    engine.dispose()


def test_after_the_server_s_end_everybody_goes_on_with_what_was_committed(server: Server, tmp_path: Path):
    url = server.url("ended")
    clock = MovingClock()
    line = _Line(tmp_path, clock, Rulebook(some_rules()), open_store(url, clock=clock.clock), address=url)
    with closing(line.store), closing(line.reader()) as reader:
        line.inspect("R0402", "R1")
        assert reader.find("cam1", "image-1") is not None
        server.stop(signal.SIGQUIT)
        with pytest.raises(OperationalError):
            line.inspect("R0402", "R2")
        with pytest.raises(OperationalError):
            reader.find("cam1", "image-1")
        server.start()
        line.inspect("R0402", "R2")
        assert [item["id"] for item in reader.results_since(0)["items"]] == ["image-1", "image-3"]
        assert reader.find("cam1", "image-1") is not None


def test_a_server_that_is_not_there_is_named_without_the_password():
    with pytest.raises(StoreError, match=r"coserve:\*\*\*@.*name another `database`") as refused:
        open_store("postgresql+psycopg://coserve:secret@/line?host=/nowhere")
    assert "secret" not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "secret" not in redacted_url("postgresql+psycopg://coserve@/line?host=/nowhere&password=secret")


def coserve(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_line_runs_on_it_with_pages_commands_a_kill_a_decision_and_a_server_that_stops(
    server: Server, tmp_path: Path, experts_folder: Path
):
    url = server.url("running")
    endpoints = {"intake": ["ipc://run/intake.sock"]} | {
        name: f"ipc://run/{name}.sock" for name in ("results", "control")
    }
    endpoints["http"] = "http://127.0.0.1:0"
    plain_url = url.replace("postgresql+psycopg:", "postgresql:")
    line = RunningLine(tmp_path, experts_folder, database=plain_url, endpoints=endpoints)
    service = line.service()
    with service:
        for _ in range(2):
            line.send(board={"type": "pair", "serial": "B1"})
        line.boards("B1")
        waiting = [line.send(component="V", board={"type": "free", "serial": "S2"}) for _ in range(4)]
        assert service.process is not None
        service.process.kill()
        service.process.wait()
    with line.service():
        assert [line.result(image)["verdict"] for image in waiting] == ["review"] * 4
        decided = line.control("review", inspection_id=3, verdict="fail", reviewer="Eva", defect="D301")
        assert decided["type"] == "ok", decided
        _, _, log = (tmp_path / "daemon.log").read_text(encoding="utf-8").rpartition("event=http_bound url=")
        for page in ("", "boards", "boards?serial=b", "boards/1", "review", "defects", "experts/C0603", "machine"):
            with urllib.request.urlopen(f"{log.split()[0]}/{page}", timeout=60) as answer:  # noqa: S310 - our own
                assert answer.status == 200, page
        for command in (("explain", 3), ("report", "B1"), ("review", "--list"), ("db", "check"), ("db", "prune")):
            done = coserve(*command, "--config", line.config)
            assert done.exit_code == 0, done.output
            assert "secret" not in done.output
        done = coserve("results", "--config", line.config, "--json")
        final = {row["inspection_id"]: row["verdict"] for row in json.loads(done.stdout)}
        assert (final[1], final[3], final[4]) == ("pass", "fail", "review")
        server.stop(signal.SIGQUIT)
        header = line.inspect()
        with line.peer() as peer:
            assert peer.ask(header, a_jpeg(99))["type"] == "busy"
        line.wait(lambda: line.status()["state"] == "degraded")
        server.start()
        line.wait(lambda: line.status()["state"] == "ready")
        with line.peer() as peer:
            assert peer.ask(header, a_jpeg(99))["type"] == "accepted"
        assert line.result(header["id"])["verdict"] == "pass"
    assert coserve("export", "--serial", "S2", "--out", tmp_path / "package", "--config", line.config).exit_code == 0
    assert "secret" not in (tmp_path / "package" / "manifest.json").read_text(encoding="utf-8")
    for no_file in (
        ("db", "backup", tmp_path / "x.db", "--config", line.config),
        ("backup", line.config, tmp_path / "x"),
    ):
        done = coserve(*no_file)
        assert done.exit_code in (1, 2)
        assert "pg_dump" in done.output
        assert "secret" not in done.output


def test_the_grants_of_the_page_cover_tables_and_views_of_later_versions(server: Server, tmp_path: Path) -> None:
    address = server.url("grants")
    open_store(address, clock=MovingClock().clock).close()
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    (all_now, all_later) = re.findall(r"^ +((?:GRANT|ALTER DEFAULT).*;)$", page, flags=re.MULTILINE)
    owner = create_engine(address, isolation_level="AUTOCOMMIT")
    reader = create_engine(address.replace("coserve:secret@", "quality@"))

    def may_read(*names: str) -> list[bool]:
        with reader.connect() as connection:
            may = text("SELECT has_table_privilege(:name, 'SELECT')")
            return [connection.execute(may, {"name": name}).scalar_one() for name in names]

    with owner.connect() as connection:
        connection.execute(text("CREATE ROLE quality LOGIN"))
        assert may_read("boards", "final_boards") == [False, False]
        connection.execute(text(all_now))
        connection.execute(text("CREATE TABLE later (n integer)"))
        assert may_read("boards", "final_boards", "later") == [True, True, False]
        connection.execute(text(all_later))
        connection.execute(text("CREATE TABLE latest (n integer)"))
        connection.execute(text("DROP VIEW final_verdicts"))
        connection.execute(text(f"CREATE VIEW final_verdicts AS {VIEWS['final_verdicts']}"))
        assert may_read("latest", "final_verdicts") == [True, True]
    with reader.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM final_boards")).scalar_one() == 0
    for engine in (owner, reader):
        engine.dispose()
