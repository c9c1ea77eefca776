"""A page of shared memory on which a consumer's process writes its status; a full disk does not affect it.

The daemon makes it and hands it to each process that it starts for that consumer; what the last one wrote stays there
while the next one starts.
"""

import json
import os
import zlib
from collections.abc import Mapping
from typing import Any

_BYTES = 4096
#: A writer and a reader do not wait for each other: what was read half-written is read again.
_TRIES = 5
_MAX_TEXT = 600


class SharedStatusPage:
    """One page, shared by its file number; `write` in the consumer's process, `read` in the daemon."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def make(cls, name: str) -> "SharedStatusPage":
        fd = os.memfd_create(f"coserve-{name}", os.MFD_CLOEXEC)
        os.ftruncate(fd, _BYTES)
        return cls(fd)

    def write(self, facts: Mapping[str, Any]) -> None:
        """Replace the status. Long texts are cut."""
        short = {key: value[:_MAX_TEXT] if isinstance(value, str) else value for key, value in facts.items()}
        text = json.dumps(short).encode()
        head = f"{len(text):08d} {zlib.crc32(text):08x} ".encode()
        os.pwrite(self.fd, (head + text)[:_BYTES], 0)

    def read(self) -> dict[str, Any]:
        """Return the status; empty if none was written yet."""
        for _ in range(_TRIES):
            page = os.pread(self.fd, _BYTES, 0)
            try:
                size, checksum = int(page[:8]), int(page[9:17], 16)
            except ValueError:
                return {}
            text = page[18 : 18 + size]
            if zlib.crc32(text) == checksum:
                return json.loads(text)
        return {}

    def close(self) -> None:
        os.close(self.fd)
