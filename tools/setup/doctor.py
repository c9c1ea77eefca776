"""Examine a line's PC and change nothing: each check yields findings on driver, memory, disks, clock, rights, ports."""

import ctypes
import errno
import os
import pwd
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil
import pynvml

from daemon.check import check_line
from daemon.config.settings import Config, load_config
from daemon.errors import ConfigError
from daemon.host.folders import FOLDER_LOCK, owner
from daemon.host.machine import handle_shares, raise_handle_limit
from daemon.host.temperature import nvidia_gpus
from daemon.storage.database.connections import sqlite_path
from daemon.storage.disk_space import DiskSpace
from daemon.storage.disk_space import places as written_places
from daemon.units import size_text
from daemon.wire.keys import open_to
from experts.durable import read_only_mount
from tools.setup.service_files import Places, secrets, started_config
from tools.terminal.console import as_typed

#: torch itself says what does not fit: its build, the driver, the kind of GPU.
_LIBRARIES = """
import sys, cv2, torch
built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for processors only"
print(f"torch {torch.__version__} ({built})", flush=True)
for name in sys.argv[1:]:
    torch.ones(1, device=name).add(1).item()
"""
_NO_COMPUTING = "update the driver, or install a build of torch for it and this GPU; look at /dev/nvidia* and"
_NO_COMPUTING += " CUDA_VISIBLE_DEVICES; the service needs nvidia.conf"
_LIBRARIES_S = 60.0
#: Memory of the daemon beside experts and images: Python, torch, buffers.
_BASE_BYTES = 10**9
_FILES = 4096
#: adjtimex(2): the answer of an unsynchronised clock, and room for its `struct timex`.
_TIME_ERROR, _TIMEX_BYTES = 5, 512
_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4"}
    | {"smb3", "smbfs"}
)
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: `so` describes the state, `do` the remedy (None if none is needed).

    `warn`: the line runs worse or less safely than it could; `wrong`: it does not run, or loses data.
    """

    grade: Literal["ok", "warn", "wrong"]
    check: str
    so: str
    do: str | None = None


ok = partial(Finding, "ok")
warn = partial(Finding, "warn")
wrong = partial(Finding, "wrong")


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver, the newest CUDA it serves as (major, minor), and the GPUs in its order."""

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """The line, if one is named, and its PC. `user` runs the line, or will."""

    path: Path | None
    config: Config | None
    is_service: bool
    user: pwd.struct_passwd
    is_running: bool
    driver: Driver | None


def machine_of(path: Path | None, user: str | None = None) -> Machine:
    """Collect what the checks need of this PC and of the line at `path`. KeyError if `user` does not exist."""
    config, pid = None, None
    if path is not None:
        with suppress(ConfigError):  # `configuration` reports it
            config = load_config(path)
            pid, _ = owner(config.journal / FOLDER_LOCK)
    unit = Places(Path("/")).unit
    is_service = path is not None and unit.is_file() and started_config(unit.read_text("utf-8")) == path.resolve()
    runs_line = pwd.getpwuid(os.geteuid()) if user is None else pwd.getpwnam(user)
    if user is None and is_service:
        with suppress(KeyError):  # `permissions` reports it
            runs_line = pwd.getpwnam("coserve")
    return Machine(path, config, is_service, runs_line, bool(pid and psutil.pid_exists(pid)), find_driver())


