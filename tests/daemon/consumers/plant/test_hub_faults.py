"""The hub's PostgreSQL and the hub's own process, killed in each phase of their work: nothing lost, nothing twice.

A trigger holds the server up in one phase, in the middle of a load; then every process of the server gets SIGKILL.
"""

import asyncio
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from daemon.plant.picture_store import open_pictures
from daemon.plant.settings import HubSettings, Pictures, Retention
from daemon.plant.upkeep import Upkeep
from daemon.storage.database.store import Store
from daemon.storage.decisions import Decision
from tests.daemon.consumers.plant.hub_database import HubDatabase, LineSide, hub, sending
from tests.daemon.consumers.plant.test_plant_consumer import counts, fail, hasty, materialised
from tests.daemon.consumers.plant.test_plant_pictures import key, serving, stored
from tests.daemon.delivery.results_database import BEGIN, ResultsDatabase
from tests.daemon.storage.database.postgresql_server import WANTED, Server, programs
from tests.ports import free_port
from tests.waiting import soon

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = [pytest.mark.skipif(programs() is None, reason=WANTED), pytest.mark.test_all]
__all__ = ["hasty", "hub", "key"]

_LOCK = 4711
#: Of the load: two batches, the second of them on another day too.
BOARDS = 400
_MOVES = "FOR EACH ROW WHEN (NEW.last_seq > OLD.last_seq)"

PHASES: Mapping[str, str] = {
    "while a day's partition is made": "TRIGGER held BEFORE INSERT ON partitions FOR EACH STATEMENT",
    "when the position has moved": f"TRIGGER held AFTER UPDATE ON lines {_MOVES}",
    "within the images": "TRIGGER held BEFORE INSERT ON inspections FOR EACH ROW",
    "after the images": "TRIGGER held AFTER INSERT ON inspections FOR EACH STATEMENT",
    "while images are counted": "TRIGGER held AFTER INSERT OR UPDATE ON yields_by_hour FOR EACH ROW",
    "within the boards": "TRIGGER held AFTER INSERT ON boards FOR EACH STATEMENT",
    "within the reviews": "TRIGGER held AFTER INSERT ON reviews FOR EACH STATEMENT",
    "in the commit": f"CONSTRAINT TRIGGER held AFTER UPDATE ON lines DEFERRABLE INITIALLY DEFERRED {_MOVES}",
}


@pytest.fixture
def database(tmp_path: Path) -> ResultsDatabase:
    database = ResultsDatabase(tmp_path / "inspection.db", BEGIN.replace(hour=23, minute=54, second=20))
    database.begin_epoch()
    return database


@contextmanager
def holding(hub: HubDatabase, trigger: str, condition: str = "true") -> Iterator[Callable[[], bool]]:
    """Hold the server up where `trigger` fires, if `condition`; yields a question: does it wait there?"""
    hub.ask(
        "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF {condition} THEN PERFORM pg_advisory_xact_lock_shared({_LOCK}); END IF;"
        " RETURN coalesce(NEW, OLD); END $$"
    )
    hub.ask(f"CREATE {trigger} EXECUTE FUNCTION hold()")
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s AND NOT granted"
    with closing(psycopg.connect(hub.conninfo, autocommit=True)) as holder:
        holder.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
        yield lambda: hub.value(waiting, _LOCK) > 0


async def kill(server: Server) -> None:
    """Kill the server and start it again."""
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)


@pytest.mark.promise(
    "The hub killed in each phase",
    "when the position has moved; within or after the images; while they are counted; within the boards or the "
    "reviews; in the commit | rows, counts and position are one transaction: all of it is undone, and sent "
    "again",
)
@pytest.mark.promise(
    "The hub killed in each phase",
    "before the transaction, while a day's partition is made | the partition is made again, then its rows come",
)
@pytest.mark.parametrize("phase", PHASES)
def test_postgresql_killed_in_each_phase_of_a_batch_loses_nothing_and_counts_nothing_twice(
    postgresql: Server, hub: HubDatabase, database: ResultsDatabase, phase: str
) -> None:
    async def run() -> None:
        last, rows = _load(database)
        second_batch = f"(SELECT max(last_seq) FROM lines) {'>=' if 'partition' in phase else '>'} 1000"  # noqa: S608
        with holding(hub, PHASES[phase], second_batch) as is_held:
            async with sending(hub, database) as runner:
                await soon(is_held)
                await kill(postgresql)
                await soon(lambda: runner.position == last)
        _must_be_whole(hub, last, rows)

    asyncio.run(run())


