"""The machine: Python and its libraries, GPUs, memory, processors, the clock, limits of the user."""

import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from daemon.host.machine import handle_shares, raise_handle_limit
from daemon.units import size_text
from tools.setup.doctor.context import DoctorContext, Finding, ok, warn, wrong

_LIBRARIES = """
import json, cv2, torch
cuda = torch.cuda
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "available": cuda.is_available(),
    "architectures": cuda.get_arch_list(),
}))
"""
_LIBRARIES_S = 60.0
#: What the daemon takes beside experts and images: Python, torch, buffers.
_BASE_BYTES = 10**9
_SWAPPED_BYTES = 256 * 10**6
_CPU_POLICIES = Path("/sys/devices/system/cpu/cpufreq")
_FILES = 4096
_FUTURE_S = 60.0
_STA_UNSYNC, _TIME_ERROR = 0x0040, 5  # adjtimex(2)


def libraries(context: DoctorContext) -> Iterator[Finding]:
    """Python, torch and OpenCV, loaded in a process of their own; and what torch makes of the GPUs."""
    environ = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1"}
    python = f"Python {sys.version.split()[0]} in {sys.prefix}"
    try:
        done = subprocess.run(  # noqa: S603 - fixed words
            [sys.executable, "-c", _LIBRARIES],
            env=environ, cwd="/", capture_output=True, text=True, timeout=_LIBRARIES_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield wrong("libraries", f"torch did not load within {_LIBRARIES_S:.0f} s", "look at the disk and at `top`")
        return
    if done.returncode:
        message = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        remedy = "apt-get install libgl1 libglib2.0-0" if ".so" in message else "install CoServe again: make bundle"
        yield wrong("libraries", f"{python}: torch or OpenCV does not load: {message}", remedy)
        return
    torch_facts = json.loads(done.stdout)
    build = f"CUDA {torch_facts['cuda']}" if torch_facts["cuda"] else "for processors only"
    yield ok("libraries", f"{python}, torch {torch_facts['torch']} ({build})")
    yield from _gpus(context, torch_facts)


def _gpus(context: DoctorContext, torch: dict[str, Any]) -> Iterator[Finding]:
    """Driver against torch's build, and the GPUs that the line names against those that are there."""
    named = [name for name in (context.config.devices if context.config else ()) if name.startswith("cuda")]
    driver = context.driver
    if driver is None:
        if named:
            remedy = "install the NVIDIA driver (nvidia-smi must list the GPU), or take it out of `devices`"
            yield wrong("gpu", f"the line names {', '.join(named)}, and no NVIDIA driver answers", remedy)
        else:
            yield ok("gpu", "no NVIDIA driver answers here, and the line names no GPU")
        return
    names = ", ".join(f"{gpu.name} {size_text(gpu.total_bytes)}" for gpu in driver.gpus) or "none"
    versions = f"driver {driver.version} (CUDA {driver.cuda[0]}.{driver.cuda[1]}), GPUs: {names}"
    if not named:
        if driver.gpus and context.config:
            yield warn("gpu", f"{versions}; the line uses none of them", "name cuda:0 in `devices`: coserve profile")
        else:
            yield ok("gpu", versions)
        return
    problem = build_problem(driver.cuda, torch)
    if problem:
        yield wrong("gpu", f"{versions}; {problem[0]}", problem[1])
        return
    yield ok("gpu", versions)
    for name in named:
        number = int(name.removeprefix("cuda:"))
        if number >= len(driver.gpus):
            yield wrong("gpu", f"the line names {name}, and there are {len(driver.gpus)} GPUs", "correct `devices`")
            continue
        gpu = driver.gpus[number]
        if not serves(gpu.capability, torch["architectures"]):
            built = ", ".join(torch["architectures"])
            so = f"{name}, {gpu.name}, is sm_{gpu.capability[0]}{gpu.capability[1]}; torch is built for {built}"
            yield wrong("gpu", so, "install a build of torch for this GPU")
        yield from gpu_memory(context, name)


def build_problem(driver_cuda: tuple[int, int], torch: dict[str, Any]) -> tuple[str, str] | None:
    if torch["cuda"] is None:
        return f"torch {torch['torch']} is built for processors only", "install a build of torch with CUDA"
    major, minor = (int(part) for part in torch["cuda"].split(".")[:2])
    if major > driver_cuda[0]:
        return f"torch is built for CUDA {major}.{minor}", "update the driver, or install torch for an older CUDA"
    if not torch["available"]:
        return "torch finds no GPU", "look at /dev/nvidia* and CUDA_VISIBLE_DEVICES; the service needs nvidia.conf"
    return None


def serves(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Machine code of the same major version runs, and PTX of an older one is compiled at the first start."""
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = "".join(filter(str.isdigit, digits))
        major, minor = int(number[:-1]), int(number[-1])
        if (major == capability[0] and minor <= capability[1]) or (kind == "compute" and (major, minor) <= capability):
            return True
    return not architectures


def gpu_memory(context: DoctorContext, name: str) -> Iterator[Finding]:
    assert context.driver is not None
    assert context.config is not None
    gpu, device = context.driver.gpus[int(name.removeprefix("cuda:"))], context.config.devices[name]
    if device.memory == "shared":
        yield ok("gpu memory", f"{name} computes in RAM (`memory: shared`): see memory")
        return
    needed_bytes = (device.activation_memory or 0) + device.expert_memory
    summary = f"{name} has {size_text(gpu.total_bytes)}, {size_text(gpu.free_bytes)} free; the line asks for"
    if needed_bytes > gpu.total_bytes:
        yield wrong("gpu memory", f"{summary} {size_text(needed_bytes)}", f"lower devices.{name}.expert_memory")
    elif needed_bytes > gpu.free_bytes and not context.is_running:
        remedy = "end what else uses the GPU (nvidia-smi), or lower expert_memory"
        yield warn("gpu memory", f"{summary} {size_text(needed_bytes)}", remedy)
    else:
        yield ok("gpu memory", f"{summary} {size_text(needed_bytes)}")


def memory(context: DoctorContext) -> Iterator[Finding]:
    """Compare the RAM that the line may take with the RAM of this machine, and report swapping."""
    ram = psutil.virtual_memory()
    so = f"{size_text(ram.total)} of RAM, {size_text(ram.available)} free"
    if context.config is None:
        yield ok("memory", so)
    else:
        needed_bytes = _asked_ram(context)
        so = f"{so}; the line may take {size_text(needed_bytes)}"
        devices = context.config.devices
        is_shared = "cpu" in devices and any(device.memory == "shared" for device in devices.values())
        lower = "lower devices.cpu.expert_memory, which the GPUs share" if is_shared else "lower expert_memory"
        if needed_bytes > ram.total:
            yield wrong("memory", so, f"{lower} or host_cache, or add memory: it would swap, or be killed")
        elif needed_bytes > ram.available and not context.is_running:
            yield warn("memory", so, f"end what else needs memory here, or {lower}")
        else:
            yield ok("memory", so)
    swap = psutil.swap_memory()
    if swap.used > _SWAPPED_BYTES:
        so = f"{size_text(swap.used)} of {size_text(swap.total)} swap are in use"
        remedy = "a swapped expert is slower than one on disk: lower expert_memory, or swapoff -a"
        yield warn("swap", so, remedy)
    else:
        yield ok("swap", f"{size_text(swap.used)} of {size_text(swap.total)} swap in use")


def _asked_ram(context: DoctorContext) -> int:
    assert context.config is not None
    total = _BASE_BYTES + context.config.limits.in_memory
    devices = context.config.devices
    for name, device in devices.items():
        if name == "cpu" or device.memory == "shared":
            is_counted = name != "cpu" and "cpu" in devices  # the CPU's budget includes the GPUs'
            total += (device.activation_memory or 0) + (0 if is_counted else device.expert_memory)
        total += device.host_cache or 0
    return total


def processors(context: DoctorContext) -> Iterator[Finding]:
    """Threads against cores, and governors that save power."""
    cores = len(os.sched_getaffinity(0))
    cpu = context.config.devices.get("cpu") if context.config else None
    threads = cpu.executors * cpu.threads if cpu else 0
    load = f"{cores} cores, load {os.getloadavg()[0]:.1f}"
    if threads > cores:
        so = f"{load}; devices.cpu asks for {threads} threads (executors × threads)"
        yield warn("processors", so, "more threads than cores make batches slower: coserve profile measures the best")
    else:
        yield ok("processors", load + (f"; the line computes with {threads} threads" if threads else ""))
    saving = sorted(
        policy.name for policy in _CPU_POLICIES.glob("policy*")
        if _read(policy / "scaling_governor") == "powersave"
        and _read(policy / "scaling_driver") not in ("intel_pstate", "amd-pstate-epp")
    )  # fmt: skip
    if saving:
        so = f"the governor of {len(saving)} processors is powersave"
        yield warn("governor", so, "cpupower frequency-set -g performance")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


class _Timex(ctypes.Structure):
    """The beginning of `struct timex` (adjtimex(2)), and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 200),
    )


