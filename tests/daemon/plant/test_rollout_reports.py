"""Reports of lines at a hub with a real PostgreSQL: what they change, and which are refused."""

import asyncio
import json
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.plant.hub import make_app
from daemon.plant.rollouts import rollout_router
from daemon.plant.settings import HubSettings
from daemon.registry.manifest import SignedManifest
from daemon.registry.store import Store
from daemon.wire.keys import Token
from tests.daemon.consumers.plant.hub_database import HubDatabase
from tests.daemon.registry.test_manifest import a_manifest
from tests.daemon.storage.database.postgresql_server import WANTED, Server, a_server, programs

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)

LINES = ("line-a", "line-b", "line-c")
SINCE = "2026-11-26T10:00:00Z"


class Reports:
    """A hub with three lines that have line/6, and line/7 to roll out; requests go to its routes directly."""

    def __init__(self, database: HubDatabase, folder: Path) -> None:
        settings = HubSettings(database=database.url, releases=folder / "releases")
        signed = SignedManifest(a_manifest(number=7, back_to=6, rules=None).encoded(), b"signature\n")
        Store(settings.releases).add_manifest("line", 7, signed)
        self.database, keys = database, {name: Token(name.encode()) for name in LINES}
        self.hub: Any = SimpleNamespace(
            settings=settings, engine=database.engine, keys=keys, token=Token(b"hub"), problem=lambda: None
        )
        self._app = make_app(self.hub, rollout_router(self.hub))
        for line in LINES:
            self.report(line, 6)

    def post(self, who: str, path: str, **fields: Any) -> tuple[int, Any]:
        """Return the status and the JSON of the answer."""
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "query_string": b"by=anna"}
        scope["headers"] = [(b"authorization", f"Bearer {who}".encode())]
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        asyncio.run(self._app(scope, receive, send))
        return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent))

    def report(self, line: str, number: int, **more: Any) -> Any:
        """Return the number that the line should have."""
        state = {"number": number, "since": SINCE} | more
        status, answer = self.post(line, "/line-releases", in_force={"line": state})
        assert status == 200, answer
        return answer["wanted"].get("line")

    def start(self) -> None:
        asked = {"name": "line", "number": 7, "canary": "line-a", "by": "anna", "images": 5}
        assert self.post("hub", "/rollouts", **asked)[0] == 201

    def state(self) -> str:
        return str(self.database.value("SELECT state FROM rollouts ORDER BY rollout_id DESC LIMIT 1"))

    def decide_again(self) -> None:
        """Let the next report decide, though the last one did so a moment ago."""
        self.database.ask("UPDATE rollouts SET looked_at = NULL")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with a_server() as server:
        yield server


@pytest.fixture
def reports(server: Server, tmp_path: Path) -> Iterator[Reports]:
    database = HubDatabase(server, f"reports_{time.monotonic_ns()}")
    yield Reports(database, tmp_path)
    database.engine.dispose()


def test_a_line_that_is_still_pulling_a_release_that_was_stopped_goes_back_too(reports: Reports) -> None:
    reports.start()
    assert reports.report("line-a", 6) == 7  # it begins to pull, which may take ten minutes
    assert reports.post("hub", "/rollouts/line/stop")[0] == 200
    for line in ("line-b", "line-c"):
        reports.decide_again()
        assert reports.report(line, 6) == 6
    assert reports.state() == "running"
    assert reports.report("line-a", 7) == 6  # its pull is over
    reports.decide_again()
    reports.report("line-a", 6)
    assert reports.state() == "all_old"


@pytest.mark.parametrize(
    "damaged",
    [
        {"since": "9999-12-31T23:59:59-14:00"},
        {"compared": 1, "agreed": 9},
        {"compared": 9},
        {"compared": 1 << 40, "agreed": 0},
    ],
)
def test_a_report_that_cannot_be_true_is_refused_and_stops_no_other_line(
    reports: Reports, damaged: dict[str, Any]
) -> None:
    reports.start()
    reports.report("line-a", 6)
    reports.decide_again()
    state = {"number": 7, "since": SINCE} | damaged
    assert reports.post("line-a", "/line-releases", in_force={"line": state})[0] == 422
    reports.decide_again()
    assert reports.report("line-b", 6) == 6


def test_a_database_that_does_not_answer_is_named(reports: Reports) -> None:
    reports.hub.engine.dispose()
    reports.database.ask("DROP TABLE line_releases CASCADE")
    status, answer = reports.post("line-a", "/line-releases", in_force={"line": {"number": 6, "since": SINCE}})
    assert status == 503
    assert 'relation "line_releases" does not exist' in answer["detail"]


def test_a_roll_out_that_is_stopped_does_not_wait_for_lines_that_never_heard_of_it(reports: Reports) -> None:
    reports.start()
    assert reports.post("hub", "/rollouts/line/stop")[0] == 200
    reports.decide_again()
    reports.report("line-b", 6)
    assert reports.state() == "all_old"
