import os
from pathlib import Path

import pytest

from daemon.errors import StartError
from daemon.host.folders import exclusive_lock, owner


def test_a_second_daemon_hears_the_first_ones_process_number(tmp_path: Path) -> None:
    wanted = tmp_path / "inspection.db.lock", "the database inspection.db", tmp_path / "coserve.yaml"
    with (
        exclusive_lock(*wanted),
        pytest.raises(StartError, match=f"process {os.getpid()}"),
        exclusive_lock(*wanted),
    ):
        pass
    with exclusive_lock(*wanted):
        pass


def test_nobody_else_can_take_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "lock"
    path.parent.mkdir()
    path.touch(0o666)
    path.chmod(0o666)
    with exclusive_lock(path, "the journal", tmp_path / "coserve.yaml"):
        assert path.stat().st_mode & 0o777 == 0o600
        assert owner(path) == (os.getpid(), f"{tmp_path}/coserve.yaml")
    assert owner(path) == (0, f"{tmp_path}/coserve.yaml")