def find_driver() -> Driver | None:
    """Return this machine's driver; None if there is none or it does not answer."""
    try:
        with nvidia_gpus() as numbers:
            cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
            version = str(pynvml.nvmlSystemGetDriverVersion())
            return Driver(version, (cuda // 1000, cuda % 1000 // 10), tuple(map(_gpu, numbers)))
    except pynvml.NVMLError:
        return None


def _gpu(number: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total_bytes, free_bytes = int(memory.total), int(memory.free)
    except pynvml.NVMLError as error:
        if getattr(error, "value", None) != pynvml.NVML_ERROR_NOT_SUPPORTED:  # else it computes in the host's memory
            raise
        total_bytes, free_bytes = psutil.virtual_memory()[:2]
    return Gpu(str(pynvml.nvmlDeviceGetName(handle)), total_bytes, free_bytes)


def configuration(machine: Machine) -> Iterator[Finding]:
    """Find what `coserve check` finds, except damage inside weights files: reading them takes long."""
    path = machine.path
    if path is None:
        remedy = f"{as_typed('init')}, or name its coserve.yaml"
        yield warn("configuration", "no line is named and none is here", remedy)
        return
    mistakes, _ = check_line(path, reads_weights=False)
    for problem in mistakes:
        first = "train or import it (coserve train, coserve import)" if "no expert `" in problem else "correct it"
        yield wrong("configuration", problem, f"{first}, then: {as_typed(f'check {path}')}")
    if not mistakes:
        yield ok("configuration", f"{path}: coserve.yaml, rules, catalog and weights files fit together")


def libraries(machine: Machine) -> Iterator[Finding]:
    """Load torch and OpenCV in a process of their own, and compute there on the line's GPUs, unless the line does."""
    driver, devices = machine.driver, machine.config.devices if machine.config else {}
    named = [name for name in devices if name.startswith("cuda")]
    present = [name for name in named if driver and int(name.removeprefix("cuda:")) < len(driver.gpus)]
    python = f"Python {sys.version.split()[0]} in {sys.prefix}"
    words = [sys.executable, "-c", _LIBRARIES, *(() if machine.is_running else present)]
    try:
        done = subprocess.run(  # noqa: S603 - fixed words
            words, cwd="/", capture_output=True, text=True, timeout=_LIBRARIES_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield wrong("libraries", f"torch did not load within {_LIBRARIES_S:.0f} s", "look at the disk and at `top`")
        return
    message = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    if not done.stdout:
        remedy = "apt-get install libgl1 libglib2.0-0" if ".so" in message else "install CoServe again: make bundle"
        yield wrong("libraries", f"{python}: torch or OpenCV does not load: {message}", remedy)
        return
    yield ok("libraries", f"{python}, {done.stdout.strip()}")
    if driver is None:
        so = "no NVIDIA driver answers here"
        remedy = "install the NVIDIA driver (nvidia-smi must list the GPU), or take it out of `devices`"
        yield wrong("gpu", f"{so}, and the line names {', '.join(named)}", remedy) if named else ok("gpu", so)
        return
    names = ", ".join(f"{gpu.name} {size_text(gpu.total_bytes)}" for gpu in driver.gpus) or "none"
    so = f"driver {driver.version} (CUDA {driver.cuda[0]}.{driver.cuda[1]}), GPUs: {names}"
    if done.returncode:
        yield wrong("gpu", f"{so}; torch cannot compute there: {message}", _NO_COMPUTING)
    elif driver.gpus and machine.config and not named:
        yield warn("gpu", f"{so}; the line uses none of them", "name cuda:0 in `devices`: coserve profile")
    else:
        yield ok("gpu", so)
        for name in present:  # `configuration` reports the others
            yield gpu_memory(machine, name)


def gpu_memory(machine: Machine, name: str) -> Finding:
    """Compare the memory of a GPU that the line names with what the line asks for."""
    assert machine.driver is not None
    assert machine.config is not None
    found, device = machine.driver.gpus[int(name.removeprefix("cuda:"))], machine.config.devices[name]
    if device.memory == "shared":
        return ok("gpu memory", f"{name} computes in RAM (`memory: shared`): see memory")
    room = ((device.activation_memory or 0) + device.expert_memory, found.free_bytes, found.total_bytes)
    so, lower = f"{name} has", f"lower devices.{name}.expert_memory"
    return _memory(machine, "gpu memory", so, room, lower, "end what else uses the GPU (nvidia-smi)")


def _memory(machine: Machine, check: str, so: str, room: tuple[int, int, int], lower: str, free_up: str) -> Finding:
    """Compare the bytes needed, free and in all; the remedies are for too few in all, and too few that are free."""
    needed, free, total = room
    so = f"{so} {size_text(total)}, {size_text(free)} free; the line may take {size_text(needed)}"
    if needed > total:
        return wrong(check, so, lower)
    if needed > free and not machine.is_running:
        return warn(check, so, f"{free_up}, or {lower}")
    return ok(check, so)


def memory(machine: Machine) -> Iterator[Finding]:
    """Compare the RAM that the line may take with this PC's, and its threads with the cores."""
    ram, cores = psutil.virtual_memory(), len(os.sched_getaffinity(0))
    if machine.config is None:
        yield ok("memory", f"{size_text(ram.total)} of RAM, {size_text(ram.available)} free, {cores} cores")
        return
    devices, needed_bytes = machine.config.devices, _BASE_BYTES + machine.config.limits.in_memory
    is_shared = "cpu" in devices and any(device.memory == "shared" for device in devices.values())
    for name, device in devices.items():
        needed_bytes += device.host_cache or 0
        if name == "cpu" or device.memory == "shared":
            needed_bytes += device.activation_memory or 0
        if name == "cpu" or (device.memory == "shared" and not is_shared):  # the CPU's includes those that share it
            needed_bytes += device.expert_memory
    lower = "lower devices.cpu.expert_memory, which the GPUs share" if is_shared else "lower expert_memory"
    lower += " or host_cache, or add memory: it would swap, or be killed"
    room = (needed_bytes, ram.available, ram.total)
    yield _memory(machine, "memory", "RAM:", room, lower, "end what else needs memory here")
    cpu = devices.get("cpu")
    if cpu is not None and (threads := cpu.executors * cpu.threads) > cores:
        so = f"{cores} cores; devices.cpu asks for {threads} threads (executors × threads)"
        yield warn("processors", so, "more threads than cores make batches slower: coserve profile measures the best")


def limits(machine: Machine) -> Iterator[Finding]:
    """Check the limit of this shell on open files; the service's unit sets its own."""
    if machine.is_service:
        return
    handles = raise_handle_limit()
    shares = handle_shares(handles)
    so = f"{handles} open files: {shares['intake']} connections of cameras, {shares['results']} of programs that read"
    if handles < _FILES:
        remedy = f"ulimit -n {_FILES} before the start (as root, if that is refused), or start as a service"
        yield warn("limits", f"this shell allows {so}", remedy)
    else:
        yield ok("limits", so)


def disks(machine: Machine) -> Iterator[Finding]:
    """Check each disk that the line writes to, once: its kind and its room."""
    if machine.config is None:
        return
    folders, by_disk = written_places(machine.config), dict[int, dict[str, Path]]()
    if problem := DiskSpace(folders).problem():
        so, _, do = problem.partition(": ")
        yield wrong("disk space", so, do)
    for key, folder in folders.items():
        present = next(path for path in (folder, *folder.parents) if path.is_dir())
        by_disk.setdefault(present.stat().st_dev, {})[key] = present
    for places in by_disk.values():
        folder, names = places.get("journal") or next(iter(places.values())), " and ".join(places)
        yield _file_system(names, folder, is_needed=bool({"journal", "database"} & set(places)))
        if problem is None:
            yield _room(machine.config, names, folder)


def _file_system(names: str, folder: Path, *, is_needed: bool) -> Finding:
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    real = folder.resolve()
    kind = next((mounts[path] for path in (real, *real.parents) if path in mounts), "unknown")
    so = f"{names} ({folder}) on {kind}"
    if kind in _NETWORK:
        so += ", a file system of another machine: its locks and its fsync cannot be relied on"
        return (wrong if is_needed else warn)("file system", so, "put journal and database on a disk of this PC")
    if kind in _IN_MEMORY:
        return wrong("file system", f"{so}, which is memory: it is lost with the power", "name folders on a disk")
    if kind == "overlay":
        so += ", the layer of a container, which goes with it"
        return warn("file system", so, "mount a volume for the line's folders")
    return ok("file system", so)


def _room(config: Config, names: str, folder: Path) -> Finding:
    disk, kept = psutil.disk_usage(str(folder)), config.retention
    so = f"{names}: {size_text(disk.free)} of {size_text(disk.total)} free"
    if not (kept.free or kept.images_bytes) and disk.free < disk.total / 10:
        return warn("disk space", so, "set retention.free, or it fills up: then the line stops at busy")
    return ok("disk space", so)


@contextmanager
def acting_as(user: pwd.struct_passwd) -> Iterator[bool]:
    """Run the body with the rights of `user` if root asks; else yield False and change nothing."""
    if user.pw_uid == os.geteuid() or os.geteuid() != 0:
        yield user.pw_uid == os.geteuid()
        return
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups(os.getgrouplist(user.pw_name, user.pw_gid))
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield True
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


def permissions(machine: Machine) -> Iterator[Finding]:
    """Check that the line's user may read and write what the line needs, and that nobody else reads its secrets."""
    config, user = machine.config, machine.user.pw_name
    if config is None or machine.path is None:
        return
    if machine.is_service and user != "coserve":
        yield wrong("permissions", "the service's user coserve does not exist", "coserve install-service makes it")
    read = {"configuration": machine.path, "rules": config.rules, "catalog": config.catalog} | secrets(config)
    sockets = [each.removeprefix("ipc://") for each in (*config.endpoints.intake, config.endpoints.control)]
    written = [*written_places(config).items(), *(("sockets", Path(each).parent) for each in sockets if each[0] == "/")]
    written += [("database's file", file)] if (file := sqlite_path(config.database)).exists() else []
    with acting_as(machine.user) as is_possible:
        if not is_possible:
            so = f"only root can look with the rights of {user}"
            yield warn("permissions", so, f"sudo {as_typed(f'doctor {machine.path}')}")
            return
        refused = [
            *(_refused(user, name, file, writes=False) for name, file in read.items() if file.exists()),
            *(_refused(user, name, place, writes=True) for name, place in written),
        ]
    yield from [*filter(None, refused)] or [ok("permissions", f"{user} can read and write all that the line needs")]
    for key, file in secrets(config).items():
        if file.exists() and (readers := open_to(file)):
            so = f"{key}: {file} can be read by {readers}"
            yield wrong("secrets", so, f"chmod 600 {file}, and make a new one if others may have read it")


def _refused(user: str, name: str, path: Path, *, writes: bool) -> Finding | None:
    """Return a finding with the remedy if a right is missing. A missing folder needs the right of its parent."""
    present = next(place for place in (path, *path.parents) if place.exists())
    mode = os.W_OK | os.X_OK if writes else os.R_OK
    if os.access(present, mode & ~os.X_OK if present.is_file() else mode, effective_ids=True):
        return None
    remedy = f"chown or chmod {present}, which is {stat.filemode(present.stat().st_mode)}"
    remedy += "" if present == path else f"; or make it: install -d -o {user} {path}"
    remedy = (writes and read_only_mount(present)) or remedy
    return wrong("permissions", f"{name}: {user} cannot {'write to' if writes else 'read'} {path}", remedy)


def ports(machine: Machine) -> Iterator[Finding]:
    """Check that each address is this machine's, and its port free or ours."""
    if machine.config is None:
        return
    endpoints = machine.config.endpoints
    named = {f"endpoints.intake {item}": item for item in endpoints.intake} | {"endpoints.results": endpoints.results}
    named |= {"endpoints.http": endpoints.http} if endpoints.http else {}
    problems = [finding for each in named.items() if (finding := _port(*each, is_running=machine.is_running))]
    state = "the line’s" if machine.is_running else "free"
    yield from problems or [ok("ports", f"{len(named)} endpoints: their ports are {state}")]


def _port(name: str, endpoint: str, *, is_running: bool) -> Finding | None:
    """Try to bind to an address; a name is for the daemon to resolve."""
    address = urlsplit(endpoint)
    if address.scheme == "ipc" or endpoint.endswith(":*") or not address.port:
        return None
    host, port = address.hostname or "", address.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the daemon does
        try:
            probe.bind(("" if host == "*" else host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                so = f"{name}: no network card of this machine has the address {host}"
                return wrong("ports", so, "name an address of this machine (ip address), or 127.0.0.1")
            if error.errno == errno.EADDRINUSE and not is_running:  # else the line's own
                listen = [each for each in psutil.net_connections("tcp") if each.status == "LISTEN"]
                pid = {each.laddr.port: each.pid for each in listen if each.laddr}.get(port)
                program = "another user's program (root sees which)"
                with suppress(psutil.Error):
                    program = f"{psutil.Process(pid).name()}, process {pid}" if pid else program
                so = f"{name}: port {port} is taken by {program}"
                return wrong("ports", so, "end that program, or name another port in coserve.yaml")
    return None


def clock(_machine: Machine) -> Iterator[Finding]:
    now, asked = datetime.now(UTC), ctypes.create_string_buffer(_TIMEX_BYTES)
    so = f"it is {now:%Y-%m-%d %H:%M:%S} UTC"
    answer = ctypes.CDLL(None).adjtimex(asked)  # zeros change nothing
    if answer < 0:
        yield warn("clock", f"{so}; the kernel does not say whether that is held", "timedatectl timesync-status")
    elif answer == _TIME_ERROR:
        so = f"{so}, and no time server holds the clock"
        yield warn("clock", so, "timedatectl set-ntp true, or chrony with the plant's time server")
    else:
        yield ok("clock", f"{so}, held by a time server")


def examine(machine: Machine) -> Iterator[Finding]:
    """Run every check in turn. A check that crashes becomes a finding, and the others go on."""
    for check in (configuration, libraries, memory, limits, disks, permissions, ports, clock):
        try:
            yield from check(machine)
        except Exception as error:  # noqa: BLE001 - one failed check must not hide the others
            so = f"could not be looked at: {type(error).__name__}: {error}"
            yield warn(check.__name__, so, "look at it by hand, and report this")
