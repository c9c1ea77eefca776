"""Devices of other PCs, measured as the line sees them: batches and loads with their way over the network."""

import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from types import SimpleNamespace
from typing import Any

from daemon.cluster.joining import cluster_problems, unreachable
from daemon.cluster.messages import SentImage
from daemon.cluster.remote_devices import ClusterDevices, RemotePool
from daemon.config.settings import Device
from daemon.dispatch.pool import Batch, Fault
from daemon.dispatch.torch_devices import TorchDevices
from daemon.errors import DeviceLostError
from daemon.host.children import Children
from daemon.line.line import Line
from daemon.policy.matrix import Performance
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId
from daemon.records import JournalKey, Pixels
from experts.errors import ExpertError
from experts.spec import ArchitectureId, ExpertSpec
from experts.vision.graphs import WARM_UPS
from experts.vision.packing import BATCHES_BEFORE
from experts.vision.slot import LayoutShelf
from tools.profile.measure import Bench, LayoutCost, Pair, ProfileError
from tools.profile.run import DeviceProfile, MeasuredProfile, Progress, Wish, one_of_each
from tools.profile.samples import Samples
from tools.simulate.fit import fit_line, largest_useful_batch

#: Ray joins, and the worker imports torch.
_READY_WITHIN_S = 300.0


class RemoteBench(Bench):
    """All executors of another PC's device, as they are configured."""

    def __init__(self, name: str, device: Device, cluster: ClusterDevices, samples: Samples) -> None:
        super().__init__(name, device.executors, 1, LayoutShelf())
        self.name, self._batches = name, count()
        pool = PoolFacts(PoolId(name), "cpu", device.expert_memory, 1, host=device.worker)
        self._names = [ExecutorId(f"{name}/{number}") for number in range(device.executors)]
        executors = [ExecutorFacts(executor, pool.pool) for executor in self._names]
        read: Callable[[JournalKey], bytes] = lambda key: samples.payloads[key.offset % len(samples.payloads)]  # noqa: E731
        (self._there,) = cluster.pools([pool], executors, read, lambda: lambda _: None, 1)
        self._there.start()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._there.stop(5.0)

    def cost(self, spec: ExpertSpec, wish: Wish, activation_bytes: int) -> LayoutCost:
        """Return the cost of an expert's layout; only the first load sends weights, and is not counted."""
        assert isinstance(self._there, RemotePool)
        memory = self._there.slots
        memory.load(spec)
        slots: list[Any] = [(executor, spec) for executor in self._names]
        latencies_s = self.latencies_s(slots, wish.samples, wish.effort.batches, wish.effort.rounds)
        loads_s: list[float] = []
        for _ in range(wish.effort.loads):
            memory.unload(spec.expert)
            loads_s.append(memory.load(spec).load_ms / 1e3)
        memory.unload(spec.expert)
        line, layout = fit_line(latencies_s.items()), ArchitectureId(spec.layout)
        rest = largest_useful_batch(line, max(latencies_s)), activation_bytes, median(loads_s)
        return LayoutCost(Performance(self.name, layout, line.k_s, line.b_s, *rest), latencies_s, line.residual)

    def warm_ups(self, slot: Any) -> int:  # noqa: ARG002
        """Return the most that any network needs: the other PC's is not known here."""
        return max(BATCHES_BEFORE, WARM_UPS) + 1

    def timed(self, slot: Any, samples: Samples, size: int) -> float:  # noqa: ARG002
        executor, spec = slot
        images = [SentImage(JournalKey(1, number, 1), Pixels()) for number in range(size)]
        batch, ended = Batch(next(self._batches), executor, spec, images, [None] * size), SimpleQueue[Batch]()
        self._there.run(batch, ended.put)
        ended.get()
        failure = next((each.detail for each in batch.answers if isinstance(each, Fault)), batch.device_error)
        if failure is not None:
            raise DeviceLostError(failure)
        return batch.ended_s - batch.started_s


def with_remote(path: Path, line: Line, wish: Wish, own: MeasuredProfile, on_progress: Progress) -> MeasuredProfile:
    """Add the other PCs' devices that `path` names; those that cannot be measured are `skipped`, with the reason."""
    remote = {name: device for name, device in line.config.devices.items() if device.host is not None}
    if not remote:
        return own
    devices, missing = list(own.devices), dict[str, str]()
    cluster, children = ClusterDevices(path, line.config, TorchDevices({})), Children()
    drive: Any = SimpleNamespace(
        device_lost=lambda device, reason, **_: missing.update({device: reason}),
        device_back=lambda device, resume: (resume(), missing.pop(device, None)),
    )
    layouts = one_of_each(line)
    bytes_of = {str(c.row.architecture): c.row.activation_bytes for device in own.devices for c in device.costs}
    with ExitStack() as ending:
        ending.enter_context(redirect_stdout(StringIO()))  # the log of a daemon's parts
        ending.callback(cluster.stop)
        ending.callback(children.stop)
        benches = [ending.enter_context(RemoteBench(*each, cluster, wish.samples)) for each in remote.items()]
        if problem := "\n".join(cluster_problems(line.config)) or unreachable(str(line.config.cluster.address)):
            missing = dict.fromkeys(remote, problem)
        else:
            children.start(cluster.children())
            cluster.start(drive)
        until_s = time.monotonic() + _READY_WITHIN_S
        while missing and problem is None and time.monotonic() < until_s:
            on_progress(0.0, "waiting for the other PCs")
            time.sleep(0.1)
        skipped = dict(missing)
        for bench in (bench for bench in benches if bench.name not in missing):
            on_progress(len(devices) / (len(own.devices) + len(remote)), bench.name)
            try:
                costs = [bench.cost(spec, wish, bytes_of.get(layout, 0)) for layout, spec in layouts.items()]
                pair = Pair(remote[bench.name].executors, remote[bench.name].threads, 0.0)
                devices.append(DeviceProfile(bench.name, (), pair, tuple(costs), 0, 0, None))
            except (DeviceLostError, ExpertError) as error:
                skipped[bench.name] = str(error)
    if not devices:
        raise ProfileError("\n".join(f"{name}: {reason}" for name, reason in skipped.items()))
    return replace(own, devices=tuple(devices), skipped=skipped)
