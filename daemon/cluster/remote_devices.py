"""The daemon's side of devices on other PCs. Nothing here decides.

Running orders of a lost device are reported at once as errors of that device, so that the drive gives their images to
others; later answers are dropped. A lost device comes back empty, and the drive is told of the loss before the return.
"""

import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from daemon.cluster.messages import checked_report, packed_order, plain_spec, receive, send
from daemon.config.settings import Config, Device
from daemon.dispatch.drive import Drive
from daemon.dispatch.orders import BatchOrder, BatchReport, Devices, Executor, Fault, ImageOrder, Pool, Unanswered
from daemon.errors import DeviceLostError
from daemon.host.children import ChildSpec
from daemon.host.worker import Worker
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId, RequestId, device_of
from daemon.records import JournalKey
from daemon.storage.journal import JournalError
from experts.errors import ExpertError
from experts.spec import ExpertId, ExpertSpec, LoadReport

_NOT_YET = "its worker is not connected yet"
#: How long a reload, and a status request behind it, waits for new versions; sending goes on after that.
_PREFETCH_S = 10.0
#: Bytes of images in one message; Ray keeps a large one in its object store, and the process refuses huge ones.
_MAX_PART_BYTES = 128 << 20

#: Called with the answer to an order, or None if its device is lost.
OnAnswer = Callable[[dict[str, Any] | None], None]
#: Messages to send over one connection, each a head and a body; None ends its sender.
_Outbox = queue.SimpleQueue[tuple[dict[str, Any], tuple[bytes, ...]] | None]


class RemoteDevice:
    """One device of another PC: its running orders, and the messages to it. Any thread."""

    def __init__(self, name: str, settings: Device, max_pixels: int, post: Callable[..., None]) -> None:
        self.name = name
        self._settings = settings
        self._max_pixels = max_pixels
        self._post = post
        #: Filled before the start: the budget of each pool, and the pool of each executor.
        self.pools: dict[PoolId, int] = {}
        self.executors: dict[ExecutorId, PoolId] = {}
        #: The budgets of pools that were resized since the start: each new worker starts with those of `pools`.
        self._resized: dict[PoolId, int] = {}
        self._calls: dict[int, OnAnswer] = {}
        self._last_call = 0
        self._lock = threading.Lock()
        #: Identifies the worker that has the device now: orders for an earlier life are lost. None while it is gone.
        self.life: str | None = None
        self._is_used = False
        self.problem: str | None = _NOT_YET

    def about(self) -> dict[str, Any]:
        names = ("executors", "threads", "activation_memory")
        settings = {name: getattr(self._settings, name) for name in names} | {"expert_memory": 1}
        facts = {"device": self._settings.processor, "settings": settings, "max_pixels": self._max_pixels}
        return facts | {"host": self._settings.worker, "pools": self.pools, "executors": self.executors}

    def call(self, life: str | None, on_answer: OnAnswer, head: dict[str, Any], *body: bytes) -> None:
        """Send an order; `on_answer` gets None if the device is lost, now or since `life`."""
        with self._lock:
            is_used = self._is_used and life is not None and life == self.life
            self._last_call += 1
            number = self._last_call
            if is_used:
                self._calls[number] = on_answer
        if not is_used:
            on_answer(None)
            return
        with suppress(OSError):  # the connection is gone: its reader notes that, and ends the call
            self._post(head | {"device": self.name, "life": life, "call": number}, body)

    def tell(self, head: dict[str, Any]) -> None:
        """Send an order that needs no answer; a lost device has nothing left to change."""
        if self._is_used:
            with suppress(OSError):
                self._post(head | {"device": self.name, "life": self.life})

    def answered(self, message: dict[str, Any]) -> None:
        with self._lock:
            call = self._calls.pop(message["call"], None)
        if call is not None:
            call(message)

    def lost(self, reason: str, drive: Drive) -> None:
        with self._lock:
            was_there = self.life is not None
            is_news = was_there or self.problem != reason
            self.life, self._is_used = None, False
            self.problem = reason
            calls, self._calls = self._calls, {}
        for call in calls.values():
            call(None)
        if is_news:
            drive.device_lost(self.name, reason, was_there=was_there)

    def found(self, life: str, drive: Drive) -> None:
        """Mark its worker as ready and empty; orders follow once the drive has handled that."""
        with self._lock:
            self.life = life
        drive.device_back(self.name, lambda: self._resume(life))

    def _resume(self, life: str) -> None:
        with self._lock:
            if life == self.life:
                self._is_used, self.problem = True, None
        for pool, budget_bytes in self._resized.items():
            self.resize(pool, budget_bytes)

    def resize(self, pool: PoolId, budget_bytes: int) -> None:
        self._resized[pool] = budget_bytes
        self.tell({"do": "resize", "pool": pool, "bytes": budget_bytes})

    def error(self) -> DeviceLostError:
        host = self._settings.worker
        return DeviceLostError(f"{self.name} on {host}: {self.problem or 'its worker was lost and has started again'}")


