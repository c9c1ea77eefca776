"""Growth of a daemon: its memory, handles, threads and files, sampled from outside, and the trend of a figure."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from scipy import stats

_CONFIDENCE = 0.95
#: Neighbouring samples of memory are nearly the same: only the means of so many blocks count as independent.
_BLOCKS = 30


class ResourceMonitor:
    """Samples the process `pid`, whose files lie in `folder` under their default names."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._process = psutil.Process(pid)
        self._folder = folder
        self._began_s = time.monotonic()

    def sample(self) -> dict[str, Any]:
        """Return the resident memory and the sizes of files in megabytes (10⁶ bytes), file handles and threads."""
        sizes = {
            "rss_mb": self._process.memory_info().rss,
            "database_mb": _size_bytes(self._folder / "inspection.db"),
            "wal_mb": _size_bytes(self._folder / "inspection.db-wal"),
            **{f"{name}_mb": _folder_bytes(self._folder / name) for name in ("journal", "images", "quarantine")},
        }
        return {
            "at_s": round(time.monotonic() - self._began_s, 3),
            "handles": self._process.num_fds(),
            "threads": self._process.num_threads(),
            **{name: round(size / 1e6, 3) for name, size in sizes.items()},
        }


class Slope(NamedTuple):
    """Growth per hour, and the bounds between which it lies with 95 % confidence; infinite where samples are few."""

    per_hour: float
    lowest: float
    highest: float

    def is_flat(self, tolerance_per_hour: float) -> bool:
        """Return True if growth beyond the tolerance is not shown."""
        return self.per_hour <= tolerance_per_hour or self.lowest <= 0


def slope(at_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit a straight line by least squares over the means of blocks of samples."""
    blocks = min(_BLOCKS, len(at_s))
    if blocks < 3:
        return Slope(0.0, -math.inf, math.inf)
    hours = [float(np.mean(block)) / 3600 for block in np.array_split(np.asarray(at_s), blocks)]
    means = [float(np.mean(block)) for block in np.array_split(np.asarray(values), blocks)]
    if max(means) == min(means):
        return Slope(0.0, 0.0, 0.0)
    fit: Any = stats.linregress(hours, means)
    margin = float(stats.t.ppf((1 + _CONFIDENCE) / 2, blocks - 2)) * float(fit.stderr)
    return Slope(float(fit.slope), float(fit.slope) - margin, float(fit.slope) + margin)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _folder_bytes(folder: Path) -> int:
    return sum(_size_bytes(path) for path in folder.rglob("*") if not path.is_dir()) if folder.is_dir() else 0
