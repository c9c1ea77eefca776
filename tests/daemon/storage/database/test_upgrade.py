"""Databases of every released schema, opened by this version: every row stays, waiting images are judged."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from daemon.line.rulebook import Rulebook
from daemon.records import JournalKey
from daemon.storage.database.connections import open_for_writing
from daemon.storage.database.migrate import alembic_config, migrate
from daemon.storage.database.schema import metadata
from daemon.storage.database.store import open_store
from daemon.storage.database.views import VIEWS
from daemon.storage.journal import Journal, JournalError
from daemon.storage.writer import Writer
from tests.contract.client import Line
from tests.daemon.storage.database.kept_schemas import FOLDER, SCHEMAS, all_rows, put_back
from tests.daemon.storage.database.store_parts import an_outcome, some_rules

WAITING = [8, 9, 10, 11, 12]
LAST_SEQ = 9
#: Tables of which a start takes nothing and changes nothing; of the others it may finish what waited.
LASTING = ("boards", "inspections", "stages", "detections", "reviews", "generations", "rules_versions", "recipes")


def ask(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def head() -> str:
    found = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert found is not None
    return found


def test_every_schema_that_was_ever_in_force_has_a_kept_database():
    revisions = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    missing = revisions - set(SCHEMAS)
    assert not missing, f"run: .venv/bin/python -m tests.daemon.storage.database.dump_schema, for schema {missing}"
    assert all((FOLDER / f"{schema}.journal").exists() for schema in SCHEMAS)


@pytest.fixture(params=SCHEMAS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A database of each schema."""
    return put_back(request.param, tmp_path)


def test_a_kept_database_has_something_of_everything(old: Path):
    empty = [key.split()[0] for key, rows in all_rows(old).items() if not rows]
    assert empty == []
    assert ask(old, "SELECT inspection_id FROM pending WHERE task = 'judge' ORDER BY 1") == [(n,) for n in WAITING]
    assert ask(old, "SELECT last_seq FROM stream_position") == [(LAST_SEQ,)]


@pytest.mark.filterwarnings("ignore:.*expression-based index")  # which Alembic cannot compare: test_serials.py does
def test_an_upgraded_database_keeps_every_row_and_becomes_what_the_models_say(old: Path):
    before = all_rows(old)
    schema = ask(old, "SELECT version_num FROM alembic_version")
    engine = open_for_writing(f"sqlite:///{old}", 1000)
    copy = migrate(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()
    assert all_rows(old, like=before) == before
    assert (copy is None) == (schema == [(head(),)])
    if copy is not None:
        assert all_rows(copy) == before
        assert ask(copy, "SELECT version_num FROM alembic_version") == schema
    assert ask(old, "PRAGMA integrity_check") == [("ok",)]
    assert ask(old, "PRAGMA foreign_key_check") == []


def test_an_upgraded_database_is_made_like_a_new_one(old: Path, tmp_path: Path):
    open_store(f"sqlite:///{old}").close()
    open_store(f"sqlite:///{tmp_path}/new.db").close()
    shape = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE type IN ('index', 'view') ORDER BY 1, 2"
    assert ask(old, shape) == ask(tmp_path / "new.db", shape)
    for view in VIEWS:
        ask(old, f"SELECT * FROM {view}")  # noqa: S608 - a name of our own
    assert ask(old, "SELECT count(*) FROM final_verdicts") == [(7,)]
    assert ask(old, "SELECT false_calls, reviewed FROM false_calls WHERE component = 'R0402'") == [(0, 1)]


def test_the_store_goes_on_where_the_older_version_stopped(old: Path):
    store = open_store(f"sqlite:///{old}")
    recovery = store.recover()
    assert [image.inspection_id for image in recovery.pending] == WAITING
    assert recovery.last_seq == LAST_SEQ
    written = store.write([an_outcome(number) for number in WAITING])
    store.close()
    assert [message.seq for message in written.published][:1] == [LAST_SEQ + 1]
    seqs = [seq for (seq,) in ask(old, "SELECT seq FROM stream ORDER BY seq")]
    assert seqs == list(range(1, LAST_SEQ + len(written.published) + 1))
    assert ask(old, "SELECT count(*) FROM inspections WHERE status <> 'done'") == [(0,)]


def test_bytes_that_an_older_version_accepted_are_read_from_its_journal(old: Path, tmp_path: Path):
    journal = Journal(tmp_path / "journal")
    store = open_store(f"sqlite:///{old}")
    writer = Writer(
        store,
        journal,
        Rulebook(some_rules()),
        tmp_path / "images",
    )
    pending = writer.recover().pending
    lengths = dict(ask(old, "SELECT inspection_id, image_bytes FROM inspections"))
    assert [len(journal.read(image.key)) for image in pending] == [lengths[number] for number in WAITING]
    store.close()
    journal.close()


@pytest.mark.parametrize("schema", [SCHEMAS[0], SCHEMAS[-1]])  # those between: the tests above
def test_the_whole_daemon_judges_what_an_older_version_accepted(schema: str, tmp_path: Path, experts_folder: Path):
    line = Line(tmp_path / "line", experts_folder)
    path = put_back(schema, line.folder)
    rules = ask(path, "SELECT text FROM rules_versions")[0][0]
    line.write_rules(str(rules))
    before = all_rows(path)
    with line.service():
        line.idle()
        line.send(board={"type": "patient", "serial": "new"}, component="QFP64")
        line.idle()
        stream = line.stream()
    assert [message["seq"] for message in stream] == list(range(1, len(stream) + 1))
    judged = dict(ask(path, "SELECT inspection_id, verdict FROM inspections ORDER BY inspection_id"))
    reasons = dict(ask(path, "SELECT inspection_id, reason FROM inspections ORDER BY inspection_id"))
    assert (judged[8], reasons[8]) == ("unknown", "deadline")  # it had a minute, years ago
    assert {judged[number] for number in (9, 10, 11, 12)} <= {"pass", "fail"}
    assert judged[13] in ("pass", "fail")
    kept = "SELECT count(*) FROM inspections WHERE image_path IS NOT NULL AND inspection_id IN (2, 3, 4, 7)"
    assert ask(path, kept) == [(4,)]
    assert ask(path, "SELECT count(*) FROM pending WHERE task = 'judge'") == [(0,)]
    after = all_rows(path, like=before)
    for key in before:
        if key.split()[0] in LASTING:
            final = [row for row in before[key] if None not in row or row in after[key]]
            assert set(final) <= set(after[key])
            assert len(after[key]) >= len(before[key])


def test_a_record_of_a_newer_journal_is_never_taken_for_another(tmp_path: Path):
    path = put_back(SCHEMAS[-1], tmp_path)
    segment = tmp_path / "journal" / "segment-00000001.journal"
    segment.write_bytes(segment.read_bytes().replace(b"CSJ1", b"CSJ9"))
    journal = Journal(tmp_path / "journal")
    for found in ask(path, 'SELECT segment, "offset", length FROM pending'):
        with pytest.raises(JournalError):
            journal.read(JournalKey(*found))  # type: ignore[arg-type]
    journal.close()