class RemotePool:
    """Expert memory of another PC's device: `load` blocks; other orders do not, and keep their order."""

    def __init__(self, facts: PoolFacts, device: RemoteDevice) -> None:
        self.device = device.name
        self.budget_bytes = facts.budget_bytes
        self._pool = facts.pool
        self._remote = device

    def load(self, spec: ExpertSpec, evict: tuple[ExpertId, ...] = (), source: Any = None) -> LoadReport:  # noqa: ARG002
        """Raises ExpertError, caused by DeviceLostError if the device is lost meanwhile.

        The report's time includes sending the weights.
        """
        for expert in evict:
            self.unload(expert)
        answer: Future[dict[str, Any] | None] = Future()
        began_s = time.monotonic()
        order = {"do": "load", "pool": self._pool, "files": {spec.sha256: str(spec.file)}, "spec": plain_spec(spec)}
        self._remote.call(self._remote.life, answer.set_result, order)
        done = answer.result()
        if done is None:
            lost = self._remote.error()
            raise ExpertError(spec.expert, str(lost)) from lost
        size = done.get("bytes")
        if "error" in done or not isinstance(size, int) or size < 0:
            message = str(done.get("error", f"its worker sent {size!r:.80} as the bytes that it loaded"))
            cause = DeviceLostError(message) if done.get("is_device_error", "error" not in done) else None
            raise ExpertError(spec.expert, message, spec.file) from cause
        return LoadReport(size, (time.monotonic() - began_s) * 1000.0)

    def unload(self, expert: ExpertId) -> None:
        self._remote.tell({"do": "unload", "pool": self._pool, "expert": expert})

    def resize(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._remote.resize(self._pool, budget_bytes)


class _UnsentBatch(NamedTuple):
    """A batch with its unsent images, and the report about the others."""

    order: BatchOrder
    life: str | None
    started_s: float
    images: tuple[ImageOrder, ...]
    done: BatchReport | None = None


def _first_part(images: tuple[ImageOrder, ...]) -> tuple[ImageOrder, ...]:
    sizes = accumulate(image.key.length for image in images)
    return images[: max(1, sum(size <= _MAX_PART_BYTES for size in sizes))]


def _join_reports(first: BatchReport, then: BatchReport) -> BatchReport:
    limits = [report.memory_limit for report in (first, then) if report.memory_limit is not None]
    results, infer_ms = first.results + then.results, first.infer_ms + then.infer_ms
    return replace(then, results=results, infer_ms=infer_ms, memory_limit=min(limits, default=None))


class RemoteExecutor:
    """One stream of batches on another PC's device. A thread reads the images' bytes and sends them."""

    def __init__(self, facts: ExecutorFacts, device: RemoteDevice, read: Callable[[JournalKey], bytes]) -> None:
        self.facts = facts
        self._device = device
        self._read = read
        self._worker: Worker[_UnsentBatch] = Worker(f"executor {facts.executor}", self._send)
        self._report: Callable[[BatchReport], None] = lambda _report: None

    def start(self, report: Callable[[BatchReport], None]) -> None:
        self._report = report
        self._worker.start()

    def submit(self, order: BatchOrder) -> None:
        self._worker.put(_UnsentBatch(order, self._device.life, time.monotonic(), order.images))

    def give_up(self) -> RequestId | None:
        """Restart the worker, and return None: which image hangs is unknown here."""
        self._device.tell({"do": "give_up"})
        self._worker = self._worker.successor()
        return None

    def stop(self, timeout_s: float) -> bool:
        return self._worker.stop(timeout_s)

    def _send(self, unsent: _UnsentBatch) -> None:
        part, faults = replace(unsent.order, images=_first_part(unsent.images)), dict[int, Unanswered]()
        try:
            payloads = self._payloads(part, faults)
            packed = packed_order(part, tuple(payloads), [*map(len, payloads.values())])
        except Exception as error:  # noqa: BLE001  the drive must learn that this batch is over
            failure = {"error": f"{type(error).__name__}: {error}", "is_device_error": True}
            self._go_on(unsent, self._report_of(part, unsent.started_s, failure, {}))
            return
        files = {image.head.sha256: str(image.head.file) for image in part.images if image.head is not None}
        head = {"do": "run", "executor": self.facts.executor, "files": files, "order_bytes": len(packed)}

        def on_answer(answer: dict[str, Any] | None) -> None:
            self._go_on(unsent, self._report_of(part, unsent.started_s, answer, faults))

        self._device.call(unsent.life, on_answer, head, packed, *payloads.values())

    def _go_on(self, unsent: _UnsentBatch, part: BatchReport) -> None:
        rest = unsent.images[len(part.results) :]
        if unsent.done is not None:
            part = _join_reports(unsent.done, part)
        if rest and part.device_error is None:
            self._worker.put(unsent._replace(images=rest, done=part))
        else:
            lost = (Unanswered("expert_failed", part.device_error or ""),) * len(rest)
            self._report(replace(part, results=part.results + lost))

    def _payloads(self, order: BatchOrder, faults: dict[int, Unanswered]) -> dict[int, bytes]:
        payloads: dict[int, bytes] = {}
        for number, image in enumerate(order.images):
            try:
                payloads[number] = self._read(image.key)
            except JournalError as error:
                fault: Fault = "unreadable" if isinstance(error.__cause__, OSError) else "bad_image"
                faults[number] = Unanswered(fault, str(error))
        return payloads

    def _report_of(
        self, order: BatchOrder, started_s: float, answer: dict[str, Any] | None, faults: dict[int, Unanswered]
    ) -> BatchReport:
        name, times_s = self.facts.executor, (started_s, time.monotonic())
        reason = error = str(self._device.error()) if answer is None else None
        if answer is not None and answer.get("is_device_error"):
            reason = error = str(answer.get("error"))
        elif answer is not None and "report" in answer:
            experts = [image.head or order.spec for n, image in enumerate(order.images) if n not in faults]
            try:
                report = checked_report(answer["report"], experts)
            except ValueError as mistake:
                reason = error = f"its worker sent no report: {' '.join(str(mistake).split())[:300]}"
            else:
                results = iter(report.results)
                whole = tuple(faults.get(number) or next(results) for number in range(len(order.images)))
                outcome = report.infer_ms, report.memory_limit, report.device_error
                return BatchReport(name, order.batch_id, whole, *times_s, *outcome)
        lost = (Unanswered("expert_failed", reason or (answer or {}).get("error", "no answer")),) * len(order.images)
        return BatchReport(name, order.batch_id, lost, *times_s, 0.0, None, error, is_lost=answer is None)


class ClusterDevices:
    """`Devices` (orders.py) of this PC and of others, and the connection to the Ray driver."""

    def __init__(self, path: Path, config: Config, own: Devices) -> None:
        self._path = path
        self._own = own
        limit = config.limits.max_pixels
        self._remote = {
            name: RemoteDevice(name, settings, limit, self._post)
            for name, settings in config.devices.items()
            if settings.host is not None
        }
        # The process sends its end of a connection through this pair: both ends stay open here, for the next one.
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        #: The messages of the present connection: the drive's thread posts too, and must not wait for a slow reader.
        self._outbox: _Outbox | None = None
        self._thread: threading.Thread | None = None
        self._log: Any = structlog.get_logger("cluster")

    def gpu_count(self) -> int:
        return self._own.gpu_count()

    def pool(self, facts: PoolFacts) -> Pool:
        device = self._remote.get(facts.device)
        if device is None:
            return self._own.pool(facts)
        device.pools[facts.pool] = facts.budget_bytes
        return RemotePool(facts, device)

    def executor(
        self,
        facts: ExecutorFacts,
        pool: Any,
        read: Callable[[JournalKey], bytes],
        threads: int,
        mark: Callable[[JournalKey | None], None],
        max_pixels: int,
    ) -> Executor:
        device = self._remote.get(device_of(facts.pool))
        if device is None:
            return self._own.executor(facts, pool, read, threads, mark, max_pixels)
        device.executors[facts.executor] = facts.pool
        return RemoteExecutor(facts, device, read)

    def children(self) -> list[ChildSpec]:
        fd = self._theirs.fileno()
        argv = (sys.executable, "-m", "daemon.cluster", str(self._path), str(fd))
        return [ChildSpec("cluster", argv, nice=0, pass_fds=(fd,), beats=True)]

    def start(self, drive: Drive) -> None:
        for device in self._remote.values():
            drive.device_lost(device.name, _NOT_YET, was_there=False)
        self._thread = threading.Thread(target=self._run, args=(drive,), name="cluster", daemon=True)
        self._thread.start()

    def prefetch(self, before: Mapping[ExpertId, ExpertSpec], after: Mapping[ExpertId, ExpertSpec]) -> None:
        """Send new versions in `after` to the PCs that have those of `before`; wait at most `_PREFETCH_S`."""
        files: dict[str, str] = {}
        replaced: dict[str, str] = {}
        for old, new in ((before[expert], new) for expert, new in after.items() if expert in before):
            for was, part in ((old, new), (old.backbone, new.backbone)):
                if was is not None and part is not None and was.sha256 != part.sha256:
                    files[part.sha256], replaced[part.sha256] = str(part.file), was.sha256
        answers: list[Future[dict[str, Any] | None]] = []
        for device in self._remote.values() if replaced else ():
            answers.append(Future())
            head = {"do": "prefetch", "files": files, "replaced": replaced}
            device.call(device.life, answers[-1].set_result, head)
        wait(answers, _PREFETCH_S)

    def stop(self) -> None:
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self._ours.close()
        self._theirs.close()

    def _post(self, head: dict[str, Any], body: tuple[bytes, ...] = ()) -> None:
        outbox = self._outbox
        if outbox is None:
            raise ConnectionError("the process that talks to the cluster is not running")
        outbox.put((head, body))

    def _run(self, drive: Drive) -> None:
        """Serve one connection after another: each new process opens one."""
        while (arrived := socket.recv_fds(self._ours, 16, 1))[0]:
            fds = arrived[1]
            if not fds:  # this process has no free file descriptor; the other one ends, and its successor tries again
                self._log.error("cluster_connection_refused", error="too many open files")
                continue
            line, outbox = socket.socket(fileno=fds[0]), _Outbox()
            sender = threading.Thread(target=self._send_all, args=(line, outbox), name="cluster sender", daemon=True)
            try:
                sender.start()
                self._outbox = outbox
                for device in self._remote.values():
                    self._post({"do": "open", "device": device.name, "about": device.about()})
                with line.makefile("rb") as stream:
                    while (message := receive(stream)) is not None:
                        self._take(message[0], drive)
            except Exception as error:  # noqa: BLE001  the thread lives on, for the next process
                self._log.warning("cluster_connection_lost", error=f"{type(error).__name__}: {error}")
            self._outbox = None
            line.shutdown(socket.SHUT_RDWR)  # so that the sender does not go on
            outbox.put(None)
            if sender.ident is not None:  # else there was no room for a thread
                sender.join()
            line.close()
            for device in self._remote.values():
                ended = "the process that talks to the cluster has ended; it is started again"
                device.lost(ended if device.life else device.problem or ended, drive)

    def _send_all(self, line: socket.socket, outbox: _Outbox) -> None:
        """Send what is posted to one connection; shut it down on an error, so that its reader notices."""
        try:
            while (message := outbox.get()) is not None:
                send(line, *message)
        except Exception as error:  # noqa: BLE001  the next process gets a connection and a sender of its own
            self._log.warning("cluster_message_not_sent", error=f"{type(error).__name__}: {error}")
            line.shutdown(socket.SHUT_RDWR)

    def _take(self, message: dict[str, Any], drive: Drive) -> None:
        named = message.get("device")
        for device in self._remote.values() if named is None else [self._remote[named]]:
            match message["say"]:
                case "answer":
                    device.answered(message)
                case "found":
                    device.found(message["life"], drive)
                case "lost":
                    device.lost(message["reason"], drive)
                case other:
                    raise ValueError(f"an unknown message: {other}")
