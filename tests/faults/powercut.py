"""The folder that a power cut leaves: replays the shim's log over what lay there before.

A write is on the disk for certain once a later sync of its file has succeeded, a name once a sync of its folder has.
Of everything else a disk may have kept all, nothing, or some sectors. What a failed sync was to write is gone for
good: the kernel counts it as written, and the next sync succeeds without it. One that was under way meanwhile would
have failed too, had it been its bytes: if it succeeded, they are there.
"""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.faults.shim import Call

SECTOR_BYTES = 512
#: `nothing`: only what was synced; `some`: of the rest some sectors and some names; `garbage`: as `some`, and where a
#: file grew without its bytes reaching the disk lies what the disk held before.
Unsynced = Literal["nothing", "some", "garbage"]


@dataclass(slots=True)
class _Change:
    """One write (`data` at `offset`) or one new size; room that was only reserved makes no file shorter."""

    ended_ns: int
    offset: int = 0
    data: bytes | None = None
    size: int = 0
    reserves: bool = False
    state: Literal["written", "synced", "doomed"] = "written"
    doomed_ns: int = 0

    def apply(self, content: bytearray) -> None:
        if self.data is None:
            if not self.reserves:
                del content[self.size :]
            content.extend(bytes(max(0, self.size - len(content))))
            return
        content.extend(bytes(max(0, self.offset - len(content))))
        content[self.offset : self.offset + len(self.data)] = self.data

    def apply_some(self, content: bytearray, unsynced: Unsynced, rng: random.Random) -> None:
        """A disk writes sectors, in an order of its own."""
        if self.data is None:
            if rng.random() < 0.5:
                self.apply(content)
            return
        grown = max(0, self.offset + len(self.data) - len(content))
        content.extend(rng.randbytes(grown) if unsynced == "garbage" else bytes(grown))
        for start in range(0, len(self.data), SECTOR_BYTES):
            if rng.random() < 0.5:
                sector = self.data[start : start + SECTOR_BYTES]
                content[self.offset + start : self.offset + start + len(sector)] = sector


@dataclass(slots=True)
class _File:
    """The bytes on the disk, and later changes in the order of writing: a later write hides an earlier one."""

    base: bytearray
    changes: deque[_Change] = field(default_factory=deque[_Change])

    def sync(self, began_ns: int) -> None:
        for change in self.changes:
            is_its = change.state == "written" or (change.state == "doomed" and change.doomed_ns > began_ns)
            if is_its and change.ended_ns <= began_ns:
                change.state = "synced"
        while self.changes and self.changes[0].state == "synced":
            self.changes.popleft().apply(self.base)

    def fail(self, ended_ns: int) -> None:
        for change in self.changes:
            if change.state == "written":
                change.state, change.doomed_ns = "doomed", ended_ns

    def left(self, unsynced: Unsynced, rng: random.Random) -> bytes:
        content = bytearray(self.base)
        for change in self.changes:
            if change.state == "synced":
                change.apply(content)
            elif unsynced != "nothing":
                change.apply_some(content, unsynced, rng)
        return bytes(content)


@dataclass(frozen=True, slots=True)
class _Naming:
    """A name that came (`file`) or went (None), and another that went with it (a rename's source)."""

    ended_ns: int
    path: Path
    file: _File | None
    gone: Path | None = None

    def apply(self, names: dict[Path, _File]) -> None:
        if self.gone is not None:
            names.pop(self.gone, None)
        if self.file is None:
            names.pop(self.path, None)
        else:
            names[self.path] = self.file


