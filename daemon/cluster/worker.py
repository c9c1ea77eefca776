"""The other PC's side: pools and executors of one device, made by the functions that a line on one PC uses.

An instance is one Ray actor. It makes no decisions and keeps only its cache of weights: a line that loses it starts
another. Arguments and answers are texts and bytes.
"""

import json
import os
import queue
from contextlib import suppress
from pathlib import Path

from daemon.cluster.expert_cache import CacheError, ExpertCache
from daemon.cluster.messages import code_version, order_of, plain_report, spec_of
from daemon.dispatch.orders import BatchReport, Unanswered
from daemon.errors import is_device_error
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId
from daemon.records import JournalKey
from experts.errors import ExpertError
from experts.spec import ExpertId

#: Environment variables with the name, cache folder and cache bytes of `coserve worker`; they pass through Ray's
#: processes to this one.
NAME, CACHE, CACHE_SIZE = "COSERVE_WORKER_NAME", "COSERVE_WORKER_CACHE", "COSERVE_WORKER_CACHE_SIZE"


class DeviceWorker:
    def hello(self) -> str:
        """Return the version of the code here."""
        return code_version()

    def open(self, about: str) -> None:
        """Make the pools and executors that `about` describes (RemoteDevice.about). Imports torch."""
        from daemon.config.settings import Device  # noqa: PLC0415
        from daemon.dispatch.torch_devices import TorchDevices  # noqa: PLC0415

        of_device = json.loads(about)
        name = of_device["device"]
        self._cache = ExpertCache(Path(os.environ[CACHE]), int(os.environ[CACHE_SIZE]))
        devices = TorchDevices({name: Device(**of_device["settings"])})
        self._pools = {
            PoolId(pool): devices.pool(PoolFacts(PoolId(name), "cpu", budget_bytes, 1))
            for pool, budget_bytes in of_device["pools"].items()
        }
        self._payloads: dict[JournalKey, bytes] = {}
        self._ends: dict[int, queue.SimpleQueue[BatchReport]] = {}
        self._executors = {
            executor: devices.executor(
                ExecutorFacts(ExecutorId(executor), PoolId(pool)),
                self._pools[PoolId(pool)],
                self._payloads.__getitem__,
                of_device["settings"]["threads"],
                lambda _key: None,
                of_device["max_pixels"],
            )
            for executor, pool in of_device["executors"].items()
        }
        for executor in self._executors.values():
            executor.start(lambda report: self._ends[report.batch_id].put(report))

    def ping(self) -> None:
        """Return at once, which shows that this process is alive."""

    def take(self, digest: str, size: int, offset: int, chunk: bytes) -> str:
        """Take a part of a weights file; return "", or an `error` as JSON: this PC's, or that the file is altered."""
        try:
            self._cache.take(digest, size, offset, chunk)
        except (CacheError, OSError) as error:
            is_altered = isinstance(error, CacheError) and error.is_altered
            message = f"the weights did not reach the worker: {error}"
            return json.dumps({"error": message, "is_device_error": not is_altered})
        return ""

    def prefetch(self, replaced: str) -> str:
        """Return the `missing` digests of new versions whose old ones are here; `replaced` has old digests by new."""
        wanted = [new for new, old in json.loads(replaced).items() if not self._cache.missing([old])]
        missing = self._cache.missing(wanted)
        return json.dumps({"missing": missing} if missing else {})

    def load(self, pool: str, expert: str) -> str:
        """Load an expert; return `missing` digests, an `error`, or the `bytes` read."""
        spec = spec_of(json.loads(expert), self._cache.folder)
        if missing := self._cache.missing([spec.sha256]):
            return json.dumps({"missing": missing})
        try:
            done = self._pools[PoolId(pool)].load(spec)
        except ExpertError as error:
            if missing := self._cache.drop_altered([spec.sha256]):
                return json.dumps({"missing": missing})
            cause = error.__cause__ or error
            return json.dumps({"error": error.message, "is_device_error": is_device_error(cause)})
        return json.dumps({"bytes": done.bytes})

    def unload(self, pool: str, expert: str) -> None:
        """Unload an expert, unless it went with an earlier life of the device."""
        with suppress(ExpertError):
            self._pools[PoolId(pool)].unload(ExpertId(expert))

    def resize(self, pool: str, budget_bytes: int) -> None:
        self._pools[PoolId(pool)].resize(budget_bytes)

    def run(self, executor: str, order_bytes: int, body: bytes) -> str:
        """Run a batch (`order_of`) to its end; return `missing` digests of heads, or its `report`."""
        order, payloads = order_of(body, order_bytes, self._cache.folder)
        heads = [image.head.sha256 for image in order.images if image.head is not None]
        if missing := self._cache.missing(heads):
            return json.dumps({"missing": missing})
        end = self._ends[order.batch_id] = queue.SimpleQueue()
        self._payloads |= payloads
        try:
            self._executors[executor].submit(order)
            report = end.get()
            has_failed = any(isinstance(each, Unanswered) and each.fault == "expert_failed" for each in report.results)
            if has_failed and (missing := self._cache.drop_altered(heads)):
                return json.dumps({"missing": missing})
            return json.dumps({"report": plain_report(report)})
        finally:
            del self._ends[order.batch_id]
            for key in payloads:
                self._payloads.pop(key, None)
