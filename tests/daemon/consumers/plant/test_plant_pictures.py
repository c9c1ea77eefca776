"""Pictures on their way to the hub: by digest, behind the rows, no faster than allowed, and never blocking them."""

import asyncio
import hashlib
import http.client
import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import uvicorn

from daemon.plant.hub import Hub, make_app
from daemon.plant.picture_store import PictureStore, S3Pictures, open_pictures
from daemon.plant.settings import HubSettings, Pictures, Retention
from daemon.plant.upkeep import keep_in_order
from tests.daemon.consumers.plant.hub_database import HubDatabase, LineSide, hub, sending
from tests.daemon.consumers.plant.test_plant_consumer import database, fail, hasty, materialised
from tests.daemon.delivery.results_database import ResultsDatabase
from tests.daemon.storage.database.postgresql_server import WANTED, programs
from tests.waiting import PATIENCE_S, in_a_loop, soon

pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)
__all__ = ["database", "hasty", "hub"]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "line-1.key"
    file.write_text("k" * 40)
    file.chmod(0o600)
    return file


@contextmanager
def serving(hub: HubDatabase, key: Path, store: PictureStore) -> Iterator[str]:
    """The hub's HTTP on a free port of loopback."""
    pictures = Pictures(folder=key.parent, max_picture=1_000_000)
    served = Hub(HubSettings(database=hub.url, pictures=pictures, lines={"line-1": {"key": key}}))
    served.pictures = store
    app = make_app(served)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)


