"""The hub: mistakes in plant.yaml with their line, its schema, its upkeep, its commands."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psycopg
import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

from daemon.consumers.plant.tables import inspections
from daemon.errors import ConfigError, StartError
from daemon.plant.schema import SCHEMA_VERSION, make_schema, open_database
from daemon.plant.settings import HubSettings, Retention, load_plant
from daemon.plant.upkeep import keep_in_order, prune_releases
from daemon.registry.manifest import SignedManifest
from daemon.registry.store import Store
from tests import ROOT
from tests.daemon.consumers.plant.hub_database import HubDatabase, hub
from tests.daemon.registry.test_manifest import a_manifest
from tests.daemon.storage.database.postgresql_server import WANTED, Server, programs
from tests.ports import free_port
from tests.waiting import until
from tools.cli.main import app

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)
__all__ = ["hub"]


def test_every_mistake_in_plant_yaml_comes_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "plant.yaml"
    file.write_text(
        "database: sqlite:///x.db\n"
        "http: 127.0.0.1\n"
        "pictures: {folder: a, s3: 's3://b'}\n"
        "retention: {results: 400}\n"
        "lines:\n"
        "  line-1: {key: absent}\n"
        "  'x; DROP TABLE lines': {key: absent}\n"
        "colour: red\n"
    )
    with pytest.raises(ConfigError) as error:
        load_plant(file)
    first = "\n".join(error.value.problems)
    for line, text in ((1, "needs PostgreSQL"), (2, "http://ADDRESS:PORT"), (4, "400d"), (7, "line-3"), (8, "colour")):
        assert re.search(rf"plant.yaml:{line}:.*{text}" if text != "400d" else rf"plant.yaml:{line}:.*duration", first)
    file.write_text(
        "database: postgresql://coserve@/plant\npictures: {folder: a, s3: 's3://b'}\nlines:\n  line-1: {key: absent}\n"
    )
    with pytest.raises(ConfigError) as error:
        load_plant(file)
    assert [re.sub(r".*yaml:(\d+):.*", r"\1", problem) for problem in error.value.problems] == ["2", "4"]


def test_an_address_that_is_no_database_of_postgresql_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plant.yaml").write_text("database: postgresql://me:sec/ret@nowhere/x\n")
    with pytest.raises(ConfigError, match="expected postgresql://USER@HOST:PORT/DATABASE"):
        load_plant(tmp_path / "plant.yaml")


def test_the_example_of_the_page_is_right(tmp_path: Path) -> None:
    page = (ROOT / "docs/plant.md").read_text()
    example = next(text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if text.startswith("database"))
    (tmp_path / "plant.yaml").write_text(example)
    (tmp_path / "keys").mkdir()
    for name in ("database_password", "line-1.key", "line-3.key"):
        (tmp_path / "keys" / name).write_text(name + "k" * 40)
        (tmp_path / "keys" / name).chmod(0o600)
    assert load_plant(tmp_path / "plant.yaml").retention.lines == {"line-3": 30 * 86400.0}


def test_two_lines_with_one_key_or_a_line_with_the_hubs_are_a_mistake(tmp_path: Path) -> None:
    for name in ("hub", "line-1", "line-2", "line-3"):
        (tmp_path / name).write_text("h" * 40 if name in ("hub", "line-3") else "k" * 40)
        (tmp_path / name).chmod(0o600)
    text = "database: postgresql://coserve@/plant\nhttp_token: hub\nlines:\n"
    (tmp_path / "plant.yaml").write_text(text + "".join(f"  line-{n}: {{key: line-{n}}}\n" for n in (1, 2, 3)))
    with pytest.raises(ConfigError) as error:
        load_plant(tmp_path / "plant.yaml")
    first, second = error.value.problems
    assert "plant.yaml:5:17: is that of lines.line-1.key too: make a key for each" in first
    assert "plant.yaml:6:17: is that of http_token too" in second


def test_the_schema_is_made_once_and_a_newer_one_is_refused(postgresql: Server) -> None:
    engine = open_database(postgresql.url("twice"))
    assert [make_schema(engine), make_schema(engine)] == [SCHEMA_VERSION] * 2
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE schema_version SET version = 99")
    with pytest.raises(StartError, match="has schema 99"):
        make_schema(engine)
    engine.dispose()


def test_a_lines_role_cannot_put_a_table_of_its_own_before_the_hubs(hub: HubDatabase) -> None:
    with psycopg.connect(hub.conninfo, autocommit=True) as connection:
        connection.execute("CREATE ROLE a_line")
        connection.execute("SET ROLE a_line")
        connection.execute("CREATE TEMP TABLE partitions (day date)")
        connection.execute("SELECT ensure_day(current_date + 6)")  # runs as the hub, and a trigger there would too
        assert connection.execute("SELECT count(*) FROM pg_temp.partitions").fetchone() == (0,)
    assert hub.value("SELECT count(*) FROM public.partitions WHERE day = current_date + 6") == 1


def test_upkeep_makes_days_ahead_and_forgets_by_line(hub: HubDatabase) -> None:
    now, removed = datetime.now(UTC), MagicMock(stored_before=lambda _: iter(()))
    assert not any(keep_in_order(hub.engine, Retention(), removed, now.timestamp()).values()), "no line has joined yet"
    for line in ("line-1", "line-2"):
        hub.add_line(line)
        for seq, days in ((1, 100), (2, 20), (3, 0)):
            at = now - timedelta(days=days)
            hub.ask("SELECT ensure_day(%s::date)", at.date())
            hub.add_image(seq, at, line)
            hub.add_picture(seq, "shared" if seq == 2 else f"{line}-{seq}", at, line)
    assert hub.value("SELECT count(*) FROM inspections_other") == 0
    day = 86400.0
    retention = Retention(results="60d", lines={"line-2": "10d"})  # type: ignore[arg-type]
    with hub.engine.begin() as long_reader:
        long_reader.execute(select(func.count()).select_from(inspections))
        with pytest.raises(OperationalError, match="lock timeout"):  # lines that write would wait behind it
            keep_in_order(hub.engine, retention, removed, now.timestamp())
    counts = keep_in_order(hub.engine, retention, removed, now.timestamp())
    assert counts == {"days": 1, "rows": 1, "pictures": 3}
    left = hub.ask("SELECT line, seq FROM inspections ORDER BY line, seq")
    assert [(row["line"], row["seq"]) for row in left] == [("line-1", 2), ("line-1", 3), ("line-2", 3)]
    digests = sorted(call.args[0] for call in removed.remove.call_args_list)
    assert digests == ["line-1-1", "line-2-1"]  # line-1 has `shared` too
    ahead = hub.value("SELECT max(day) FROM partitions")
    assert (ahead - now.date()).days == 3
    counts = keep_in_order(hub.engine, retention, removed, now.timestamp() + 200 * day)  # a clock that is ahead
    assert counts == {"days": 0, "rows": 0, "pictures": 0}
    counts = keep_in_order(hub.engine, Retention(), removed, now.timestamp() + 200 * day)
    assert counts == {"days": 0, "rows": 0, "pictures": 0}


@pytest.mark.promise(
    "Versions of experts",
    "The hub deletes none of the newest releases that `retention.releases` keeps, and no file of one; a pull "
    "that reads meanwhile ends well, a push is refused at worst",
)
def test_a_release_that_is_pushed_while_old_ones_are_deleted_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)

    def push(number: int, name: str = "line") -> None:
        data = a_manifest(name=name, number=number, rules=None).encoded()
        store.add_manifest(name, number, SignedManifest(data, b"signature\n"))

    def prune(*asked: Any) -> int:
        push(4)
        push(1, "new")
        return whole(*asked)

    for number in (1, 2, 3):
        push(number)
    whole = store.prune
    monkeypatch.setattr(Store, "prune", lambda _, *asked: prune(*asked))
    settings = HubSettings(database="postgresql:///none", releases=tmp_path, retention=Retention(releases=1))
    prune_releases(settings, 0.0)
    assert {name: store.numbers(name) for name in store.names()} == {"line": [3, 4], "new": [1]}


def test_times_that_are_far_off_lie_apart(hub: HubDatabase) -> None:
    for day in ("2099-01-01", "1999-01-01"):
        hub.ask("SELECT ensure_day(%s::date)", day)
    assert hub.value("SELECT count(*) FROM partitions") == 0


def test_the_hub_waits_for_its_database_and_its_commands_say_what_is_wrong(postgresql: Server, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "plant.yaml"
    file.write_text(f"database: {postgresql.url('run')}\nhttp: http://127.0.0.1:{port}\n")
    postgresql.stop()
    checked = CliRunner().invoke(app, ["plant", "check", str(file)])
    assert checked.exit_code == 1
    assert "secret" not in checked.output
    command = [sys.executable, "-m", "tools", "plant", "run", str(file)]
    with subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            assert b"ready at" in process.stdout.readline()
            assert _health(port)[0] == 503
            postgresql.start()
            until(lambda: _health(port) == (200, "ok"))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    checked = CliRunner().invoke(app, ["plant", "check", str(file), "--json"])
    assert (checked.exit_code, '"schema": true' in checked.output) == (0, True)
    accepted = CliRunner().invoke(app, ["plant", "accept", str(file), "line-9"])
    assert accepted.exit_code == 1
    assert CliRunner().invoke(app, ["plant", "run", str(tmp_path / "absent.yaml")]).exit_code == 2


def _health(port: int) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
