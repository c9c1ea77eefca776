"""The disks of the line: what kind they are, how full, how fast. A few megabytes are written and taken away again."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from daemon.storage.disk_space import DiskSpace
from daemon.units import size_text
from tools.setup.doctor.context import DoctorContext, Finding, acting_as, ok, warn, wrong

_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4"}
    | {"smb3", "smbfs"}
)
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_PROBE_BYTES = 16 * 2**20
_SYNCS, _SYNC_BYTES, _SYNCS_WITHIN_S = 20, 4096, 2.0
_SLOW_SYNC_S, _SLOW_WRITE, _SLOW_READ = 0.03, 30e6, 100e6
#: A probe leaves this much more free than it takes.
_PROBE_ROOM = 8
_FEW_INODES, _NO_INODES = 0.05, 1000


def disks(context: DoctorContext) -> Iterator[Finding]:
    """Each disk that the line writes to, once."""
    if context.config is None:
        return
    problem = DiskSpace(context.folders, context.config.retention.reserve).problem()
    if problem:
        so, _, do = problem.partition(": ")
        yield wrong("disk space", so, do)
    by_disk: dict[int, dict[str, Path]] = {}
    for key, folder in context.folders.items():
        present = next(path for path in (folder, *folder.parents) if path.is_dir())
        by_disk.setdefault(present.stat().st_dev, {})[key] = present
    for places in by_disk.values():
        folder = places.get("journal") or next(iter(places.values()))
        yield from _kind(list(places), folder)
        yield from _room(context, list(places), folder, is_full=problem is not None)
        yield from _speed(context, list(places), folder)


def _kind(keys: Sequence[str], folder: Path) -> Iterator[Finding]:
    """The file system: a database and its journal need a disk of this machine."""
    kind = file_system(folder)
    so = f"{' and '.join(keys)} ({folder}) on {kind}"
    if kind in _NETWORK:
        so += ", a file system of another machine: its locks and its fsync cannot be relied on"
        is_needed = {"journal", "database"} & set(keys)
        remedy = "put journal and database on a disk of this PC"
        yield wrong("file system", so, remedy) if is_needed else warn("file system", so, "a disk of this PC is safer")
    elif kind in _IN_MEMORY:
        so += ", which is memory: everything there is lost with the power"
        yield wrong("file system", so, "name folders on a disk")
    elif kind == "overlay":
        so += ", the layer of a container, which goes with it"
        yield warn("file system", so, "mount a volume for the line's folders")
    else:
        yield ok("file system", so)


def file_system(folder: Path) -> str:
    """Its type, as the kernel names it: that of the mount point nearest above."""
    real = folder.resolve()
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounts[path] for path in (real, *real.parents) if path in mounts), "unknown")


def _room(context: DoctorContext, keys: Sequence[str], folder: Path, *, is_full: bool) -> Iterator[Finding]:
    assert context.config is not None
    stats = os.statvfs(folder)
    free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    so = f"{' and '.join(keys)}: {size_text(free)} of {size_text(total)} free"
    retention = context.config.retention
    prunes = retention.free or retention.images_bytes
    if is_full:
        pass  # said in the daemon's own words
    elif not prunes and free < total / 10:
        yield warn("disk space", so, "set retention.free, or it fills up: then the line stops at busy")
    elif retention.free and free < retention.free:
        yield warn("disk space", f"{so}, below retention.free: old images are being let go", "make room")
    else:
        yield ok("disk space", so)
    if stats.f_files and stats.f_favail < _NO_INODES:
        yield wrong("inodes", f"{' and '.join(keys)}: {stats.f_favail} files can still be made", "remove small files")
    elif stats.f_files and stats.f_favail < stats.f_files * _FEW_INODES:
        so = f"{' and '.join(keys)}: {stats.f_favail:,} of {stats.f_files:,} files can still be made"
        yield warn("inodes", so, "remove small files, or keep fewer images (retention)")


def _speed(context: DoctorContext, keys: Sequence[str], folder: Path) -> Iterator[Finding]:
    """Sequential writing and reading, and the fdatasync that each group of images waits for."""
    stats = os.statvfs(folder)
    if stats.f_bavail * stats.f_frsize < _PROBE_ROOM * _PROBE_BYTES:
        yield warn("disk speed", f"{folder} has too little room to measure its disk", "make room")
        return
    with acting_as(context.user):
        try:
            with tempfile.TemporaryFile(dir=folder, prefix=".coserve-doctor-") as probe:
                written, read = _stream(probe.fileno())
                sync_s = _sync(probe.fileno())
        except OSError:
            return  # what may not be written there is a finding of the permissions
    so = (
        f"{' and '.join(keys)}: writes {size_text(written)}/s, reads {size_text(read)}/s,"
        f" makes a small write durable in {sync_s * 1e3:.1f} ms"
    )
    if sync_s > _SLOW_SYNC_S or written < _SLOW_WRITE:
        yield warn(
            "disk speed", so, "every group of images waits for that: an SSD with its write cache on is far faster"
        )
    elif read < _SLOW_READ:
        yield warn("disk speed", so, "every switch of an expert reads its weights: keep the catalog on an SSD")
    else:
        yield ok("disk speed", so)


def _stream(fd: int) -> tuple[float, float]:
    """Bytes a second, written and made durable; and read, from the disk and not from memory."""
    block = os.urandom(2**20)
    began_s = time.perf_counter()
    for _ in range(_PROBE_BYTES // len(block)):
        os.write(fd, block)
    os.fsync(fd)
    wrote_s = time.perf_counter() - began_s
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    began_s = time.perf_counter()
    for offset in range(0, _PROBE_BYTES, len(block)):
        os.pread(fd, len(block), offset)
    return _PROBE_BYTES / wrote_s, _PROBE_BYTES / (time.perf_counter() - began_s)


def _sync(fd: int) -> float:
    """Seconds of an appended page made durable, the median of some."""
    took_s: list[float] = []
    while len(took_s) < _SYNCS and sum(took_s) < _SYNCS_WITHIN_S:
        began_s = time.perf_counter()
        os.write(fd, bytes(_SYNC_BYTES))
        os.fdatasync(fd)
        took_s.append(time.perf_counter() - began_s)
    return statistics.median(took_s)
