"""Ray Serve with model multiplexing and batches: the usual choice for many models on one machine.

One replica per executor, each with its share of the models that fit the memory (rounded up), as many threads as an
executor has, the same reader (replicas share one disk), and handle calls, so that no HTTP is in the way. Requests for
one model are computed as one batch, models load beside computing, and the router prefers a replica that has the model.
Chains are the caller's: a detector is asked when its classifier answered.
"""

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from experts.reading import FileReader
from experts.spec import ExpertId
from experts.vision.preprocess import prepare
from tests import ROOT
from tests.bench.live.expert_files import read_experts, reader_of
from tests.bench.live.loading import loader_of
from tests.bench.live.sides import SIDES, WINDOW, SideInput, SideResult
from tests.bench.processes import peak_bytes

#: Seconds for which a batch waits for more requests; all images wait anyhow.
_BATCH_WAIT_S = 0.01
_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_SERVE_ENABLE_TASK_EVENTS": "0",
    "PYTHONPATH": str(ROOT),
}


class ReplicaAnswer(NamedTuple):
    """The start of the batch, and the loads and the largest memory of this replica (a process) so far."""

    replica: int
    began_s: float
    loads: int
    peak_bytes: int


class SharedDisk:
    """A reader that makes one transfer at a time among processes, as others do among threads: there is one disk."""

    def __init__(self, inner: FileReader, lock: Path) -> None:
        self._inner = inner
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        return self._inner.open(path)

    def read(self, descriptor: int, view: memoryview, offset: int) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            self._inner.read(descriptor, view, offset)
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


def run_ray(work: SideInput) -> SideResult:
    """Run a cluster of this one process tree, on the loopback interface only."""
    os.environ.update(_RAY_ENVIRONMENT)
    ray: Any = import_module("ray")
    serve: Any = import_module("ray.serve")
    folder = tempfile.mkdtemp(prefix="r")  # sockets lie deep in it, and their paths may not be long
    try:
        ray.init(
            address="local",
            num_cpus=work.executors + 1,
            object_store_memory=200_000_000,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
        handle = serve.run(_inspector(serve, work).bind(), name="bench", route_prefix=None)
        return asyncio.run(_inspect_all(work, handle))
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class _Held:
    """A model in a replica; Ray calls `__del__` when it gives the model up, and Python once more."""

    def __init__(self, loader: Any, model: Any) -> None:
        self.model = model
        self._loader = loader

    def __del__(self) -> None:
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.give_up(self.model)


def _models_of_a_replica(work: SideInput, largest_bytes: int) -> int:
    return max(1, -(-work.memory_bytes // largest_bytes // work.executors))


def _inspector(serve: Any, work: SideInput) -> Any:
    """Return the deployment, as Ray's documentation shows it."""
    specs = read_experts(work.catalog)
    largest_bytes = max(spec.weights_bytes for spec in specs.values())
    models = _models_of_a_replica(work, largest_bytes)
    threads, disk, lock, device = work.threads_per_executor, work.disk, work.disk_lock, work.devices[0]
    loading, ongoing = SIDES[work.side].loading, max(1, WINDOW // work.executors)
    max_batch = SIDES[work.side].max_batch or ongoing

    class Inspector:
        """One replica: an executor with its own models."""

        def __init__(self) -> None:
            self.torch: Any = import_module("torch")
            self.loader = loader_of(loading, SharedDisk(reader_of(disk), lock), models * largest_bytes, threads, device)
            self.loads = 0
            import_module("tests.bench.live.preload")

        @serve.multiplexed(max_num_models_per_replica=models)
        async def model(self, expert: str) -> Any:
            spec = specs[ExpertId(expert)]
            self.loads += 1
            loaded = await asyncio.get_running_loop().run_in_executor(None, self.loader.load, spec)
            return _Held(self.loader, loaded)

        async def replica(self) -> int:
            return os.getpid()

        @serve.batch(max_batch_size=max_batch, batch_wait_timeout_s=_BATCH_WAIT_S)
        async def answers(self, payloads: list[bytes]) -> list[ReplicaAnswer]:
            self.torch.set_num_threads(threads)
            expert = serve.get_multiplexed_model_id()
            held = await self.model(expert)
            began_s, spec = time.monotonic(), specs[ExpertId(expert)]
            prepared = [prepare(payload, "image", None, spec) for payload in payloads]
            self.loader.answer(held.model, spec, prepared)  # in the loop: no model is given up meanwhile
            answer = ReplicaAnswer(os.getpid(), began_s, self.loads, peak_bytes())
            return [answer] * len(payloads)

        async def __call__(self, payload: bytes) -> ReplicaAnswer:
            return await self.answers(payload)

    return serve.deployment(
        Inspector,
        name="inspector",
        num_replicas=work.executors,
        max_ongoing_requests=ongoing,
        ray_actor_options={"num_cpus": 1},
    )


async def _inspect_all(work: SideInput, handle: Any) -> SideResult:
    """Send every image at once; give up those that have not ended at the limit."""
    ready: set[int] = set()
    while len(ready) < work.executors:
        ready.add(await handle.replica.remote())
    before: dict[int, ReplicaAnswer] = {}
    newest: dict[int, ReplicaAnswer] = {}
    for expert in _experts_at_the_start(work):
        reply: ReplicaAnswer = await handle.options(multiplexed_model_id=expert).remote(work.payload(0))
        before[reply.replica] = newest[reply.replica] = reply
    began_s = time.monotonic()
    waits_s, latencies_s = list[float](), list[float]()

    async def inspect(number: int) -> None:
        payload, starts_s = work.payload(number), list[float]()
        for expert in work.trace.images[number].experts:
            reply: ReplicaAnswer = await handle.options(multiplexed_model_id=expert).remote(payload)
            newest[reply.replica] = max(newest.get(reply.replica, reply), reply, key=lambda each: each.loads)
            starts_s.append(reply.began_s - began_s)
        waits_s.append(starts_s[0])
        latencies_s.append(time.monotonic() - began_s)

    tasks = [asyncio.create_task(inspect(number)) for number in range(len(work.trace.images))]
    done, pending = await asyncio.wait(tasks, timeout=work.limit_s)
    ended_s = time.monotonic()
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()
    stopped = len(latencies_s) < len(tasks)
    return SideResult(
        side=work.side,
        images=len(latencies_s),
        seconds=ended_s - began_s if stopped else max(latencies_s),
        stopped=stopped,
        loads=sum(reply.loads for reply in newest.values()) - sum(reply.loads for reply in before.values()),
        waits_s=tuple(waits_s),
        latencies_s=tuple(latencies_s),
        peak_bytes=peak_bytes() + sum(reply.peak_bytes for reply in newest.values()),
    )


def _experts_at_the_start(work: SideInput) -> list[str]:
    """Return the most used experts, as many as the replicas hold: they are there when the images come."""
    usage = work.trace.usage()
    largest_bytes = max(spec.weights_bytes for spec in read_experts(work.catalog).values())
    count = _models_of_a_replica(work, largest_bytes) * work.executors
    return sorted(usage, key=lambda name: -usage[name])[:count]
