"""Ray Serve with model multiplexing: the usual choice for many models on one machine.

Needs `pip install 'ray[serve]'`. One replica per executor, each with its share of the models that fit the memory, as
many threads as an executor has, ordinary loading through the same reader (replicas share one disk), and handle calls,
so that no HTTP is in the way. Chains are the caller's: a detector is asked when its classifier answered.
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
from tests.bench.live.expert_files import read_experts, reader_of
from tests.bench.live.ordinary import OrdinaryFiles, answer
from tests.bench.live.sides import SideInput, SideResult

#: Requests that a replica takes at once. With one, all others wait in the router, which prefers a replica that has the
#: model: half the loads per image of Ray's default of 5 on the skewed trace, and 1.4 times its images per second.
_ONGOING = 1
_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_SERVE_ENABLE_TASK_EVENTS": "0",
}


class ReplicaAnswer(NamedTuple):
    """The start of the batch, and the loads of this replica (a process) so far."""

    replica: int
    began_s: float
    loads: int
    loaded_bytes: int


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
    try:
        ray: Any = import_module("ray")
        serve: Any = import_module("ray.serve")
    except ModuleNotFoundError as missing:
        raise SystemExit(f"Ray Serve is not installed ({missing}): pip install 'ray[serve]==2.60.0'") from None
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


def _inspector(serve: Any, work: SideInput) -> Any:
    """Return the deployment, as Ray's documentation shows it."""
    specs = read_experts(work.catalog)
    models_in_all = work.memory_bytes // max(spec.weights_bytes for spec in specs.values())
    threads, disk, lock = work.threads_per_executor, work.disk, work.disk_lock

    class Inspector:
        """One replica: an executor with its own models."""

        def __init__(self) -> None:
            self.torch: Any = import_module("torch")
            self.files = OrdinaryFiles(SharedDisk(reader_of(disk), lock))
            self.loads = 0
            self.loaded_bytes = 0
            frameworks: Any = import_module("experts.vision.frameworks")
            frameworks.torchvision()
            frameworks.ultralytics()

        @serve.multiplexed(max_num_models_per_replica=max(1, models_in_all // work.executors))
        async def model(self, expert: str) -> Any:
            spec = specs[ExpertId(expert)]
            self.loads += 1
            self.loaded_bytes += spec.weights_bytes
            return self.files.model(spec)

        async def replica(self) -> int:
            return os.getpid()

        async def __call__(self, payload: bytes) -> ReplicaAnswer:
            self.torch.set_num_threads(threads)
            expert = serve.get_multiplexed_model_id()
            model = await self.model(expert)
            began_s = time.monotonic()
            spec = specs[ExpertId(expert)]
            answer(model, spec, [prepare(payload, "image", None, spec)])
            return ReplicaAnswer(os.getpid(), began_s, self.loads, self.loaded_bytes)

    return serve.deployment(
        Inspector,
        name="inspector",
        num_replicas=work.executors,
        max_ongoing_requests=_ONGOING,
        ray_actor_options={"num_cpus": 1},
    )


async def _inspect_all(work: SideInput, handle: Any) -> SideResult:
    """Send every image at once; give up those that have not ended at the limit."""
    ready: set[int] = set()
    while len(ready) < work.executors:
        ready.add(await handle.replica.remote())
    began_s = time.monotonic()
    waits_s, latencies_s = list[float](), list[float]()
    newest: dict[int, ReplicaAnswer] = {}

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
        loads=sum(reply.loads for reply in newest.values()),
        loaded_bytes=sum(reply.loaded_bytes for reply in newest.values()),
        waits_s=tuple(waits_s),
        latencies_s=tuple(latencies_s),
    )
