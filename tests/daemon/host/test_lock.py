import os
from pathlib import Path

import pytest

from daemon.errors import StartError
from daemon.host.lock import Lock


def test_a_second_daemon_hears_the_first_ones_process_number(tmp_path: Path) -> None:
    first = Lock(tmp_path / "inspection.db.lock", "the database inspection.db")
    with pytest.raises(StartError, match=f"process {os.getpid()}"):
        Lock(tmp_path / "inspection.db.lock", "the database inspection.db")
    first.release()
    Lock(tmp_path / "inspection.db.lock", "the database inspection.db").release()
