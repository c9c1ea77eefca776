"""The fault shim: a library before libc that counts calls on files and sockets, and fails, delays or kills at one.

A plan is a list of rules, `CALL[@PATHPART]:ACTION[:WHEN]`:

- CALL: `write` (write, pwrite, writev, pwritev), `sync` (fsync, fdatasync, syncfs), `open`, `rename`, `link`, `unlink`,
  `truncate` (ftruncate, fallocate), `send` (what goes out of a socket);
- PATHPART: a part of the file's path, its end where it closes with `$`; of a socket, `socket/tcp/PORT` or
  `socket/unix/PATH` of its own end;
- ACTION: `kill-before`, `kill-after`, `kill-short` (half the bytes, then SIGKILL), `eio`, `enospc`, `short` (half the
  bytes), `delay=MS`;
- WHEN: `N` (the Nth matching call), `N+` (from the Nth on), `*` (all, the default).

```python
environ = os.environ | shim_environment(["sync@.journal:delay=5"], log=Path("calls.tsv"))
```
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
CALLS = ("write", "sync", "open", "rename", "link", "unlink", "truncate", "send")
_RULE = re.compile(
    rf"(?:{'|'.join(CALLS)})(?:@[^:;\n]{{1,199}})?"
    r":(?:kill-before|kill-after|kill-short|eio|enospc|short|delay=\d{1,6})(?::(?:\*|[1-9]\d{0,8}\+?))?"
)


class ShimError(Exception):
    """The shim cannot be built, or a plan is not one; the text says what to do."""


def build_shim() -> Path:
    """Return the compiled library from a cache folder; compile it with `cc` if this source was not compiled before."""
    source = SOURCE.read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coserve"
    library = cache / f"faults-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = shutil.which("cc")
    if compiler is None:
        raise ShimError("the fault shim needs a C compiler: install one (on Debian and Ubuntu: apt-get install gcc)")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        fresh = Path(folder) / "shim.so"
        run = subprocess.run(
            [compiler, "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(fresh), str(SOURCE), "-lpthread"],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            raise ShimError(f"{compiler} cannot compile {SOURCE}:\n{run.stderr}")
        fresh.replace(library)  # a process that builds it at the same time makes the same file
    return library


def shim_environment(
    plan: Sequence[str], log: Path | None = None, *, switch: Path | None = None, keep_bytes_of: Path | None = None
) -> dict[str, str]:
    """Return the environment variables that let a process run under the shim with `plan`.

    `log`: every call is written there (`read_log`). `switch`: a file of rules for `switch_faults`.
    `keep_bytes_of`: with `log`, what is written to files under this folder is kept too, for `powercut`.
    """
    environ = {"LD_PRELOAD": str(build_shim()), "FAULTS_PLAN": ";".join(_checked(plan))}
    if "PYTHONPATH" in os.environ:  # `make promises` tests a copy of the tree
        environ["PYTHONPATH"] = os.environ["PYTHONPATH"]
    if log is not None:
        environ["FAULTS_LOG"] = str(log.absolute())
    if switch is not None:
        environ["FAULTS_FILE"] = str(switch.absolute())
    if keep_bytes_of is not None:
        if log is None:
            raise ShimError("the bytes are kept beside a log: give one")
        environ["FAULTS_BYTES"] = f"{keep_bytes_of.absolute()}/"
    return environ


def switch_faults(switch: Path, plan: Sequence[str]) -> None:
    """Put `plan` in force in the running processes that were given `switch`; counting begins anew, [] ends faults."""
    fresh = switch.with_name(f"{switch.name}.new")
    fresh.write_text("\n".join(_checked(plan)), encoding="utf-8")
    fresh.replace(switch)


def _checked(plan: Sequence[str]) -> Sequence[str]:
    for rule in plan:
        if not _RULE.fullmatch(rule):
            raise ShimError(f"{rule!r} is no rule: expected CALL[@PATHPART]:ACTION[:WHEN], as in 'sync@.journal:eio:3'")
    return plan


@dataclass(frozen=True, slots=True)
class Call:
    """One line of the shim's log (LOG_COLUMNS), about a call that ended (or killed).

    `began_ns` and `ended_ns` are monotonic; `result` -1 with `error` (errno); `offset` and `length` in bytes: of a sync
    `length` is the file's size; of a truncate, the new size (`offset`: fallocate's mode). `kept_at`: where the written
    bytes lie in LOG.PID, or -1. `other`: the new name of a rename or link; `created` or `emptied` of an open.
    """

    number: int
    began_ns: int
    ended_ns: int
    pid: int
    thread: int
    call: str
    function: str
    action: str
    result: int
    error: int
    inode: int
    offset: int
    length: int
    kept_at: int
    path: str
    other: str


LOG_COLUMNS = tuple(Call.__slots__)
_TEXT = {"call", "function", "action", "path", "other"}


def read_log(log: Path) -> list[Call]:
    """Return the calls of a log in the order in which they ended, without a last line that a kill cut off."""
    if not log.exists():
        return []
    calls: list[Call] = []
    for line in log.read_text(encoding="utf-8", errors="surrogateescape").split("\n")[:-1]:
        values = line.split("\t")
        if len(values) == len(LOG_COLUMNS):
            calls.append(Call(*(v if n in _TEXT else int(v) for n, v in zip(LOG_COLUMNS, values, strict=True))))  # type: ignore[arg-type]
    return sorted(calls, key=lambda call: (call.ended_ns, call.number))
