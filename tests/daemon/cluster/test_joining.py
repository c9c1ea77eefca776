"""A worker says before Ray starts what would stop it."""

import socket
from pathlib import Path

import pytest

from daemon.cluster.joining import WorkerSettings, join_command, port_problem
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
    with pytest.raises(StartError, match=r"cannot be read: No such file or directory; docs/plant\.md shows how"):
        join_command(a_worker(tmp_path, None, token=tmp_path / "ray_token"))
