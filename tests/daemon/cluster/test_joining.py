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
def test_rays_folder_lies_in_one_that_is_the_workers_alone_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("ray")
    monkeypatch.setattr("daemon.cluster.joining.port_problem", lambda _: None)
    worker = a_worker(tmp_path, None)
    command, _ = join_command(worker)
    assert f"--temp-dir={tmp_path}/ray/ray" in command
    assert worker.folder.stat().st_mode & 0o777 == 0o700
    worker.folder.chmod(0o770)
    with pytest.raises(StartError, match="ray: expected a folder of this user with mode 0700, and no link"):
        join_command(worker)
    worker.folder.chmod(0o700)
    worker.folder.rename(tmp_path / "elsewhere")
    worker.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match="and no link"):
        join_command(worker)
    worker.folder.unlink()
    (tmp_path / "elsewhere").rename(worker.folder)
    join_command(worker)
    if os.geteuid() == 0:
        os.chown(worker.folder, 65534, 65534)
        with pytest.raises(StartError, match="expected a folder of this user"):
            join_command(worker)
