"""A worker says before Ray starts what would stop it."""

import os
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


@pytest.mark.promise("Containment", "Ray's folder, open to all, lies in one of the worker's user alone")
@pytest.mark.parametrize(("name", "mode"), [("ray", 0o770), ("cache", 0o775)])
def test_a_workers_folders_are_its_users_alone_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int
):
    pytest.importorskip("ray")
    monkeypatch.setattr("daemon.cluster.joining.port_problem", lambda _: None)
    worker, folder = a_worker(tmp_path, None), tmp_path / name
    command, _ = join_command(worker)
    assert f"--temp-dir={tmp_path}/ray/ray" in command
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(mode)
    with pytest.raises(StartError, match=f"{name}: expected a folder of this user with mode 07[05]{{2}}, and no link"):
        join_command(worker)
    folder.chmod(0o700)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="and no link"):
        join_command(worker)
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    join_command(worker)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        with pytest.raises(StartError, match="expected a folder of this user"):
            join_command(worker)
