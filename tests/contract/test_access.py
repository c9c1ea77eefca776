"""A whole daemon that other machines can reach: keys by command while it runs, a token for HTTP, secrets kept."""

import http.client
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
import zmq.auth

from coserve_client import CameraImage, CurveClient, Publisher, PublishError, publish_images
from daemon.wire.control import ask
from tests.lines import a_jpeg, a_line
from tests.ports import free_port
from tests.simulated import a_service
from tests.tools.run_commands import coserve
from tests.waiting import PATIENCE_S

TOKEN = "fedcba9876543210" * 2


def publish(endpoint: str, folder: Path, client: str, first: int, patience_s: float = PATIENCE_S) -> int:
    """Publish two images as `client`; return how many the line has: an answer may be lost with its connection."""
    keys = CurveClient(folder / "keys" / "server.key", folder / "keys" / f"{client}.key_secret")
    board = {"type": "open-board", "serial": client}
    images = [CameraImage(f"{client}/{first + n}", a_jpeg(n), board, "R0402", {}) for n in range(2)]
    try:
        with Publisher(endpoint, client, curve=keys, patience_s=patience_s, silence_s=0.4) as publisher:
            account = publish_images(publisher, images)
            return account.accepted + account.duplicate
    except PublishError:
        return 0


def is_shut_out(endpoint: str, folder: Path, client: str, first: int) -> bool:
    return publish(endpoint, folder, client, first, patience_s=1.5) == 0


def get(port: int, path: str, token: str | None) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
        return connection.getresponse().status


def an_open_line(folder: Path, experts: Path) -> tuple[Path, int, int]:
    """A line on all addresses; its ports of intake and HTTP."""
    intake, results, web = free_port(), free_port(), free_port()
    endpoints = {
        "intake": ["ipc://run/intake.sock", f"tcp://0.0.0.0:{intake}"],
        "results": f"tcp://0.0.0.0:{results}",
        "control": "ipc://run/control.sock",
        "http": f"http://0.0.0.0:{web}",
    }
    security = {
        "server_key": "$CREDENTIALS_DIRECTORY/server.key_secret",
        "http_token": "$CREDENTIALS_DIRECTORY/token",
        "allowed_clients": "allowed",
    }
    return a_line(folder, experts, endpoints=endpoints, security=security), intake, web


@pytest.mark.promise(
    "Access, pages and reviews",
    "Clients are admitted and revoked while the line runs; no secret is ever printed",
)
def test_clients_are_let_in_and_shut_out_while_the_line_runs_and_no_secret_is_ever_said(
    tmp_path: Path, experts_folder: Path
) -> None:
    config, port, web = an_open_line(tmp_path, experts_folder)
    endpoint, keys = f"tcp://127.0.0.1:{port}", tmp_path / "keys"
    for name in ("camera-1", "camera-2"):
        coserve("keys", "new", name, "--dir", keys)
    coserve("keys", "new", "server", "--server", "--dir", keys)
    (keys / "token").write_text(TOKEN)
    for secret in (keys / "token", keys / "server.key_secret"):
        secret.chmod(0o400)
    with_config = ("--config", config)
    done = coserve("keys", "allow", keys / "camera-1.key", "camera-1", *with_config)
    assert "no daemon is running" in done.output
    with a_service(config, tmp_path / "daemon.log", {"CREDENTIALS_DIRECTORY": str(keys)}) as service:
        assert publish(endpoint, tmp_path, "camera-1", 0) == 2
        assert is_shut_out(endpoint, tmp_path, "camera-2", 0)
        done = coserve("keys", "allow", keys / "camera-2.key", "camera-2", *with_config)
        assert "camera-2 may come in" in done.output
        assert publish(endpoint, tmp_path, "camera-2", 0) == 2
        assert "camera-1 is shut out" in coserve("keys", "revoke", "camera-1", *with_config).output
        assert is_shut_out(endpoint, tmp_path, "camera-1", 2)
        assert publish(endpoint, tmp_path, "camera-2", 2) == 2
        clients = json.loads(coserve("keys", "list", *with_config, "--json").stdout)
        assert [client["name"] for client in clients["clients"]] == ["camera-2"]
        assert [get(web, path, None) for path in ("/metrics", "/readyz", "/x")] == [401, 401, 401]
        assert [get(web, path, TOKEN) for path in ("/metrics", "/readyz", "/x")] == [200, 200, 404]
        status = json.dumps(ask(f"ipc://{tmp_path}/run/control.sock", "status", timeout_s=PATIENCE_S))
        assert service.process is not None
        process = Path(f"/proc/{service.process.pid}")
        outputs = [(process / name).read_bytes() for name in ("cmdline", "environ")]
    with closing(sqlite3.connect(tmp_path / "inspection.db")) as database:
        rows = database.execute("SELECT source, count(*) FROM inspections GROUP BY source ORDER BY source").fetchall()
    assert rows == [("camera-1", 2), ("camera-2", 4)]
    outputs += [status.encode(), (tmp_path / "daemon.log").read_bytes(), config.read_bytes()]
    secrets = [TOKEN.encode()]
    for name in ("server", "camera-1", "camera-2"):
        secret = zmq.auth.load_certificate(keys / f"{name}.key_secret")[1]
        assert secret is not None
        secrets.append(secret)
    for secret in secrets:
        assert not [text for text in outputs if secret in text]


@pytest.mark.promise(
    "Access, pages and reviews",
    "An address that others can reach without keys or token is refused at start and by `coserve check`",
)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"intake": ["tcp://0.0.0.0:5570"]}, "needs CURVE"),
        ({"results": "tcp://*:5571"}, "needs CURVE"),
        ({"http": "http://0.0.0.0:9470"}, "needs a token"),
    ],
)
def test_an_open_endpoint_without_keys_or_token_is_refused_by_check_and_start(
    tmp_path: Path, experts_folder: Path, change: dict[str, Any], says: str
) -> None:
    path = a_line(tmp_path, experts_folder)
    config = yaml.safe_load(path.read_text())
    config["endpoints"] |= change
    path.write_text(yaml.safe_dump(config))
    assert says in coserve("check", path, status=1).output


def test_a_credential_that_systemd_did_not_give_is_named_by_the_start_and_hinders_no_command(
    tmp_path: Path, experts_folder: Path
) -> None:
    config, _, _ = an_open_line(tmp_path, experts_folder)
    said = "security.server_key: $CREDENTIALS_DIRECTORY is not set here"
    assert said in coserve("check", config, status=1).output
    assert "no daemon answers" in coserve("status", "--config", config, status=1).output
