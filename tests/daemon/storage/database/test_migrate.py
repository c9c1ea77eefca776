"""The database across versions: made, migrated with a copy kept, and refused where it comes from the future."""

import re
import shutil
import sqlite3
import stat
import subprocess
import textwrap
from contextlib import closing

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect

from daemon.storage.database import migrate as migrating
from daemon.storage.database.connections import StoreError, open_for_writing
from daemon.storage.database.migrate import migrate
from daemon.storage.database.schema import metadata
from daemon.storage.database.store import open_store
from daemon.storage.database.views import VIEWS
from tests import ROOT
from tests.daemon.storage.database.store_parts import a_line, an_arrival, an_outcome

NEXT_REVISION = '''"""Which camera took the image: a made-up revision."""

import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{head}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("inspections", sa.Column("camera", sa.Text()))
    {more}
'''


def ask(path, query):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
def newer(tmp_path, monkeypatch):
    """Makes this program one revision newer than it is."""

    def become(more: str = "") -> None:
        migrations = tmp_path / "migrations"
        shutil.copytree(
            migrating.Path(migrating.__file__).with_name("migrations"),
            migrations,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        ((head,),) = ask(tmp_path / "inspection.db", "SELECT version_num FROM alembic_version")
        (migrations / "versions" / "next.py").write_text(NEXT_REVISION.format(head=head, more=more or "pass"))
        real = migrating.alembic_config

        def config():
            found = real()
            found.set_main_option("script_location", str(migrations))
            return found

        monkeypatch.setattr(migrating, "alembic_config", config)

    return become


@pytest.mark.filterwarnings("ignore:.*expression-based index")  # which Alembic cannot compare: test_serials.py does
def test_a_migrated_database_is_what_the_models_say(tmp_path):
    engine = open_for_writing(f"sqlite:///{tmp_path}/inspection.db", 1000)
    assert migrate(engine) is None
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        assert sorted(inspect(connection).get_view_names()) == sorted(VIEWS)
    engine.dispose()


def test_opening_an_up_to_date_database_copies_nothing(tmp_path):
    line = a_line(tmp_path)
    line.reopen()
    line.store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["inspection.db"]


def test_a_due_migration_copies_the_old_file_aside_and_keeps_every_result(tmp_path, newer):
    line = a_line(tmp_path)
    for designator in ("R1", "R2"):
        line.inspect("R0402", designator, "fail")
    reader = line.reader()
    before = reader.results_since(0)
    reader.close()
    line.store.close()
    newer()
    line.reopen()
    reader = line.reader()
    assert reader.results_since(0) == before
    reader.close()
    line.store.close()
    copy = tmp_path / "inspection.db.before-9999"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o640
    assert ask(copy, "SELECT count(*) FROM inspections") == [(2,)]
    assert "camera" not in {row[1] for row in ask(copy, "PRAGMA table_info(inspections)")}
    assert "camera" in {row[1] for row in ask(tmp_path / "inspection.db", "PRAGMA table_info(inspections)")}
    assert ask(tmp_path / "inspection.db", "SELECT count(*) FROM final_verdicts") == [(2,)]
    assert not list(tmp_path.glob("*.part"))


def test_a_migration_that_fails_half_way_leaves_the_old_database_as_it_was(tmp_path, newer):
    line = a_line(tmp_path)
    line.inspect("R0402", "R1")
    line.store.close()
    newer(more="op.drop_table('no_such_table')")
    with pytest.raises(StoreError, match="no such table"):
        line.reopen()
    database = tmp_path / "inspection.db"
    assert "camera" not in {row[1] for row in ask(database, "PRAGMA table_info(inspections)")}
    assert ask(database, "SELECT count(*) FROM final_verdicts") == [(1,)]
    assert ask(database, "PRAGMA integrity_check") == [("ok",)]


def test_a_database_of_a_newer_version_is_refused_and_left_alone(tmp_path):
    a_line(tmp_path).store.close()
    with closing(sqlite3.connect(tmp_path / "inspection.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'abcd'")
    before = (tmp_path / "inspection.db").read_bytes()
    with pytest.raises(StoreError, match=r"newer version of CoServe \(schema abcd; .*before-abcd"):
        open_store(f"sqlite:///{tmp_path}/inspection.db")
    assert (tmp_path / "inspection.db").read_bytes() == before


def test_another_programs_database_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "inspection.db")) as connection, connection:
        connection.execute("CREATE TABLE recipes_of_my_grandmother (id INTEGER)")
    with pytest.raises(StoreError, match="tables of another program"):
        open_store(f"sqlite:///{tmp_path}/inspection.db")


def test_a_database_that_somebody_holds_locked_is_an_error_that_says_so(tmp_path):
    a_line(tmp_path).store.close()
    with closing(sqlite3.connect(tmp_path / "inspection.db")) as shell:
        shell.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked"):
            open_store(f"sqlite:///{tmp_path}/inspection.db", busy_timeout_ms=20)
        shell.rollback()


def the_way_back() -> str:
    """The commands of docs/upgrading.md, "Going back"."""
    text = (ROOT / "docs" / "upgrading.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```sh\n(.*?)```", text.partition("## Going back")[2].partition("\n## ")[0], re.DOTALL)
    return textwrap.dedent(block)


def test_the_documented_way_back_gives_the_older_version_its_database(tmp_path, newer, monkeypatch):
    line = a_line(tmp_path)
    line.inspect("R0402", "R1", "fail")
    (waits,) = line.accept(an_arrival("waits", "R0402", "R2"))
    line.store.close()
    before = ask(tmp_path / "inspection.db", "SELECT * FROM inspections ORDER BY 1")
    newer()
    line.reopen()
    line.judge(an_outcome(waits.inspection_id))
    line.inspect("QFP64", "U1")
    line.store.close()
    monkeypatch.undo()
    with pytest.raises(StoreError, match=r"put back the copy .*inspection\.db\.before-9999, as docs/upgrading"):
        line.reopen()
    commands = the_way_back().replace("/var/lib/coserve", str(tmp_path)).replace("before-0004", "before-9999")
    subprocess.run(["bash", "-euc", commands], check=True)
    assert ask(tmp_path / "inspection.db", "SELECT * FROM inspections ORDER BY 1") == before
    line.reopen()
    assert [image.image_id for image in line.store.recover().pending] == ["waits"]
    assert [message.seq for message in line.judge(an_outcome(waits.inspection_id))] == [2]
    line.store.close()
    assert stat.S_IMODE((tmp_path / "inspection.db").stat().st_mode) == 0o640
    assert ask(tmp_path / "newer" / "inspection.db", "SELECT count(*) FROM inspections") == [(3,)]
