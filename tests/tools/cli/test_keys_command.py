"""`coserve keys` as a person types it, without a daemon; with one it is in tests/contract/test_access.py."""

import json
import shutil
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tools.run_commands import coserve
from tools.cli.main import app

CONFIG = """\
rules: rules.yaml
catalog: experts/catalog.yaml
devices: {cpu: {expert_memory: 250MB}}
security: {server_key: server.key_secret, allowed_clients: allowed}
"""


@pytest.fixture
def line(tmp_path: Path) -> Path:
    (tmp_path / "coserve.yaml").write_text(CONFIG)
    return tmp_path


def keys(line: Path, *words: str, status: int = 0) -> str:
    config = [] if words[0] == "new" else ["--config", str(line / "coserve.yaml")]
    return coserve("keys", words[0], *config, *words[1:], status=status).output


def test_new_says_what_to_do_next_and_never_the_secret(line: Path) -> None:
    output = keys(line, "new", "server", "--server", "--dir", str(line))
    assert "security.server_key" in output
    client = keys(line, "new", "camera-1", "--dir", str(line))
    assert "coserve keys allow" in client
    secret = (line / "camera-1.key_secret").read_text().split('secret-key = "')[1].split('"')[0]
    assert secret not in client
    assert stat.S_IMODE((line / "camera-1.key_secret").stat().st_mode) == 0o600
    assert "exists already" in keys(line, "new", "camera-1", "--dir", str(line), status=1)


def test_allow_takes_a_file_or_a_key_and_list_shows_who_may_come_in(line: Path) -> None:
    keys(line, "new", "server", "--server", "--dir", str(line))
    pairs = [json.loads(keys(line, "new", name, "--dir", str(line), "--json")) for name in ("one", "two")]
    keys(line, "allow", pairs[0]["public"], "camera-1")
    text = Path(pairs[1]["public"]).read_text().split('public-key = "')[1].split('"')[0]
    keys(line, "allow", "--", text, "camera-2")
    listed = json.loads(keys(line, "list", "--json"))
    assert [(client["name"], client["fingerprint"]) for client in listed["clients"]] == [
        ("camera-1", pairs[0]["fingerprint"]),
        ("camera-2", pairs[1]["fingerprint"]),
    ]
    table = keys(line, "list")
    assert pairs[0]["fingerprint"] in table
    assert f"the daemon's own key: {listed['server']}" in table
    keys(line, "revoke", "camera-1")
    assert [client["name"] for client in json.loads(keys(line, "list", "--json"))["clients"]] == ["camera-2"]


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("allow", "missing.key", "camera"), 1, "there is no file missing.key"),
        (("revoke", "nobody"), 1, "allowed are: none"),
        (("new", "a/b"), 1, "not a name for a key"),
        (("list",), 1, "allowed: No such file"),
    ],
)
def test_what_cannot_be_done_says_why(line: Path, words: tuple[str, ...], status: int, says: str) -> None:
    assert says in keys(line, *words, status=status)


@pytest.mark.promise(
    "Beyond this machine",
    "a key that is in the folder twice, under two names | log, `coserve keys list` and `coserve check` name "
    "the files; `coserve keys revoke` removes both",
)
def test_a_key_that_lies_there_twice_is_named_and_leaves_with_either_name(line: Path) -> None:
    keys(line, "new", "server", "--server", "--dir", str(line))
    for name in ("one", "two"):
        keys(line, "new", name, "--dir", str(line))
        keys(line, "allow", str(line / f"{name}.key"), name)
    shutil.copy(line / "allowed/one.key", line / "allowed/one-copy.key")
    listed = json.loads(keys(line, "list", "--json"))
    assert len(listed["clients"]) == 2
    assert "has the same key as one-copy.key" in listed["problems"][0]
    assert "has the same key" in keys(line, "list").replace("\n", " ")
    checked = CliRunner().invoke(app, ["check", str(line / "coserve.yaml")])
    assert "one.key has the same key as one-copy.key" in checked.output.replace("\n", " ")
    assert "one, one-copy (one key): shut out" in keys(line, "revoke", "one")
    assert [client["name"] for client in json.loads(keys(line, "list", "--json"))["clients"]] == ["two"]


def test_a_clients_secret_never_goes_into_the_allow_list(line: Path) -> None:
    keys(line, "new", "camera", "--dir", str(line))
    assert "stays with the client" in keys(line, "allow", str(line / "camera.key_secret"), "camera", status=1)
    assert not (line / "allowed").exists()
