"""The other PC's side: one Ray actor with pools and executors, and a cache of weights.

It makes no decisions: a line that loses it starts another. Arguments and answers are texts and bytes.
"""

import json
import os
import queue
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from daemon.cluster.messages import batch_of, code_version, plain_report, spec_of
from daemon.dispatch.pool import Batch, Fault
from daemon.errors import is_device_error
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId, device_of
from daemon.records import JournalKey
from daemon.units import size_text
from experts.catalog import is_digest
from experts.errors import ExpertError
from experts.spec import ExpertId
from experts.weights import file_sha256


class CacheError(Exception):
    """A refused weights file, and why. `is_altered`: its bytes do not match its digest."""

    def __init__(self, message: str, *, is_altered: bool = False) -> None:
        self.is_altered = is_altered
        super().__init__(message)


class ExpertCache:
    """A folder of at most `max_bytes`, for any process. A file's modification time is its last use."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return the digests without a file; the others count as used now."""
        missing: list[str] = []
        for digest in dict.fromkeys(digests):
            try:
                os.utime(self._path(digest))
            except FileNotFoundError:
                missing.append(digest)
        return missing

    def take(self, digest: str, size: int, offset: int, chunk: bytes) -> None:
        """Append to a file of `size` bytes, and verify it after the last part. Raises CacheError."""
        path = self._path(digest)
        part = path.with_name(f"{digest}.{os.getpid()}.part")
        if size > self._max_bytes:
            limit = size_text(self._max_bytes)
            raise CacheError(f"{digest[:12]} needs {size_text(size)}, and the cache holds {limit}: raise --cache-size")
        with self._lock:
            if offset == 0:
                part.unlink(missing_ok=True)
                self._free_space(size)
            with part.open("ab") as file:
                is_next = file.tell() == offset and offset + len(chunk) <= size
                if is_next:
                    file.write(chunk)
            if is_next and offset + len(chunk) < size:
                return
            arrived = file_sha256(part) if is_next else ""
            if arrived == digest:
                part.replace(path)
                return
            part.unlink()
            if not is_next:
                raise CacheError(f"{digest[:12]} came in the wrong order")
            message = f"the bytes that arrived are {arrived[:12]}, not {digest[:12]}: restore the weights file"
            raise CacheError(message, is_altered=True)

    def drop_altered(self, digests: Iterable[str]) -> list[str]:
        """Delete files that no longer match their digest (power cut, bad disk); return the missing digests."""
        digests = list(dict.fromkeys(digests))
        for digest in digests:
            with suppress(OSError):
                if file_sha256(self._path(digest)) != digest:
                    self._path(digest).unlink()
        return self.missing(digests)

    def _path(self, digest: str) -> Path:
        if not is_digest(digest):
            raise CacheError(f"{digest[:80]!r} is not a sha256")
        return self.folder / digest

    def _free_space(self, size: int) -> None:
        states: list[tuple[Path, os.stat_result]] = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # another process has put it in its place, or deleted it
                if path.is_file() and not _is_being_written(path):
                    states.append((path, path.stat()))
        states.sort(key=lambda each: (each[0].suffix != ".part", each[1].st_mtime))
        used = sum(state.st_size for _, state in states)
        for path, state in states:
            if used + size <= self._max_bytes and path.suffix != ".part":
                return
            path.unlink(missing_ok=True)
            used -= state.st_size


def _is_being_written(path: Path) -> bool:
    return path.suffix == ".part" and Path("/proc", path.suffixes[0][1:]).exists()


#: Environment variables with cache folder and bytes of `coserve worker`; they pass through Ray's processes to this one.
CACHE, CACHE_SIZE = "COSERVE_WORKER_CACHE", "COSERVE_WORKER_CACHE_SIZE"


