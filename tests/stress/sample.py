"""What a daemon holds, sampled from outside: memory, handles, threads, and the sizes of its files."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

_MB = 1e6


@dataclass(frozen=True, slots=True)
class Held:
    """One look. Sizes are in megabytes (10⁶ bytes); `rss_mb` is the process' resident memory."""

    at_s: float
    rss_mb: float
    handles: int
    threads: int
    database_mb: float
    wal_mb: float
    journal_mb: float
    images_mb: float
    quarantine_mb: float


class Watch:
    """Looks at the process `pid`, whose files lie in `folder` under their default names."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._process = psutil.Process(pid)
        self._folder = folder
        self._began_s = time.monotonic()

    def look(self) -> Held:
        folder = self._folder
        with self._process.oneshot():
            rss_bytes, threads = self._process.memory_info().rss, self._process.num_threads()
        return Held(
            at_s=round(time.monotonic() - self._began_s, 3),
            rss_mb=rss_bytes / _MB,
            handles=self._process.num_fds(),
            threads=threads,
            database_mb=_size(folder / "inspection.db") / _MB,
            wal_mb=_size(folder / "inspection.db-wal") / _MB,
            journal_mb=_folder_size(folder / "journal") / _MB,
            images_mb=_folder_size(folder / "images") / _MB,
            quarantine_mb=_folder_size(folder / "quarantine") / _MB,
        )


def as_row(held: Held) -> dict[str, float]:
    """As a row of a table, rounded to what can be told apart."""
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(held).items()}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _folder_size(folder: Path) -> int:
    return sum(_size(path) for path in folder.rglob("*") if not path.is_dir()) if folder.is_dir() else 0
