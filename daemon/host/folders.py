"""Folders that the daemon makes: mode 0750, so that others read through the group (RESULTS.md); what is durable."""

import os
from pathlib import Path

FOLDER_MODE = 0o750


def make_folder(folder: Path) -> None:
    """Make `folder` and what is missing above it, each with its mode whatever the umask is."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)
        path.chmod(FOLDER_MODE)


def sync(path: Path) -> None:
    """After a power cut a file holds what was written to it, a folder the names that were made, changed or removed."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