class Disk:
    """The files under `folder`, but those whose path `leave` has: as a power cut before the first call leaves them."""

    def __init__(self, folder: Path, leave: Sequence[str] = ()) -> None:
        self._folder = folder
        self._leave = tuple(str(folder / name) for name in leave)
        self._names: dict[Path, _File] = {}
        self._namings: list[_Naming] = []
        self._by_inode: dict[int, _File] = {}
        for path in self._paths():
            inode = path.stat().st_ino
            if inode not in self._by_inode:
                self._by_inode[inode] = _File(bytearray(path.read_bytes()))
            self._names[path] = self._by_inode[inode]

    def replay(self, calls: Iterable[Call], log: Path) -> None:
        """Carry out the calls of the shim's `log`, with the bytes that it kept beside it."""
        written: dict[int, bytes] = {}
        for call in calls:
            if call.path != str(self._folder) and not self._is_ours(Path(call.path)):
                continue
            match call.call:
                case "write" if call.kept_at >= 0:
                    if call.pid not in written:
                        written[call.pid] = Path(f"{log}.{call.pid}").read_bytes()
                    data = written[call.pid][call.kept_at : call.kept_at + call.result]
                    self._changed(call, _Change(call.ended_ns, offset=call.offset, data=data))
                case "truncate" if call.result == 0 and call.offset == 0:  # the offset is fallocate's mode: 0 grows
                    reserves = call.function == "fallocate"
                    self._changed(call, _Change(call.ended_ns, size=call.length, reserves=reserves))
                case "sync":
                    self._synced(call)
                case "open" | "rename" | "link" | "unlink" if call.result >= 0:
                    self._named(call)
                case _:
                    pass

    def cut(self, unsynced: Unsynced, rng: random.Random) -> None:
        """Make the folder what a power cut now leaves of it."""
        names = self._names_left(unsynced, rng)
        for path in self._paths():
            if path not in names:
                path.unlink()
        path_of: dict[int, Path] = {}
        for path, file in names.items():
            if id(file) in path_of:  # a second name of the same file
                path.unlink(missing_ok=True)
                path.hardlink_to(path_of[id(file)])
                continue
            path_of[id(file)] = path
            content = file.left(unsynced, rng)
            if not path.exists() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                path.write_bytes(content)

    def _paths(self) -> list[Path]:
        return [path for path in self._folder.rglob("*") if path.is_file() and self._is_ours(path)]

    def _is_ours(self, path: Path) -> bool:
        # SQLite makes its shared memory anew after a power cut.
        return path.is_relative_to(self._folder) and not str(path).startswith(self._leave) and "-shm" not in path.name

    def _changed(self, call: Call, change: _Change) -> None:
        file = self._by_inode.get(call.inode)
        if file is not None:
            file.changes.append(change)

    def _named(self, call: Call) -> None:
        path = Path(call.path)
        if call.call == "open":
            if call.other == "created":
                file = self._by_inode[call.inode] = _File(bytearray())
                self._namings.append(_Naming(call.ended_ns, path, file))
            elif call.other == "emptied":
                self._changed(call, _Change(call.ended_ns, size=0))
        elif call.call in {"rename", "link"}:
            file, gone = self._by_inode.get(call.inode), path if call.call == "rename" else None
            self._namings.append(_Naming(call.ended_ns, Path(call.other), file, gone))
        else:
            self._namings.append(_Naming(call.ended_ns, path, None))

    def _synced(self, call: Call) -> None:
        file = self._by_inode.get(call.inode)
        if call.result != 0:
            if file is not None:
                file.fail(call.ended_ns)
            return
        if call.function == "syncfs":
            for synced in self._by_inode.values():
                synced.sync(call.began_ns)
            self._settle(call.began_ns, None)
        elif file is not None:
            file.sync(call.began_ns)
        else:
            self._settle(call.began_ns, Path(call.path))

    def _settle(self, began_ns: int, folder: Path | None) -> None:
        """Make durable the names that were changed in `folder` (None: anywhere) before `began_ns`."""
        volatile: list[_Naming] = []
        for naming in self._namings:
            if naming.ended_ns <= began_ns and folder in {None, naming.path.parent}:
                naming.apply(self._names)
            else:
                volatile.append(naming)
        self._namings = volatile

    def _names_left(self, unsynced: Unsynced, rng: random.Random) -> dict[Path, _File]:
        names = dict(self._names)
        # File systems journal names in their order: a beginning of them is kept.
        count = 0 if unsynced == "nothing" else rng.randint(0, len(self._namings))
        for naming in self._namings[:count]:
            naming.apply(names)
        return names