def clock(context: DoctorContext) -> Iterator[Finding]:
    """Check that a time server sets the clock, and that the clock does not stand before stored times."""
    now = datetime.now(UTC)
    state = _Timex()
    answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state))
    if answer < 0:
        yield warn("clock", "the kernel does not say whether its clock is synchronised", "timedatectl timesync-status")
    elif answer == _TIME_ERROR or state.status & _STA_UNSYNC:
        so = f"it is {now:%Y-%m-%d %H:%M:%S} UTC, and no time server holds the clock"
        yield warn("clock", so, "timedatectl set-ntp true, or chrony with the plant's time server")
    else:
        yield ok("clock", f"it is {now:%Y-%m-%d %H:%M:%S} UTC, held to {state.maxerror / 1000:.0f} ms by a time server")
    for name, written_s in _written(context):
        if written_s > now.timestamp() + _FUTURE_S:
            so = (
                f"{name} is from {datetime.fromtimestamp(written_s, UTC):%Y-%m-%d %H:%M:%S} UTC, which is still to come"
            )
            yield wrong("clock", so, "the clock was set back, or was wrong then: set it right before the line runs on")


def _written(context: DoctorContext) -> Iterator[tuple[str, float]]:
    """Yield the newest times that the line has stored, each with its place."""
    from tools.setup.doctor.line import newest_image_s

    files = [Path(__file__)]
    if context.config is not None:
        files += [file for file in (context.path, context.config.rules, context.config.catalog) if file is not None]
        if (newest_s := newest_image_s(context.config)) is not None:
            yield "the newest image in the database", newest_s
    for file in files:
        try:
            yield str(file), file.stat().st_mtime
        except OSError:
            continue


def user_limits(context: DoctorContext) -> Iterator[Finding]:
    """Check the limits that this shell gives to its programs; the service's unit has its own."""
    if context.is_service:
        yield ok("limits", "the service's unit sets its own limits")
        return
    bad = [
        name
        for name, limit in (
            ("file size (ulimit -f)", resource.RLIMIT_FSIZE),
            ("memory (ulimit -v)", resource.RLIMIT_AS),
        )
        if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY
    ]
    if bad:
        yield wrong(
            "limits", f"this shell limits {' and '.join(bad)}", "ulimit with `unlimited`, or start as a service"
        )
    handles = raise_handle_limit()
    shares = handle_shares(handles)
    so = f"{handles} open files: {shares.intake} connections of cameras, {shares.results} of programs that read results"
    if handles < _FILES:
        remedy = f"ulimit -n {_FILES} before the start (as root, if that is refused), or start as a service"
        yield warn("limits", f"this shell allows {so}", remedy)
    elif not bad:
        yield ok("limits", f"{so}; files and memory of any size")
