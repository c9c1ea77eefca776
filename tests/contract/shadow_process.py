"""The process of versions in shadow of a line's daemon, for tests and benchmarks on machines that are never idle."""

import os
from contextlib import suppress

import psutil

from tests.contract.client import Line


def process_of(line: Line) -> psutil.Process | None:
    """Return the process in shadow of this line's daemon, None if there is none."""
    own = [one for one in psutil.process_iter(["cmdline"]) if str(line.config) in (one.info["cmdline"] or ())]
    return next((one for one in own if "daemon.shadow" in one.info["cmdline"]), None)


def urged(line: Line, but: psutil.Process | None = None) -> psutil.Process:
    """Return the process, no longer at idle priority: on a crowded machine a test would wait for it without end."""
    process = line.wait(lambda: (one := process_of(line)) != but and one)
    line.wait(lambda: os.sched_getscheduler(process.pid) == os.SCHED_IDLE)
    os.sched_setscheduler(process.pid, os.SCHED_OTHER, os.sched_param(0))
    with suppress(psutil.AccessDenied):  # a user may not
        process.nice(0)
    return process
