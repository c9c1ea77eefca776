"""`coserve bench cluster`: a device of another PC, here over loopback, beside the line's own and beside Ray Serve."""

import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tests.bench.live.image_trace import ComponentType, ImageTrace, TraceImage
from tests.bench.processes import OwnProcesses
from tests.bench.rounds import Spread, ratios, run_in_turn, spread
from tools.terminal.console import AsJson, console, print_json

if TYPE_CHECKING:
    from experts.spec import ExpertSpec
    from tests.bench.live.sides import SideInput

_BATCH, _SIZE = 8, 224
#: Requests that Ray Serve's replica may have, so that the next batch waits while it computes.
_SERVE_WINDOW = 3 * _BATCH
_SERVE_LIMIT_S = 300.0
_NOTES = (
    f"ResNet-18 of random weights, {_SIZE} pixels, batches of {_BATCH} JPEG of 20 KB, one executor of one thread",
    "sides in turn; the remote one over Ray's own processes on this PC, with its token, one batch after the other",
    "Ray Serve alone: one replica of one thread, multiplexed, the same weights, slots and batches, all images at once",
    "submit: the drive's thread. report: the cluster's thread, from the answer's bytes to the report to the drive",
    "CPU: all of the daemon's threads, from the journal's bytes to the report",
)


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """Rates (images/s) and ratios over the rounds: median, lowest, highest; a ratio is one round's. Else medians."""

    local: Spread
    remote: Spread
    remote_to_local: Spread
    submit_us_per_request: float
    report_us_per_request: float
    daemon_cpu_us_per_request: float
    #: None where Ray Serve is not installed.
    ray_serve: Spread | None
    remote_to_ray_serve: Spread | None


class _Drive:
    """Hears that the device is back, in place of a line's drive."""

    def __init__(self) -> None:
        self.is_back = threading.Event()

    def device_lost(self, device: str, reason: str, *, was_there: bool = True) -> None:
        console.print(f"{device}: {reason}", markup=False)

    def device_back(self, device: str, resume: Callable[[], None]) -> None:
        resume()
        self.is_back.set()


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("cluster")(bench_cluster)


