"""Ray on this PC: `coserve worker` starts it, as a head or to join one; the line's Ray driver only connects."""

import importlib.util
import json
import logging
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon.cluster.worker import CACHE, CACHE_SIZE
from daemon.config.settings import Config
from daemon.errors import MissingExtraError, StartError
from daemon.wire.keys import read_token, unusable

_CONNECT_WITHIN_S = 2.0
#: Weights and pictures only pass through it.
_OBJECT_STORE_BYTES = 256 << 20
#: Ray's components on this PC, one port each from the worker's first on; the rest of its hundred are for processes.
_COMPONENTS = ("node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc", "dashboard-agent-listen",
               "metrics-export")  # fmt: skip
_PORTS, _FIRST_PROCESS_PORT = 100, 10


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """A worker's PC: `address` of the head, or None for a head of its own on `port`; `ports` is the first of 100."""

    name: str
    address: str | None
    port: int
    ports: int
    token: Path | None
    cache: Path
    cache_bytes: int
    folder: Path


def resource_of(host: str) -> str:
    return f"coserve-{host}"


def cluster_problems(config: Config) -> list[str]:
    """Return why this PC cannot use remote devices; an unreachable cluster is not a mistake."""
    cluster = config.cluster
    if cluster.address is None:
        return []
    is_missing = importlib.util.find_spec("ray") is None
    problems = [f"cluster: {MissingExtraError('ray', 'a cluster', 'cluster')}"] if is_missing else []
    return problems + [f"{key}: {problem}" for key, problem in unusable([("cluster.token", cluster.token, read_token)])]


def unreachable(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_WITHIN_S).close()
    except (OSError, ValueError, OverflowError) as error:  # also a name or port that no host can have
        why = getattr(error, "strerror", None) or error
        return f"no cluster answers at {address} ({why}): start its head, or correct the address"
    return None


def last_line(error: BaseException) -> str:
    """Return an error's type and last line: Ray's texts can be pages long."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"[:300]


def join(ray: Any, address: str) -> None:
    with chdir("/"):  # Ray lets workers import from a folder of this name, before their own code
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)


def port_problem(settings: WorkerSettings) -> str | None:
    """Name a port in use. Ray itself fails only after half a minute."""
    ports = {settings.ports + number: "--ports" for number in range(len(_COMPONENTS))}
    if settings.address is None:
        ports[settings.port] = "--port"
    for port, option in ports.items():
        try:
            with socket.create_server(("", port)):
                pass
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            return f"port {port} cannot be used ({why}): end the program that has it, or choose others with {option}"
    return None


def refusal(address: str, environment: Mapping[str, str]) -> str | None:
    """Return why the cluster refuses this PC; `ray start` takes longer to say so."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", f"--address={address}"]
    probe = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    why = (probe.stderr.splitlines() or [""])[-1][:300]
    if "InvalidAuthToken" in probe.stderr:
        why = "it has another token: copy its file to this PC, and name the copy with --token"
    elif "Failed to connect to GCS" in why:
        why = "its head does not answer; if that uses TLS, give this PC a certificate of the same authority"
    return f"the cluster at {address} cannot be joined: {why}" if probe.returncode else None


def ray_environment(token: Path | None) -> dict[str, str]:
    """Return the environment of Ray's processes: no usage statistics, token authentication."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled" if token is None else "token",
        **({} if token is None else {"RAY_AUTH_TOKEN_PATH": str(token)}),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray hides the GPUs from actors that ask it for none
        "RAY_max_direct_call_object_size": str(8 << 20),  # a batch travels with its call, not through the object store
        # A PC that is gone is noticed within seconds; a worker without its head ends, and its service starts it again.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "3000",
        "RAY_health_check_failure_threshold": "3",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # the line gives the batches of a PC that stops to others
    }


def _make_own(folder: Path, option: str, denied: int, why: str) -> None:
    """Make `folder`. StartError if it is another user's or a link, or its mode gives others a right of `denied`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & denied:
        raise StartError(
            f"{folder}: expected a folder of this user with mode {0o777 & ~denied:04o}, and no link, since {why}:"
            f" remove it, or name another with {option}"
        )


def join_command(settings: WorkerSettings) -> tuple[list[str], Mapping[str, str]]:
    """Return command and environment to join the cluster and stay. Raises StartError, MissingExtraError."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("ray", "a worker", "cluster")
    if settings.address is not None and (problem := unreachable(settings.address)):
        raise StartError(problem)
    for _, problem in unusable([("--token", settings.token, read_token)]):
        hint = "docs/plant.md shows how to make one" if settings.address is None else "copy that of the head"
        raise StartError(f"{problem}; {hint}")
    if problem := port_problem(settings):
        raise StartError(problem)
    try:
        _make_own(settings.cache, "--cache", 0o022, "others could put links or weights there")
        _make_own(settings.folder, "--dir", 0o077, "Ray lets everybody write below it")
    except OSError as error:
        raise StartError(f"{error.filename}: {error.strerror}: name another folder") from None
    environment = {**os.environ, **ray_environment(settings.token)}
    if settings.address is not None and (problem := refusal(settings.address, environment)):
        raise StartError(problem)
    first = settings.ports + _FIRST_PROCESS_PORT
    where = [f"--address={settings.address}"]
    if settings.address is None:
        where = ["--head", f"--port={settings.port}", "--include-dashboard=false", "--no-monitor"]
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats",
        *where,
        *(f"--{component}-port={settings.ports + number}" for number, component in enumerate(_COMPONENTS)),
        f"--min-worker-port={first}", f"--max-worker-port={settings.ports + _PORTS - 1}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={settings.folder / 'ray'}",
        f"--resources={json.dumps({resource_of(settings.name): 1})}",
        "--include-log-monitor=false",
    ]  # fmt: skip
    return command, environment | {CACHE: str(settings.cache), CACHE_SIZE: str(settings.cache_bytes)}