class DeviceWorker:
    def hello(self) -> str:
        return code_version()

    def open(self, about: str) -> None:
        """Make the pools and executors that `about` describes (RemoteDevice.about). Imports torch."""
        from daemon.config.settings import Device  # noqa: PLC0415
        from daemon.dispatch.torch_devices import TorchDevices  # noqa: PLC0415

        of_device = json.loads(about)
        name = of_device["device"]
        self._cache = ExpertCache(Path(os.environ[CACHE]), int(os.environ[CACHE_SIZE]))
        own = {pool: PoolId(pool.replace(device_of(PoolId(pool)), name, 1)) for pool in of_device["pools"]}
        self._payloads: dict[JournalKey, bytes] = {}
        pools = TorchDevices({name: Device(**of_device["settings"])}).pools(
            [PoolFacts(own[pool], "cpu", budget_bytes, 1) for pool, budget_bytes in of_device["pools"].items()],
            [ExecutorFacts(ExecutorId(name), own[pool]) for name, pool in of_device["executors"].items()],
            self._payloads.__getitem__,
            lambda: lambda _key: None,
            of_device["max_pixels"],
        )
        self._pools = dict(zip(own, pools, strict=True))
        self._pool_of = {executor: self._pools[pool] for executor, pool in of_device["executors"].items()}
        for pool in pools:
            pool.start()

    def ping(self) -> None:
        """Show that this process is alive."""

    def take(self, digest: str, size: int, offset: int, chunk: bytes) -> str:
        """Add a part of a weights file; return "", or an `error` as JSON: this PC's, or that the file is altered."""
        try:
            self._cache.take(digest, size, offset, chunk)
        except (CacheError, OSError) as error:
            is_altered = isinstance(error, CacheError) and error.is_altered
            message = f"the weights did not reach the worker: {error}"
            return json.dumps({"error": message, "is_device_error": not is_altered})
        return ""

    def prefetch(self, replaced: str) -> str:
        wanted = [new for new, old in json.loads(replaced).items() if not self._cache.missing([old])]
        missing = self._cache.missing(wanted)
        return json.dumps({"missing": missing} if missing else {})

    def load(self, pool: str, expert: str) -> str:
        """Load an expert; return `missing` digests, an `error`, or the `bytes` read."""
        spec = spec_of(json.loads(expert), self._cache.folder)
        if missing := self._cache.missing([spec.sha256]):
            return json.dumps({"missing": missing})
        try:
            done = self._pools[pool].slots.load(spec)
        except ExpertError as error:
            if missing := self._cache.drop_altered([spec.sha256]):
                return json.dumps({"missing": missing})
            cause = error.__cause__ or error
            return json.dumps({"error": error.message, "is_device_error": is_device_error(cause)})
        return json.dumps({"bytes": done.bytes})

    def unload(self, pool: str, expert: str) -> None:
        """Unload an expert, unless it went with an earlier life of the device."""
        with suppress(ExpertError):
            self._pools[pool].slots.unload(ExpertId(expert))

    def resize(self, pool: str, budget_bytes: int) -> None:
        self._pools[pool].slots.resize(budget_bytes)

    def run(self, executor: str, batch_bytes: int, body: bytes) -> str:
        """Run a batch (`batch_of`); return `missing` digests of heads, or its `report`."""
        batch, payloads = batch_of(body, batch_bytes, ExecutorId(executor), self._cache.folder)
        heads = [head.sha256 for head in batch.heads if head is not None]
        if missing := self._cache.missing(heads):
            return json.dumps({"missing": missing})
        ended: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self._payloads |= payloads
        try:
            self._pool_of[executor].run(batch, ended.put)
            ended.get()
            has_failed = any(isinstance(each, Fault) and each.kind == "expert_failed" for each in batch.answers)
            if has_failed and (missing := self._cache.drop_altered(heads)):
                return json.dumps({"missing": missing})
            return json.dumps({"report": plain_report(batch)})
        finally:
            for key in payloads:
                self._payloads.pop(key, None)