def bench_cluster(
    batches: Annotated[int, typer.Option(min=5, help="Batches of a side in each round.")] = 40,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side runs.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure a device of another PC beside the line's own and Ray Serve: images/s, and what a request costs here.

    Example: coserve bench cluster
    """
    from tests.contract.cluster import RayCluster

    folder = Path(tempfile.mkdtemp(prefix="cl", dir="/tmp"))
    cluster = RayCluster(folder)
    try:
        cluster.head.start()
        cluster.worker.start()
        figures = _measure(folder, cluster.settings, batches, rounds)
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print_json(asdict(figures))
        return
    drive_us = figures.submit_us_per_request + figures.report_us_per_request
    console.print(
        f"local {figures.local.text(1)} images/s, remote {figures.remote.text(1)}:"
        f" ratio {figures.remote_to_local.text(3)}"
    )
    if figures.ray_serve is not None and figures.remote_to_ray_serve is not None:
        console.print(
            f"Ray Serve alone {figures.ray_serve.text(1)} images/s:"
            f" remote is {figures.remote_to_ray_serve.text(3)} times as fast"
        )
    else:
        from tests.bench.live.libraries import missing_library

        console.print(f"Ray Serve alone was not run: {missing_library('ray')}", markup=False)
    console.print(
        f"a remote request costs the drive {drive_us:.1f} us ({figures.submit_us_per_request:.1f} to submit,"
        f" {figures.report_us_per_request:.1f} for its report's way back), all of the daemon"
        f" {figures.daemon_cpu_us_per_request:.0f} us of CPU"
    )
    for note in _NOTES:
        console.print(note, style="dim")


def _measure(folder: Path, settings: dict[str, str], batches: int, rounds: int) -> ClusterFigures:  # noqa: PLR0915
    import yaml

    from daemon.cluster.remote_devices import ClusterDevices
    from daemon.config.settings import load_config
    from daemon.dispatch.orders import BatchOrder, BatchReport, ImageOrder
    from daemon.dispatch.torch_devices import TorchDevices
    from daemon.host.children import Children
    from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId, RequestId
    from daemon.records import JournalKey, Pixels
    from tests.bench.live.libraries import missing_library
    from tests.bench.live.sides import run_side
    from tests.experts.samples import an_expert_file
    from tests.lines import a_jpeg

    spec = an_expert_file(folder, input_size=_SIZE)
    memory = {"expert_memory": 2 * spec.weights_bytes}
    config = folder / "coserve.yaml"
    lines: dict[str, Any] = {"rules": "r", "catalog": "c", "cluster": settings}
    lines["devices"] = {"cpu": memory, "pc2-cpu": {**memory, "host": "pc2", "device": "cpu"}}
    config.write_text(yaml.safe_dump(lines), encoding="utf-8")
    whole = load_config(config, {})
    devices, drive, children = ClusterDevices(config, whole, TorchDevices(whole.devices)), _Drive(), Children()
    payloads = [a_jpeg(seed, 256, 184) for seed in range(32)]
    reports: SimpleQueue[BatchReport] = SimpleQueue()
    sides: dict[str, Any] = {}
    pools: dict[str, Any] = {}
    for name in ("cpu", "pc2-cpu"):
        pools[name] = devices.pool(PoolFacts(PoolId(name), "cpu", 2 * spec.weights_bytes, _BATCH))
        facts = ExecutorFacts(ExecutorId(f"{name}/0"), PoolId(name))
        read: Callable[[JournalKey], bytes] = lambda key: payloads[key.offset % len(payloads)]  # noqa: E731
        sides[name] = devices.executor(facts, pools[name], read, 1, lambda _key: None, 1 << 24)
    children.start(devices.children())
    devices.start(drive)  # pyright: ignore[reportArgumentType]
    drive.is_back.wait(300.0)
    serve = _serve_input(folder, spec, payloads, batches * _BATCH)
    number = 0
    reporting_s: list[float] = []

    def hear(report: BatchReport) -> None:
        reporting_s.append(time.thread_time())
        reports.put(report)

    def run(side: str) -> _Round:
        nonlocal number
        reporting_s.clear()
        submit_s, begin_s, cpu_s = 0.0, time.perf_counter(), time.process_time()
        for _ in range(batches):
            number += 1
            images = tuple(
                ImageOrder(RequestId(n), JournalKey(1, number * _BATCH + n, 1), Pixels()) for n in range(_BATCH)
            )
            thread_s = time.thread_time()
            sides[side].submit(BatchOrder(number, spec, images))
            submit_s += time.thread_time() - thread_s
            report = reports.get()
            assert report.device_error is None, report.device_error
        seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
        between_s = (reporting_s[-1] - reporting_s[0]) * batches / (batches - 1)
        return _Round(batches * _BATCH / seconds, submit_s, between_s, cpu_s)

    try:
        for name, side in sides.items():
            pools[name].load(replace(spec))
            side.start(hear)
            run(name)
        in_turn = {"local": lambda: run("cpu"), "remote": lambda: run("pc2-cpu")}
        if missing_library("ray") is None:
            in_turn["ray"] = lambda: _Round(OwnProcesses().call(run_side, serve, _SERVE_LIMIT_S).images_per_s)
        runs = run_in_turn(in_turn, rounds)
    finally:
        for side in sides.values():
            side.stop(5.0)
        children.stop()
        devices.stop()
    local, remote, ray = ([each.images_per_s for each in runs.get(name, ())] for name in ("local", "remote", "ray"))
    costs = zip(*(each[1:] for each in runs["remote"]), strict=True)
    submit_us, report_us, cpu_us = (statistics.median(seconds) * 1e6 / (batches * _BATCH) for seconds in costs)
    return ClusterFigures(
        spread(local),
        spread(remote),
        spread(ratios(remote, local)),
        submit_us,
        report_us,
        cpu_us,
        spread(ray) if ray else None,
        spread(ratios(remote, ray)) if ray else None,
    )


class _Round(NamedTuple):
    """A side's images/s; seconds of the threads that submit and that report, and CPU seconds of the process."""

    images_per_s: float
    submit_s: float = 0.0
    report_s: float = 0.0
    cpu_s: float = 0.0


def _serve_input(folder: Path, spec: "ExpertSpec", payloads: list[bytes], images: int) -> "SideInput":
    """Return the same work for Ray Serve."""
    from experts.catalog import write_catalog
    from tests.bench.live.sides import RAY_OF_8, SideInput

    entry = {"architecture": spec.architecture, "file": spec.file.name, "classes": [*spec.classes]}
    entry |= {"input_size": spec.input_size, "normalisation": "imagenet", "sha256": spec.sha256}
    write_catalog(folder / "catalog.yaml", {spec.expert: entry})
    shown = tuple(TraceImage(spec.expert, None, number % len(payloads), False) for number in range(images))
    return SideInput(
        side=RAY_OF_8,
        trace=ImageTrace("board", (ComponentType(spec.expert, None, 1.0),), shown),
        catalog=folder / "catalog.yaml",
        pictures=[(payload, payload) for payload in payloads],
        budgets=(2 * spec.weights_bytes,),
        disk="cold",
        limit_s=_SERVE_LIMIT_S / 2,
        disk_lock=folder / "disk.lock",
        executors=1,
        threads=1,
        window=_SERVE_WINDOW,
    )
