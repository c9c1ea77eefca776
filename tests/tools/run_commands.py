"""Commands as a person types them: in this process, where imports are done already, or in one of their own."""

import subprocess
import sys
from typing import Any

from typer.testing import CliRunner, Result

from tools.cli.main import app


def coserve(*words: object, status: int = 0, **environ: str) -> Result:
    """Run a command in this process; its exit status must be `status`."""
    done = CliRunner().invoke(app, list(map(str, words)), env=environ)
    assert done.exit_code == status, f"{done.output}\n{done.exception}"
    return done


def start_coserve(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "tools", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)
