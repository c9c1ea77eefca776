"""`coserve demo` that is stopped while it trains leaves no training behind."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests import ROOT
from tests.waiting import PATIENCE_S, until

_TRAINS = """
import time
from tools.demo.prepare import _two_processes
from tools.query.formats import clean_up_on_sigterm
clean_up_on_sigterm()
with _two_processes() as pool:
    for job in [pool.submit(time.sleep, 3600) for _ in range(2)]:
        job.result()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_processes_that_train_end_with_the_command(number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", _TRAINS], cwd=ROOT, stderr=subprocess.DEVNULL) as command:
        process = psutil.Process(command.pid)
        until(lambda: sum("spawn_main" in " ".join(child.cmdline()) for child in process.children()) == 2)
        children = process.children()
        command.send_signal(number)
        assert command.wait(PATIENCE_S) != 0
    gone, alive = psutil.wait_procs(children, PATIENCE_S)
    assert gone
    assert not alive
