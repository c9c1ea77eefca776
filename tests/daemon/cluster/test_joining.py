"""A worker says before Ray starts what would stop it."""

import socket
from pathlib import Path

import pytest

from daemon.cluster.joining import WorkerSettings, join_command, port_problem, unreachable
from daemon.errors import StartError


def a_worker(folder: Path, address: str | None, ports: int = 20000, token: Path | None = None) -> WorkerSettings:
    return WorkerSettings("pc2", address, ports, ports, token, folder / "cache", 1 << 30, folder / "ray")


def test_a_port_in_use_is_named_with_its_option(tmp_path: Path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        head = port_problem(a_worker(tmp_path, None, port))
        worker = port_problem(a_worker(tmp_path, "127.0.0.1:6379", port))
    assert head is not None
    assert f"port {port} cannot be used (Address already in use)" in head
    assert head.endswith("choose others with --port")
    assert worker is not None
    assert worker.endswith("choose others with --ports")


def test_a_head_without_its_token_says_how_to_make_one(tmp_path: Path):
    pytest.importorskip("ray")
    with pytest.raises(StartError, match=r"cannot be read: No such file or directory; docs/several-pcs\.md shows how"):
        join_command(a_worker(tmp_path, None, token=tmp_path / "ray_token"))


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [("a" * 64, 0o644, "can be read by"), ("abc", 0o600, "holds no token: expected one line of at least 32")],
)
def test_a_token_that_others_can_read_or_guess_is_refused(tmp_path: Path, text: str, mode: int, problem: str):
    pytest.importorskip("ray")
    token = tmp_path / "ray_token"
    token.write_text(text, encoding="ascii")
    token.chmod(mode)
    with pytest.raises(StartError, match=problem):
        join_command(a_worker(tmp_path, None, token=token))


def test_an_address_that_no_host_can_have_is_out_of_reach():
    assert (unreachable("pc..2:6379") or "").startswith("no cluster answers at pc..2:6379 (")
    assert (unreachable("127.0.0.1:99999") or "").startswith("no cluster answers at 127.0.0.1:99999 (")
