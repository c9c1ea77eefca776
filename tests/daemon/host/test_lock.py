import os
from pathlib import Path

import pytest

from daemon.errors import StartError
from daemon.host.folders import Lock, owner


def test_a_second_daemon_hears_the_first_ones_process_number(tmp_path: Path) -> None:
    first = Lock(tmp_path / "inspection.db.lock", "the database inspection.db", tmp_path / "coserve.yaml")
    with pytest.raises(StartError, match=f"process {os.getpid()}"):
        Lock(tmp_path / "inspection.db.lock", "the database inspection.db", tmp_path / "coserve.yaml")
    first.release()
    Lock(tmp_path / "inspection.db.lock", "the database inspection.db", tmp_path / "coserve.yaml").release()


def test_nobody_else_can_take_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "lock"
    path.parent.mkdir()
    path.touch(0o666)
    path.chmod(0o666)
    lock = Lock(path, "the journal", tmp_path / "coserve.yaml")
    assert path.stat().st_mode & 0o777 == 0o600
    assert owner(path) == (os.getpid(), f"{tmp_path}/coserve.yaml")
    lock.release()
    assert owner(path) == (0, f"{tmp_path}/coserve.yaml")
