"""Folders that the daemon makes: durable, with mode 0750, so that others read through the group (RESULTS.md)."""

import os
from pathlib import Path

from experts.durable import sync

FOLDER_MODE = 0o750


def make_folder(folder: Path) -> None:
    """Make `folder` and every missing folder above it: durable, each with its mode under any umask."""
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)
        path.chmod(FOLDER_MODE)
        sync(path.parent)


def folder_problem(folder: Path) -> str | None:
    """Return why files cannot be written below `folder`, which may be missing still."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file, where a folder is needed: move it, or name another folder"
    # Nothing can be made in /proc and similar filesystems, even with permission.
    if not os.access(there, os.W_OK | os.X_OK) or _is_virtual(there):
        return f"nothing can be written in {there}: give this user the right to, or name another folder"
    return None


def _is_virtual(folder: Path) -> bool:
    state = os.statvfs(folder)
    return state.f_blocks == 0
