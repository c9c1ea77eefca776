"""`coserve demo` that is stopped while it trains leaves no training behind."""

import subprocess
import sys

import psutil

from tests import ROOT
from tests.waiting import PATIENCE_S, until

_TRAINS = """
import time
from tools.demo.recipe import two_processes
from tools.query.formats import clean_up_on_sigterm
clean_up_on_sigterm()
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
