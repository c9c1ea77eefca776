"""Roll-outs at a real hub with a real PostgreSQL: lines with real experts report, take releases and go back."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import create_engine, insert

from daemon.plant.settings import Retention, load_plant
from daemon.plant.upkeep import prune_releases
from daemon.registry.hub_store import HubStore
from daemon.registry.manifest import ReleaseError, decode
from daemon.registry.store import Store
from tests.contract.client import Line
from tests.contract.shadow_process import urged
from tests.daemon.storage.database.postgresql_server import WANTED, a_server, programs
from tests.lines import COSERVE_RUN
from tests.ports import free_port
from tests.tools.run_commands import coserve
from tests.waiting import until
from tools.experts.change import put, switch
from tools.experts.line import open_line
from tools.registry.follow import Follower

pytest.importorskip("psycopg", reason=WANTED)
pytestmark = pytest.mark.skipif(programs() is None, reason=WANTED)
RULES = """\
boards:
  pair: {components: {P: 2, Q: 1}}
classifiers:
  "*": {expert: "{component}", pass: [ok], review_below: 0.0}
"""
LINES = ("line-a", "line-b", "line-c")


class Plant:
    """A hub's process, three lines that follow it, and a line on which releases are made."""

    def __init__(self, folder: Path, experts: tuple[Path, Path], database: str) -> None:
        self.folder, self.url = folder, f"http://127.0.0.1:{free_port()}"
        self.engine = create_engine(database)
        coserve("keys", "new", "anna", "--sign", "--dir", folder / "keys")
        for name in ("hub", *LINES):
            self.key(name).write_text(f"{name}-" + "k" * 40)
            self.key(name).chmod(0o600)
        settings: dict[str, Any] = {"database": database, "http": self.url, "http_token": "keys/hub.token"}
        settings["lines"] = {name: {"key": f"keys/{name}.token"} for name in LINES}
        (folder / "plant.yaml").write_text(yaml.safe_dump(settings))
        plant = {"plant": {"signers": ["../keys/anna.sign"]}, "memory": "100MB"}
        self.lines = {name: Line(folder / name, experts[0], RULES, COSERVE_RUN, **plant) for name in ("master", *LINES)}
        self.configs = {name: line.config for name, line in self.lines.items()}
        self.said: list[str] = []
        self.followers = {
            name: Follower(self.configs[name], HubStore(self.url, self.key(name).read_text()), 1.0, self.said.append)
            for name in LINES
        }
        self.other = experts[1]

    def key(self, name: str) -> Path:
        return self.folder / "keys" / f"{name}.token"

    @contextmanager
    def hub(self) -> Iterator[None]:
        command = [sys.executable, "-m", "tools", "plant", "run", str(self.folder / "plant.yaml")]
        file = self.folder / "hub.log"
        with file.open("a+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                until(lambda: "ready at" in file.read_text(), file.read_text)
                yield
            finally:
                process.terminate()

    def push(self, *words: object, status: int = 0, who: str = "hub") -> Any:
        secret, key = self.folder / "keys" / "anna.sign_secret", self.key(who)
        return coserve(
            *("plant", "push", self.configs["master"], "--to", self.url, "--key", secret, "--token", key, *words),
            status=status,
        )

    def rollout(self, *words: object, status: int = 0) -> Any:
        return coserve("plant", "rollout", *words, "--hub", self.url, "--token", self.key("hub"), status=status)

    def newest(self) -> dict[str, Any]:
        row = json.loads(self.rollout("status", "--json").stdout)["rollouts"][0]
        assert isinstance(row, dict)
        return row

    def numbers(self) -> dict[str, int]:
        """What each line has in force, as its own files say."""
        from tools.registry.line_releases import LineReleases

        return {name: LineReleases(open_line(self.configs[name])).in_force()["line"].number for name in LINES}

    def judged(self, line: str, count: int, latency_ms: float, ago: timedelta = timedelta()) -> None:
        """Rows as the line's consumer would have sent them."""
        from daemon.consumers.plant.tables import inspections

        at = datetime.now(UTC) - ago
        row = {"line": line, "epoch": "e", "image_id": "i", "source": "s", "board_type": "pair", "board_serial": "S"}
        row |= {"attempt": 1, "component": "P", "verdict": "pass", "late": False, "stages": [], "rules_version": "r"}
        first = int(at.timestamp() * 1e6)
        rows = [
            row | {"seq": first + n, "at": at, "inspection_id": first + n, "latency_ms": latency_ms}
            for n in range(count)
        ]
        with self.engine.begin() as connection:
            connection.execute(insert(inspections), rows)

    def cannot_go_back(self, line: str, number: int) -> None:
        """Let the line fail to go back, while the hub lacks a file; it says so once, and tries again."""
        manifest = self.folder / "releases" / "manifests" / "line" / f"{number}.json"
        manifest.rename(manifest.with_suffix(".away"))
        before = len(self.said)
        self.followers[line].turn()
        self.followers[line].turn()
        assert [text.split(":")[0] for text in self.said[before:]] == [f"line/{number} waits"]
        manifest.with_suffix(".away").rename(manifest)

    def turns(self, *names: str, while_step: int) -> dict[str, Any]:
        """Let these lines follow until the roll-out leaves the step, or goes back, or ends."""

        def has_left() -> dict[str, Any] | None:
            for name in names:
                self.followers[name].turn()
            row = self.newest()
            return row if (row["step"], row["direction"], row["state"]) != (while_step, "forward", "running") else None

        row = until(has_left)
        assert row is not None
        return row


@pytest.fixture
def plant(tmp_path: Path, version_folders: tuple[Path, Path]) -> Iterator[Plant]:
    with a_server() as server:
        made = Plant(tmp_path, version_folders, server.url("hub", "127.0.0.1"))
        with made.hub():
            yield made
        made.engine.dispose()


def test_a_roll_out_goes_step_by_step_and_back_by_itself(plant: Plant):
    refused = plant.push(status=1, who="line-a").output
    assert "releases are changed with the hub's http_token" in " ".join(refused.split())
    hub = HubStore(plant.url, plant.key("line-a").read_text())
    for damaged in ({"since": "9999-99-99T00:00:00Z"}, {"since": "0001-01-01T00:00:00Z"}, {"problem": "a\x00b"}):
        state = {"number": 1, "since": "2026-11-26T10:00:00Z"} | damaged
        with pytest.raises(ReleaseError, match="HTTP 422"):
            hub.ask_json("POST", "/line-releases", {"in_force": {"line": state}})
    plant.push()
    for name in LINES:
        words = ("--from", plant.url, "--token", plant.key(name))
        coserve("plant", "pull", plant.configs[name], *words)
        plant.followers[name].turn()
        plant.judged(name, 60, 40.0, timedelta(hours=1))
    master = open_line(plant.configs["master"])
    switch(master, "P", put(master, "P", plant.other)[0])
    plant.push()
    words = ("start", "line/2", "--canary", "line-a", "--images", 50, "--p95-ratio", 1.5)
    said = plant.rollout(*words).output
    assert "line/2 is rolled out to line-a, then line-b and line-c" in said
    assert "is running already" in plant.rollout(*words, status=1).output
    for follower in plant.followers.values():
        follower.turn()
    assert plant.numbers() == {"line-a": 2, "line-b": 1, "line-c": 1}
    assert plant.newest()["step"] == 0  # the canary has judged too little
    plant.judged("line-a", 60, 45.0)
    assert plant.turns("line-a", while_step=0)["step"] == 1
    plant.followers["line-b"].turn()  # line-c is cut off
    assert plant.numbers() == {"line-a": 2, "line-b": 2, "line-c": 1}
    plant.judged("line-b", 60, 400.0)
    row = plant.turns("line-b", while_step=1)
    assert (row["direction"], row["state"]) == ("back", "running")
    assert "line-b: 95 % of its images take up to 400 ms, before 40 ms" in row["reason"]
    until(lambda: [follower.turn() for follower in plant.followers.values()] and plant.newest()["state"] == "all_old")
    assert plant.numbers() == dict.fromkeys(LINES, 1)
    versions = {name: open_line(config).experts()["P"].version for name, config in plant.configs.items()}
    assert versions["line-a"] == versions["line-b"] == versions["line-c"] != versions["master"]


def test_answers_that_differ_from_those_of_the_versions_before_roll_it_back(plant: Plant):
    plant.push()
    for name in LINES:
        coserve("plant", "pull", plant.configs[name], "--from", plant.url, "--token", plant.key(name))
        plant.followers[name].turn()
    master, canary = open_line(plant.configs["master"]), open_line(plant.configs["line-a"])
    old = canary.experts()["P"].version
    switch(master, "P", put(master, "P", plant.other)[0])
    plant.push()
    plant.rollout("start", "line/2", "--canary", "line-a", "--images", 5, "--agreement", 0.9)
    line = plant.lines["line-a"]
    with line.service():
        plant.followers["line-a"].turn()
        assert plant.numbers() == {"line-a": 2, "line-b": 1, "line-c": 1}
        plant.followers["line-a"].turn()
        shadow = canary.experts()["P"].shadow
        assert shadow is not None
        assert shadow.version == old
        urged(line)
        for number in range(8):
            for designator in ("P1", "P2", "Q1"):
                board = {"type": "pair", "serial": f"S{number}"}
                line.send(board=board, designator=designator, component=designator[0])
        line.wait(lambda: line.rows("SELECT count(*) FROM shadow_answers") == [(16,)])
        row = plant.turns("line-a", while_step=0)
        assert row["reason"] == "line-a: 0 of 16 answers are as before, less than 0.9"
        until(lambda: [plant.followers["line-a"].turn()] and plant.newest()["state"] == "all_old")
        assert plant.numbers() == dict.fromkeys(LINES, 1)
        assert canary.experts()["P"].shadow is None


def test_a_damaged_file_at_the_hub_is_refused_and_the_roll_out_ends_with_all_lines_as_they_were(plant: Plant):
    plant.push()
    for name in LINES:
        coserve("plant", "pull", plant.configs[name], "--from", plant.url, "--token", plant.key(name))
        plant.followers[name].turn()
    master = open_line(plant.configs["master"])
    old = {file for file in (plant.folder / "releases" / "objects").rglob("*") if file.is_file()}
    switch(master, "P", put(master, "P", plant.other)[0])
    plant.push()
    (new,) = {file for file in (plant.folder / "releases" / "objects").rglob("*") if file.is_file()} - old
    content = new.read_bytes()
    new.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    plant.rollout("start", "line/2", "--canary", "line-b", "--images", 1)
    row = plant.turns("line-b", while_step=0)
    assert "line-b refused it: the file" in row["reason"]
    assert "is damaged" in row["reason"]
    until(lambda: [follower.turn() for follower in plant.followers.values()] and plant.newest()["state"] == "all_old")
    assert plant.numbers() == dict.fromkeys(LINES, 1)
    new.write_bytes(content)
    plant.rollout("start", "line/2", "--canary", "line-b", "--images", 5)
    plant.followers["line-b"].turn()
    plant.judged("line-b", 5, 40.0)
    plant.turns("line-b", while_step=0)
    for name in ("line-a", "line-c"):
        plant.followers[name].turn()
        plant.judged(name, 5, 40.0)
    assert plant.turns(*LINES, while_step=1)["state"] == "all_new"
    assert plant.numbers() == dict.fromkeys(LINES, 2)
    plant.push()
    plant.rollout("start", "line/3", "--canary", "line-a", "--images", 5)
    plant.followers["line-a"].turn()
    assert plant.numbers()["line-a"] == 3
    plant.rollout("stop", "line")
    plant.cannot_go_back("line-a", 2)
    until(lambda: [follower.turn() for follower in plant.followers.values()] and plant.newest()["state"] == "all_old")
    assert plant.numbers() == dict.fromkeys(LINES, 2)
    settings = load_plant(plant.folder / "plant.yaml").model_copy(update={"retention": Retention(releases=1)})
    prune_releases(plant.engine, settings, time.time() + 2 * 86400)
    store = Store(settings.releases)
    assert store.numbers("line") == [2, 3]  # the newest, and the one that lines have
    for sha256, size in decode(store.manifest("line", 2).data, "line/2").files.items():
        store.checked(sha256, size)
    (settings.releases / "revoked").mkdir()
    shutil.copy(plant.folder / "keys" / "anna.sign", settings.releases / "revoked")
    for follower in plant.followers.values():
        follower.turn()
        follower.turn()
    assert plant.said[-1] == "REVOKED: anna.sign: this line takes no release that it signed; in force: line/2"
    rows = json.loads(plant.rollout("status", "--json").stdout)["lines"]
    assert {row["problem"] for row in rows} == {"its signer anna.sign is revoked"}
    plant.rollout("start", "line/3", "--canary", "line-c", "--images", 5)
    assert (
        "line-c refused it: line/3 is signed by anna.sign, which is revoked"
        in plant.turns(*LINES, while_step=0)["reason"]
    )
    assert plant.numbers() == dict.fromkeys(LINES, 2)