@pytest.mark.promise(
    "The hub killed in each phase",
    "after the commit, before the line has stored its position | the hub's own position counts: what it has is "
    "not stored again",
)
def test_postgresql_killed_after_a_commit_whose_position_the_line_did_not_store(
    postgresql: Server, hub: HubDatabase, database: ResultsDatabase
) -> None:
    async def run() -> None:
        last, rows = _load(database)
        async with sending(hub, database):
            await soon(lambda: hub.ask("SELECT line FROM lines WHERE last_seq >= 1000"))
            await kill(postgresql)
        shutil.rmtree(database.file.parent / "consumers-pc-1")
        async with sending(hub, database) as runner:
            await soon(lambda: runner.position == last)
        _must_be_whole(hub, last, rows)

    asyncio.run(run())


def _load(database: ResultsDatabase) -> tuple[int, tuple[int, int, int]]:
    """Add boards of two days, with a review at the end; return the last `seq`, and the rows that the hub must get."""
    last = database.grow(BOARDS)
    with closing(Store(database.url)) as store:
        store.review(Decision(2 * BOARDS, "Eva", None, "fail", "D1"))
    return last + 1, (2 * BOARDS, BOARDS, 1)


def _must_be_whole(hub: HubDatabase, last: int, rows: tuple[int, int, int]) -> None:
    assert counts(hub) == rows
    assert materialised(hub) == (rows[0], rows[0], rows[1])
    assert hub.value("SELECT sum(first_passed - first_final_passed) FROM yields_by_hour") == 1
    assert hub.value("SELECT last_seq FROM lines") == last
    assert hub.value("SELECT count(DISTINCT at::date) FROM inspections") == 2
    assert hub.value("SELECT count(*) FROM inspections_other") == 0


@pytest.mark.promise(
    "The hub killed in each phase",
    "between a decision at the hub and the line's answer | the decision is handed over again; the line knows "
    "it and answers as before",
)
def test_postgresql_killed_between_a_decision_of_the_hub_and_its_answer_decides_once(
    postgresql: Server, hub: HubDatabase, database: ResultsDatabase
) -> None:
    class Deciding(LineSide):
        def review(self, fields: Any) -> None:
            super().review(fields)
            with closing(Store(database.url)) as store:
                store.review(Decision(fields["inspection_id"], "Eva", fields.get("newest"), "fail", "D9"))

    async def run() -> None:
        database.grow(1)
        side = Deciding(database)
        with holding(hub, "TRIGGER held BEFORE UPDATE ON review_requests FOR EACH ROW") as is_held:
            async with sending(hub, database, side=side):
                await soon(lambda: counts(hub)[1] == 1)
                hub.ask(
                    "INSERT INTO review_requests (line, epoch, inspection_id, verdict, defect, reviewer)"
                    " SELECT 'line-1', epoch, 1, 'fail', 'D9', 'Eva' FROM lines"
                )
                await soon(is_held)
                await kill(postgresql)
                await soon(lambda: hub.value("SELECT state FROM review_requests") == "accepted")
                await soon(lambda: counts(hub) == (2, 1, 1))
        assert len(side.decisions) == 2  # asked again, for its answer was lost
        assert hub.value("SELECT sum(first_passed - first_final_passed) FROM yields_by_hour") == 1

    asyncio.run(run())


