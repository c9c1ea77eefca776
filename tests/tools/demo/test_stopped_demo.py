"""`coserve demo` that is stopped leaves nothing running: no training, no daemon that is about to start."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from tests import ROOT
from tests.waiting import PATIENCE_S, until
from tools.setup.service import Service

_TRAINS = """
import time
from tools.demo.recipe import two_processes
from tools.query.formats import clean_up_on_signals
clean_up_on_signals()
with two_processes() as pool:
    for job in [pool.submit(time.sleep, 3600) for _ in range(2)]:
        job.result()
"""


def test_the_processes_that_train_end_with_the_command() -> None:
    command = subprocess.Popen([sys.executable, "-c", _TRAINS], cwd=ROOT, stderr=subprocess.DEVNULL)
    process = psutil.Process(command.pid)
    until(lambda: sum("spawn_main" in " ".join(child.cmdline()) for child in process.children()) == 2)
    children = process.children()
    command.terminate()
    try:
        assert command.wait(PATIENCE_S) != 0
        assert psutil.wait_procs(children, PATIENCE_S)[1] == []
    finally:
        for one in (process, *children):
            if one.is_running():
                one.kill()


def test_a_service_whose_start_is_interrupted_ends(tmp_path: Path) -> None:
    waits = ("timeit", "-n", "1", "-s", "import time; time.sleep(3600)")
    service = Service(Path("pass"), tmp_path / "log", command=waits)
    with patch("tools.setup.service.time.monotonic", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        service.start()
    assert service.process is not None
    assert service.process.poll() is not None
