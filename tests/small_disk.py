"""A disk of 64 MB: a tmpfs, where the machine lets us mount one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str = "64m") -> Iterator[Path]:
    """Mount a tmpfs of `size` at `folder`; skips the test by name where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0750", "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("there is no `mount` here: install util-linux")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: run as root ({mounted.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