@pytest.mark.promise(
    "The hub killed in each phase",
    "while a picture that has arrived is noted | it is sent again under the same sha256",
)
def test_postgresql_killed_while_it_notes_a_picture_has_each_picture_once(
    postgresql: Server, hub: HubDatabase, database: ResultsDatabase, key: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        database.grow(4)
        pictures = {image: bytes([image]) * 50_000 for image in (1, 4, 6)}
        for image in pictures:
            fail(database, image)
        side = LineSide(database, pictures)
        store = open_pictures(Pictures(folder=tmp_path / "pictures"))
        trigger = "TRIGGER held BEFORE INSERT ON pictures FOR EACH ROW"
        with serving(hub, key, store) as url, holding(hub, trigger, "NEW.seq > 1") as is_held:
            async with sending(hub, database, side=side, pictures="failed", hub=url, key=key):
                await soon(is_held)
                await kill(postgresql)
                await soon(lambda: len(stored(hub)) == 3)
        digests = {image: hashlib.sha256(content).hexdigest() for image, content in pictures.items()}
        assert stored(hub) == [(image, digest, "stored") for image, digest in digests.items()]
        assert [store.get(digest) for digest in digests.values()] == list(pictures.values())

    asyncio.run(run())


@pytest.mark.promise(
    "The hub killed in each phase",
    "during upkeep: days ahead, rows or pictures that are too old | upkeep begins again by itself; nothing "
    "younger is deleted",
)
@pytest.mark.parametrize(
    "trigger",
    ["BEFORE INSERT ON partitions FOR EACH ROW", "AFTER DELETE ON inspections FOR EACH STATEMENT",
     "AFTER UPDATE ON pictures FOR EACH STATEMENT"],
)  # fmt: skip
def test_postgresql_killed_during_upkeep_deletes_what_is_old_and_no_more(
    postgresql: Server, hub: HubDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trigger: str
) -> None:
    monkeypatch.setattr("daemon.plant.upkeep._RETRY_S", 0.1)
    store = open_pictures(Pictures(folder=tmp_path / "pictures"))
    digests = _old_and_new(hub)
    for digest, content in digests.items():
        store.put(digest, io.BytesIO(content))
    retention = Retention(results="60d")  # type: ignore[arg-type]
    upkeep = Upkeep(hub.engine, HubSettings(database=hub.url, retention=retention), store)
    with holding(hub, f"TRIGGER held {trigger}") as is_held:
        upkeep.start()
        asyncio.run(soon(is_held))
        asyncio.run(kill(postgresql))
        asyncio.run(soon(lambda: upkeep.problem is None))
    upkeep.stop()
    assert [row["seq"] for row in hub.ask("SELECT seq FROM inspections ORDER BY seq")] == [2]
    assert [row["state"] for row in hub.ask("SELECT state FROM pictures ORDER BY seq")] == ["pruned", "stored"]
    assert [store.get(digest) is not None for digest in digests] == [False, True]
    ahead = hub.value("SELECT max(day) FROM partitions")
    assert (ahead - datetime.now(UTC).date()).days == 3


def _old_and_new(hub: HubDatabase) -> dict[str, bytes]:
    """Add an image of 100 days ago, and one of now, each with a picture; return the pictures by their sha256."""
    contents = [b"old", b"new"]
    hub.add_line()
    for seq, days in ((1, 100), (2, 0)):
        at = datetime.now(UTC) - timedelta(days=days)
        hub.add_image(seq, at)  # in `inspections_other` as yet: no day is made
        hub.add_picture(seq, hashlib.sha256(contents[seq - 1]).hexdigest(), at)
    return {hashlib.sha256(content).hexdigest(): content for content in contents}


@pytest.mark.promise(
    "The hub killed in each phase",
    "`coserve plant run`, in the middle of a picture | no part of it is kept; rows go on; after the start the "
    "whole picture is sent again",
)
def test_the_hubs_process_killed_while_it_takes_a_picture_gets_it_whole_after_its_start(
    hub: HubDatabase, database: ResultsDatabase, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.consumers.plant.pictures._LONGEST_WAIT_S", 1.0)
    port = free_port()
    file = tmp_path / "plant.yaml"
    file.write_text(f"database: {hub.url}\nhttp: http://127.0.0.1:{port}\nlines: {{line-1: {{key: {key}}}}}\n")
    command = [sys.executable, "-m", "tools", "plant", "run", str(file)]

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        with process.stdout as out:
            assert b"ready at" in out.readline()
        return process

    async def run() -> None:
        last = database.grow(200)
        content = os.urandom(400_000)
        fail(database, 1)
        side = LineSide(database, {1: content})
        sent: dict[str, Any] = {"side": side, "pictures": "failed", "hub": f"http://127.0.0.1:{port}", "key": key}
        process = await asyncio.to_thread(start)
        async with sending(hub, database, **sent, bandwidth="200KB/s") as runner:
            await soon(lambda: runner.position == last)
            await asyncio.sleep(0.7)  # within the two seconds of the picture
            process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait)
            assert not list((tmp_path / "pictures").rglob("*"))
            process = await asyncio.to_thread(start)
            await soon(lambda: len(stored(hub)) == 1)
        digest = hashlib.sha256(content).hexdigest()
        assert stored(hub) == [(1, digest, "stored")]
        assert (tmp_path / "pictures" / digest[:2] / digest).read_bytes() == content
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert counts(hub) == (400, 200, 0)

    asyncio.run(run())
