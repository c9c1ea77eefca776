"""The performance matrix (CoServe §4.5): the cost of a batch and of a load, by architecture and device."""

from collections.abc import Iterable
from dataclasses import dataclass

from experts.spec import ArchitectureId


@dataclass(frozen=True, slots=True)
class Performance:
    """One architecture on one device. A batch of n images takes `k_s` · n + `b_s` seconds.

    `max_batch` is where the latency per image flattens, `activation_bytes` what one image of a batch needs beside the
    weights. `disk_s` and `ram_s` are the seconds of a load from disk and from host memory; `ram_s` is None if no copy
    in host memory can serve this device.
    """

    device: str
    architecture: ArchitectureId
    k_s: float
    b_s: float
    max_batch: int
    activation_bytes: int = 0
    disk_s: float = 0.1
    ram_s: float | None = None


class Matrix:
    """Rows by device and architecture; where nothing was profiled, an assumption of the same shape."""

    def __init__(self, rows: Iterable[Performance] = ()) -> None:
        self._rows = {(row.device, row.architecture): row for row in rows}
        self._measured = frozenset(self._rows)

    def __contains__(self, key: tuple[str, ArchitectureId]) -> bool:
        return key in self._rows

    def was_measured(self, device: str, architecture: ArchitectureId) -> bool:
        return (device, architecture) in self._measured

    def of(self, device: str, architecture: ArchitectureId) -> Performance:
        """Return the measured row, or an assumed one: a small network on a slow processor, loaded from a SATA disk."""
        row = self._rows.get((device, architecture))
        if row is None:
            row = Performance(device, architecture, k_s=0.03, b_s=0.03, max_batch=1 << 30, disk_s=0.3, ram_s=0.03)
            self._rows[device, architecture] = row
        return row
