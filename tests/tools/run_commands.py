"""Commands as a person types them: in this process, where imports are done already, or in one of their own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from typer.testing import CliRunner, Result

from tests.waiting import PATIENCE_S
from tools.cli.main import app


def coserve(*words: object, status: int = 0, **environ: str) -> Result:
    """Run a command in this process; its exit status must be `status`. It neither steps back nor handles signals."""
    step_back = patch("tools.backup.gentle.step_back", lambda: None)
    with step_back, patch("tools.query.formats.clean_up_on_signals", lambda: None):
        done = CliRunner().invoke(app, list(map(str, words)), env=environ)
    assert done.exit_code == status, f"{done.output}\n{done.exception}"
    return done


def start_coserve(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "tools", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **{"timeout": PATIENCE_S, **options})


@contextmanager
def paused_coserve(patch: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process of its own until it calls `stop`, which `patch` puts somewhere; there it waits."""
    code = f"import sys\ndef stop(*_):\n    print('here', flush=True)\n    sys.stdin.read()\n{patch}\n"
    command = [sys.executable, "-c", f"{code}from tools.cli.main import app\napp()\n", *map(str, words)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
