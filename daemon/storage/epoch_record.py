"""The record of the results' epoch in the journal's folder, by which a start knows a database that was put back.

Consumers know a result by its `seq`. A database from a backup counts on from an older `seq` and gives numbers again, so
it gets a new epoch. The database itself cannot tell that it is older; this record can: it names the epoch and the last
`seq` that was given out. It is written after each commit and before its results are published, in place and without a
sync: after a kill it is exact, after a power cut never ahead of the database.

A copy of the journal's folder would bring an old record along. So a second file, the seal, is never written again, and
the record names the time of its last change (ctime, in whole seconds, as some disks keep it), which no copy has. A
wrong guess gives a new epoch too many: consumers read again what they have read.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from experts.durable import replace_durably

_MODE = 0o640
_LINE_BYTES = 120


class EpochRecord:
    """The record and its seal. `why_other` first; `begin` after a new epoch is durable, or `resume`; then `note`."""

    def __init__(self, folder: Path) -> None:
        self._file, self._seal = folder / "epoch", folder / "epoch.seal"
        self._fd: int | None = None
        self._epoch, self._sealed_s = "", 0

    def why_other(self, epoch: str | None, last_seq: int) -> str | None:
        """Return why a database with `epoch` and `last_seq` is not the one of this record; None if it is."""
        try:
            known: dict[str, Any] = json.loads(self._file.read_bytes())
            noted, seq, self._sealed_s = str(known["epoch"]), int(known["seq"]), int(known["sealed_s"])
            sealed_s = int(self._seal.stat().st_ctime)
        except FileNotFoundError:
            return "its journal has no record of its results: the line was restored or moved, or has a new journal"
        except (OSError, ValueError, KeyError, TypeError):
            return f"{self._file}, the record of its results, cannot be read"
        self._epoch = noted
        if sealed_s != self._sealed_s:
            return "its journal is a copy: the line was restored or moved"
        if noted != epoch:
            return f"another database with epoch {epoch or 'unknown'} was put in place of that with epoch {noted}"
        if seq > last_seq:
            return f"it ends at seq {last_seq}, and {seq} was given out: an older copy was put in its place"
        return None

    def begin(self, epoch: str, last_seq: int) -> None:
        """Write both files anew, durably. A disk that refuses makes the next start give a new epoch again."""
        try:
            replace_durably(self._seal, f"{epoch}\n".encode(), _MODE)
            self._epoch, self._sealed_s = epoch, int(self._seal.stat().st_ctime)
            replace_durably(self._file, self._line(last_seq), _MODE)
        except OSError as error:
            structlog.get_logger("database").warning("epoch_not_recorded", file=str(self._file), error=str(error))
        self.resume()

    def resume(self) -> None:
        with suppress(OSError):
            self._fd = os.open(self._file, os.O_WRONLY | os.O_CLOEXEC)

    def note(self, last_seq: int) -> None:
        """Write the last `seq` that was given out: in the writer's thread, before it is published."""
        if self._fd is not None:
            with suppress(OSError):
                os.pwrite(self._fd, self._line(last_seq), 0)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _line(self, seq: int) -> bytes:
        known = {"epoch": self._epoch, "seq": seq, "sealed_s": self._sealed_s}
        return json.dumps(known).encode().ljust(_LINE_BYTES) + b"\n"
