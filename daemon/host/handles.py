"""File handles: raise this process' limit, and divide it between connections and everything else."""

import resource
from dataclasses import dataclass

#: More is never needed, and some systems have no limit at all.
_MAX_HANDLES = 65_536


@dataclass(frozen=True, slots=True)
class HandleShares:
    """Numbers of connections that each socket takes; most handles stay for files and children."""

    intake: int
    results: int
    control: int


def raise_handle_limit() -> int:
    """Raise the soft limit of open files, often 1,024, as far as the hard limit allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = _MAX_HANDLES if hard == resource.RLIM_INFINITY else min(hard, _MAX_HANDLES)
    if soft != resource.RLIM_INFINITY and soft < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    return possible


def handle_shares(handles: int) -> HandleShares:
    """Return the connections that a process with so many handles takes."""
    return HandleShares(min(2048, handles // 8), min(1024, handles // 16), min(64, handles // 32))