def put(url: str, path: str, body: bytes, token: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(url.removeprefix("http://"))) as connection:
        connection.request("PUT", path, body, {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def stored(hub: HubDatabase) -> list[tuple[Any, ...]]:
    rows = hub.ask("SELECT inspection_id, sha256, state FROM pictures ORDER BY seq")
    return [tuple(row.values()) for row in rows]


@in_a_loop
async def test_pictures_of_failed_images_arrive_by_digest_and_a_missing_one_is_noted(
    hub: HubDatabase, database: ResultsDatabase, key: Path, tmp_path: Path
) -> None:
    last = database.grow(4)
    content = b"\xff\xd8" + bytes(100_000)
    digest = hashlib.sha256(content).hexdigest()
    for image in (1, 2, 4, 6):
        fail(database, image)
    large = b"\xff\xd8" + bytes(1_000_000)
    side = LineSide(database, {1: content, 2: large, 6: content}, not_copied={1})
    store = open_pictures(Pictures(folder=tmp_path / "pictures"))
    with serving(hub, key, store) as url:
        async with sending(hub, database, side=side, pictures="failed", hub=url, key=key) as runner:
            await soon(lambda: runner.position == last and len(stored(hub)) == 4)
            await soon(lambda: hub.value("SELECT pictures_seq FROM lines") == last)
    too_large = (2, hashlib.sha256(large).hexdigest(), "too_large")
    assert stored(hub) == [(1, digest, "stored"), too_large, (4, None, "gone"), (6, digest, "stored")]
    assert store.get(digest) == content
    assert [file.name for file in (tmp_path / "pictures").rglob("*") if file.is_file()] == [digest]


@in_a_loop
async def test_pictures_go_on_after_any_failure_of_the_line(
    hub: HubDatabase, database: ResultsDatabase, key: Path, tmp_path: Path
) -> None:
    database.grow(2)
    fail(database, 1)
    with serving(hub, key, open_pictures(Pictures(folder=tmp_path / "pictures"))) as url:
        side = LineSide(database)
        side.picture = MagicMock(side_effect=[RuntimeError("disk I/O error"), b"\xff\xd8" + bytes(100)])
        async with sending(hub, database, side=side, pictures="failed", hub=url, key=key):
            await soon(lambda: [row[::2] for row in stored(hub)] == [(1, "stored")])


@pytest.mark.promise(
    "Delivery to the plant",
    "Pictures never hold back rows, however slow the link; a missing picture is noted",
)
@in_a_loop
async def test_many_pictures_behind_a_slow_link_or_a_hub_that_is_away_hold_no_row_back(
    hub: HubDatabase, database: ResultsDatabase, key: Path, tmp_path: Path
) -> None:
    last = database.grow(300)
    for image in range(1, 301):
        fail(database, image)
    side = LineSide(database, dict.fromkeys(range(1, 301), bytes(200_000)))
    store = open_pictures(Pictures(folder=tmp_path / "pictures"))
    sent: dict[str, Any] = {"side": side, "pictures": "failed", "key": key}
    async with sending(hub, database, **sent, hub="http://127.0.0.1:1") as runner:
        await soon(lambda: runner.position == last)
        await soon(lambda: hub.value("SELECT count(*) FROM events WHERE kind = 'pictures_wait'") == 1)
    assert materialised(hub)[0] == 600
    assert stored(hub) == []
    with serving(hub, key, store) as url:
        async with sending(hub, database, **sent, hub=url, bandwidth="1KB/s") as runner:
            last = database.grow(100)
            await soon(lambda: runner.position == last)
        assert stored(hub) == []  # the first picture alone takes minutes
        async with sending(hub, database, **sent, hub=url, bandwidth="1GB/s"):
            await soon(lambda: len(stored(hub)) > 60)
        before = len(stored(hub))
        async with sending(hub, database, **sent, hub=url, bandwidth="1GB/s"):  # goes on behind the last one
            await soon(lambda: len(stored(hub)) > before)


@in_a_loop
async def test_the_hub_takes_pictures_of_lines_with_a_key_only_and_whole_ones_only(
    hub: HubDatabase, key: Path, tmp_path: Path
) -> None:
    def attempts(url: str) -> None:
        digest = hashlib.sha256(b"picture").hexdigest()
        assert put(url, f"/pictures/{digest}", b"picture", "w" * 40)[0] == 401
        status, text = put(url, f"/pictures/{digest}", b"pictur", "k" * 40)
        assert (status, "damaged on the way" in text) == (422, True)
        assert put(url, "/pictures/..%2f..%2fetc", b"x", "k" * 40)[0] == 404
        assert put(url, f"/pictures/{digest}", b"picture", "k" * 40)[0] == 201
        assert put(url, f"/pictures/{digest}", b"picture", "k" * 40)[0] == 201

    with serving(hub, key, open_pictures(Pictures(folder=tmp_path / "pictures"))) as url:
        await asyncio.to_thread(attempts, url)


@pytest.mark.promise("Delivery to the plant", "Pictures that no row names are limited, and swept after a day")
def test_pictures_that_no_row_names_are_limited_for_each_line_and_swept_after_a_day(
    hub: HubDatabase, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.plant.hub._MAX_UNNAMED", 4)
    store = open_pictures(Pictures(folder=tmp_path / "pictures"))
    digests = {bytes([number]): hashlib.sha256(bytes([number])).hexdigest() for number in range(8)}
    hub.add_line()
    with serving(hub, key, store) as url:

        def add(content: bytes) -> tuple[int, str]:
            return put(url, f"/pictures/{digests[content]}", content, "k" * 40)

        assert [add(bytes([number]))[0] for number in range(4)] == [201] * 4
    with serving(hub, key, store) as url:  # a restart gives no line more
        status, text = add(b"\4")
        assert (status, "4 pictures of line-1 have no row" in text) == (507, True)
        for number in range(3):
            hub.add_picture(number, digests[bytes([number])], datetime.now(UTC))
        assert add(b"\4")[0] == 201
    hub.ask("UPDATE lines SET last_at = now() - interval '9 days'")  # also of lines that stand still
    two_days_ago = time.time() - 2 * 86400
    for digest in (digests[b"\0"], digests[b"\3"]):
        os.utime(tmp_path / "pictures" / digest[:2] / digest, (two_days_ago, two_days_ago))
    assert keep_in_order(hub.engine, Retention(), store, time.time())["pictures"] == 1
    left = {content for content, digest in digests.items() if store.get(digest) is not None}
    assert left == {b"\0", b"\1", b"\2", b"\4"}, "an old one with a row stays, and a new one that waits for its row"


def test_a_bucket_keeps_pictures_by_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    boto3 = pytest.importorskip("boto3")
    from daemon.plant.picture_store import PictureStoreError

    moto_server = pytest.importorskip("moto.server")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    server = moto_server.ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="plant")
        store = S3Pictures("s3://plant/pictures", endpoint)
        name = "ab" * 32
        assert store.get(name) is None
        store.put(name, io.BytesIO(b"picture"))
        store.put(name, io.BytesIO(b"picture"))
        assert store.get(name) == b"picture"
        assert [*store.stored_before(time.time() + 60)] == [name]
        assert [*store.stored_before(time.time() - 60)] == []
        store.remove(name)
        assert store.get(name) is None
        with pytest.raises(PictureStoreError, match="s3://absent"):
            S3Pictures("s3://absent", endpoint).put(name, io.BytesIO(b"picture"))
    finally:
        server.stop()
