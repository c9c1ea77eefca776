"""The file handles of a daemon: its soft limit is raised at the start."""

from pathlib import Path

import psutil

from tests.contract.client import Line
from tests.simulated import DAEMON


def test_the_soft_limit_of_handles_is_raised_as_far_as_the_hard_limit_allows(
    tmp_path: Path, experts_folder: Path
) -> None:
    line = Line(tmp_path / "line", experts_folder, command=("tests.few_handles", "300", "1000", *DAEMON))
    with line.service() as service:
        assert service.process is not None
        assert psutil.Process(service.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (1000, 1000)
