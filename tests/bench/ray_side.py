"""Ray Serve with model multiplexing: what a user would pick who wants many models on one machine.

Runs in its own environment (ray_env.py). One replica per executor, each with its share of the models that fit the
memory, as many threads as an executor has, ordinary loading through the same reader (replicas share one disk), and
handle calls, so that no HTTP is in the way. Chains are the caller's: a detector is asked when its classifier answered.
"""

import asyncio
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from daemon.storage.journal import Journal
from experts.spec import ExpertId
from experts.vision.preprocess import prepare
from tests.bench.disks import SharedDisk, reader_of
from tests.bench.job import Job, Run
from tests.bench.ordinary import OrdinaryFiles, answer
from tests.bench.stock import read_stock

#: Requests that a replica takes at once. With one, all others wait in the router, which prefers a replica that has the
#: model: half the loads per image of Ray's default of 5 on the skewed trace, and 1.4 times its images per second.
_ONGOING = 1
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_SERVE_ENABLE_TASK_EVENTS": "0",
}


@dataclass(frozen=True, slots=True)
class _Told:
    """What a replica says with an answer: who it is, when the batch began, and what it has loaded so far."""

    replica: int
    began_s: float
    loads: int
    loaded_bytes: int


@dataclass(slots=True)
class _Account:
    began_s: float
    waits_s: list[float] = field(default_factory=list[float])
    latencies_s: list[float] = field(default_factory=list[float])
    replicas: dict[int, _Told] = field(default_factory=dict[int, _Told])

    def heard(self, told: _Told) -> None:
        known = self.replicas.get(told.replica)
        if known is None or known.loads < told.loads:
            self.replicas[told.replica] = told


def run_ray(job: Job) -> Run:
    """A cluster of this one process tree, on the loopback interface only."""
    os.environ.update(_SETTINGS)
    ray: Any = import_module("ray")
    serve: Any = import_module("ray.serve")
    folder = tempfile.mkdtemp(prefix="r")  # sockets lie deep in it, and their paths may not be long
    try:
        ray.init(
            address="local",
            num_cpus=job.executors + 1,
            object_store_memory=200_000_000,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
        handle = serve.run(_inspector(serve, job).bind(), name="bench", route_prefix=None)
        account = asyncio.run(_ask_all(job, handle))
        ended_s = time.monotonic()
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    stopped = len(account.latencies_s) < len(job.trace.asks)
    seconds = ended_s - account.began_s if stopped else max(account.latencies_s)
    return Run(
        side=job.side,
        images=len(account.latencies_s),
        seconds=seconds,
        stopped=stopped,
        loads=sum(told.loads for told in account.replicas.values()),
        loaded_bytes=sum(told.loaded_bytes for told in account.replicas.values()),
        waits_s=tuple(account.waits_s),
        latencies_s=tuple(account.latencies_s),
    )


def _inspector(serve: Any, job: Job) -> Any:
    """The deployment, as its documentation shows it."""
    specs = read_stock(job.catalog)
    models_in_all = job.memory_bytes // max(spec.weights_bytes for spec in specs.values())
    share = max(1, models_in_all // job.executors)
    threads = max(1, job.threads // job.executors)
    lock = job.scratch / "disk.lock"

    class Inspector:
        """One replica: an executor with its own models."""

        def __init__(self) -> None:
            self.torch: Any = import_module("torch")
            self.files = OrdinaryFiles(SharedDisk(reader_of(job.disk), lock))
            self.loads = 0
            self.loaded_bytes = 0
            frameworks: Any = import_module("experts.vision.frameworks")
            frameworks.torchvision()
            frameworks.ultralytics()

        @serve.multiplexed(max_num_models_per_replica=share)
        async def model(self, expert: str) -> Any:
            spec = specs[ExpertId(expert)]
            self.loads += 1
            self.loaded_bytes += spec.weights_bytes
            return self.files.model(spec)

        async def ready(self) -> int:
            return os.getpid()

        async def __call__(self, payload: bytes) -> _Told:
            self.torch.set_num_threads(threads)
            expert = serve.get_multiplexed_model_id()
            model = await self.model(expert)
            began_s = time.monotonic()
            spec = specs[ExpertId(expert)]
            answer(model, spec, [prepare(payload, "image", None, spec)])
            return _Told(os.getpid(), began_s, self.loads, self.loaded_bytes)

    return serve.deployment(
        Inspector,
        name="inspector",
        num_replicas=job.executors,
        max_ongoing_requests=_ONGOING,
        ray_actor_options={"num_cpus": 1},
    )


async def _ask_all(job: Job, handle: Any) -> _Account:
    """Every image at once; those that have not ended at the limit are given up."""
    journal = Journal(job.journal)
    seen: set[int] = set()
    while len(seen) < job.executors:
        seen.add(await handle.ready.remote())
    account = _Account(time.monotonic())

    async def inspect(number: int) -> None:
        ask = job.trace.asks[number]
        payload = journal.read(job.key(ask.picture, goes_on=ask.goes_on))
        told: _Told = await handle.options(multiplexed_model_id=ask.classifier).remote(payload)
        account.heard(told)
        wait_s = told.began_s - account.began_s
        if ask.detector is not None and ask.goes_on:
            account.heard(await handle.options(multiplexed_model_id=ask.detector).remote(payload))
        account.waits_s.append(wait_s)
        account.latencies_s.append(time.monotonic() - account.began_s)

    tasks = [asyncio.create_task(inspect(number)) for number in range(len(job.trace.asks))]
    done, pending = await asyncio.wait(tasks, timeout=job.limit_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()
    return account
