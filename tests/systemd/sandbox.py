"""The unit's sandbox without a running systemd: its settings read, its system call filter put around a process."""

import ctypes
import os
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import ROOT

UNISTD = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")

_BEGIN = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tests.systemd.sandbox import enter; enter()"
_X86_64 = 0xC000003E
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06  # classic BPF: ld [k], jeq k, ret k
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_MDWE = 38, 22, 65


def settings(unit: str) -> dict[str, list[str]]:
    """Every value of each key of a unit, in order."""
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        if "=" in line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def allowed_calls(filters: Sequence[str]) -> set[str]:
    """The names of system calls that `SystemCallFilter=` lines leave, by systemd's own groups."""
    printed = subprocess.run(["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True).stdout
    groups: dict[str, list[str]] = {}
    for line in printed.splitlines():
        if line.startswith("@"):
            groups[line.strip()] = members = []
        elif line.strip() and not line.startswith("#") and groups and not line.strip().startswith("#"):
            members.append(line.strip())

    def names(word: str) -> set[str]:
        return set().union(*map(names, groups[word])) if word.startswith("@") else {word}

    allowed: set[str] = set()
    for line in filters:
        found = set().union(*map(names, line.removeprefix("~").split()))
        allowed = allowed - found if line.startswith("~") else allowed | found
    return allowed


def enter_and_run(filters: Sequence[str], families: Sequence[str], command: Sequence[str]) -> list[str]:
    """The command line that runs `command` where any other system call, or address family, kills."""
    calls = ",".join(sorted(allowed_calls(filters)))
    return [sys.executable, "-c", _BEGIN, calls, ",".join(families), *command]


def enter() -> None:
    """Put the filter of this process's arguments around it, and become the command behind them."""
    calls, families, *command = sys.argv[1:]
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", UNISTD.read_text())}
    allowed = sorted(numbers[call] for call in calls.split(",") if call in numbers)
    program = [(_LOAD, 0, 0, _ARCH), (_JUMP_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _KILL_PROCESS)]
    program.append((_LOAD, 0, 0, _NUMBER))
    if os.geteuid() == 0:  # SQLite gives files their database's owner, but only as root, which the service is not
        program += _on(numbers["fchown"], [(_RETURN, 0, 0, _ERRNO | 1)])
    known = [_FAMILIES[family] for family in families.split(",")]
    sockets = [(_LOAD, 0, 0, _FIRST_ARGUMENT)]
    for family in known:
        sockets += _on(family, [(_RETURN, 0, 0, _ALLOW)])
    program += _on(numbers["socket"], [*sockets, (_RETURN, 0, 0, _KILL_PROCESS)])
    for number in allowed:
        program += _on(number, [(_RETURN, 0, 0, _ALLOW)])
    program.append((_RETURN, 0, 0, _KILL_PROCESS))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    handed = _Program(len(program), ctypes.addressof(code))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(handed))
    os.execv(command[0], command)  # noqa: S606 - what the unit says


def refuse_written_code() -> None:
    """What `MemoryDenyWriteExecute=` does, by the kernel's own means (6.3 or newer); OSError where it has none."""
    prctl(_PR_SET_MDWE, 1)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def _on(value: int, then: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    return [(_JUMP_EQUAL, 0, len(then), value), *then]


def prctl(option: int, *arguments: int) -> None:
    """Ask the kernel; OSError where it refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    padded = [ctypes.c_ulong(argument) for argument in (*arguments, *[0] * (4 - len(arguments)))]
    if libc.prctl(ctypes.c_int(option), *padded) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
