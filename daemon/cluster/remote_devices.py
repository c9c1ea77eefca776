"""The daemon's side of devices on other PCs. Nothing here decides.

Running orders of a lost device are reported at once as errors of that device, so that the drive gives their images to
others; later answers are dropped. A lost device comes back empty, and the drive is told of the loss before the return.
"""

import json
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import structlog

from daemon.cluster.messages import checked_report, packed_batch, plain_spec, receive, send
from daemon.config.settings import Config, Device
from daemon.dispatch.channels import Channels
from daemon.dispatch.drive import Drive
from daemon.dispatch.pool import Batch, Devices, Fault, Mark, Pool, Read, ThreadedPool
from daemon.errors import DeviceLostError
from daemon.host.children import ChildSpec
from daemon.policy.request import ExecutorFacts, ExecutorId, PoolFacts, PoolId
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
        self._post(head | {"device": self.name, "life": life, "call": number}, body)

    def tell(self, order: str, *arguments: str | int) -> None:
        """Send an order that needs no answer; a lost device has nothing left to change."""
        if self._is_used:
            self._post({"do": order, "arguments": arguments, "device": self.name, "life": self.life})

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
        self.tell("resize", pool, budget_bytes)

    def error(self) -> DeviceLostError:
        host = self._settings.worker
        return DeviceLostError(f"{self.name} on {host}: {self.problem or 'its worker was lost and has started again'}")


class RemoteSlots:
    """Expert memory of another PC's device: `load` blocks; other orders do not, and keep their order."""

    def __init__(self, facts: PoolFacts, device: RemoteDevice) -> None:
        self.budget_bytes = facts.budget_bytes
        self._pool, self._device = facts.pool, device

    def slot(self, expert: ExpertId) -> Any:
        raise ExpertError(expert, f"lies on another PC, in {self._pool}")

    def load(self, spec: ExpertSpec, *, source: Any = None) -> LoadReport:  # noqa: ARG002
        """Raises ExpertError, caused by DeviceLostError if the device is lost meanwhile."""
        answer: Future[dict[str, Any] | None] = Future()
        began_s = time.monotonic()
        arguments = [self._pool, json.dumps(plain_spec(spec))]
        order = {"do": "load", "arguments": arguments, "files": {spec.sha256: str(spec.file)}}
        self._device.call(self._device.life, answer.set_result, order)
        done = answer.result()
        if done is None:
            lost = self._device.error()
            raise ExpertError(spec.expert, str(lost)) from lost
        size = done.get("bytes")
        if "error" in done or not isinstance(size, int) or size < 0:
            message = str(done.get("error", f"its worker sent {size!r:.80} as the bytes that it loaded"))
            cause = DeviceLostError(message) if done.get("is_device_error", "error" not in done) else None
            raise ExpertError(spec.expert, message, spec.file) from cause
        return LoadReport(size, (time.monotonic() - began_s) * 1000.0)

    def unload(self, expert: ExpertId) -> None:
        self._device.tell("unload", self._pool, expert)

    def resize(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._device.resize(self._pool, budget_bytes)


class RemotePool(ThreadedPool):
    """Memory and executors of another PC's device. An executor's thread reads the images' bytes and sends them.

    Its loads are limited by the network, so it has channels of its own.
    """

    def __init__(self, facts: PoolFacts, executors: Sequence[ExecutorId], device: RemoteDevice, read: Read) -> None:
        super().__init__(facts.pool, executors, RemoteSlots(facts, device), Channels())
        self._device, self._read = device, read
        device.pools[facts.pool] = facts.budget_bytes
        device.executors |= dict.fromkeys(executors, facts.pool)

    def run(self, batch: Batch, done: Callable[[Batch], None]) -> None:
        life, batch.started_s = self._device.life, time.monotonic()
        self._workers[batch.executor].give_order(lambda: self._send(batch, 0, life, done))

    def abandon_batch(self, batch: Batch) -> None:
        """Restart the worker: which image hangs is unknown here."""
        self._device.tell("give_up")
        super().abandon_batch(batch)

    def _send(self, batch: Batch, first: int, life: str | None, done: Callable[[Batch], None]) -> None:
        """Send the images from `first` on that fit one message, and the others once these are answered."""
        sizes = accumulate(image.key.length for image in batch.images[first:])
        end = first + max(1, sum(size <= _MAX_PART_BYTES for size in sizes))
        payloads: dict[int, bytes] = {}

        def on_answer(answer: dict[str, Any] | None) -> None:
            self._take(batch, [*payloads], answer)
            if batch.device_error is None and end < len(batch.images):
                self._workers[batch.executor].give_order(lambda: self._send(batch, end, life, done))
                return
            if batch.device_error is not None:
                batch.answers[end:] = [Fault("expert_failed", batch.device_error)] * len(batch.answers[end:])
            batch.ended_s = time.monotonic()
            done(batch)

        try:
            for number in range(first, end):
                try:
                    payloads[number] = self._read(batch.images[number].key)
                except JournalError as error:
                    batch.answers[number] = Fault.from_unread(error)
            packed = packed_batch(batch, [*payloads], [*map(len, payloads.values())])
        except Exception as error:  # noqa: BLE001  the drive must learn that this batch is over
            payloads = dict.fromkeys(range(first, end), b"")
            on_answer({"error": f"{type(error).__name__}: {error}", "is_device_error": True})
            return
        heads = [head for number in payloads if (head := batch.heads[number]) is not None]
        files = {head.sha256: str(head.file) for head in heads}
        head = {"do": "run", "arguments": [batch.executor, len(packed)], "files": files}
        self._device.call(life, on_answer, head, packed, *payloads.values())

    def _take(self, batch: Batch, numbers: Sequence[int], answer: dict[str, Any] | None) -> None:
        """Fill in what the worker said about the images `numbers`."""
        if answer is None:
            batch.is_lost = True
            reason = batch.device_error = str(self._device.error())
        elif answer.get("is_device_error"):
            reason = batch.device_error = str(answer.get("error"))
        elif "report" not in answer:
            reason = str(answer.get("error", "no answer"))
        else:
            try:
                report = checked_report(answer["report"], [batch.expert_of(number) for number in numbers])
            except ValueError as mistake:
                reason = batch.device_error = f"its worker sent no report: {' '.join(str(mistake).split())[:300]}"
            else:
                for number, given, size in zip(numbers, report.answers, report.sizes, strict=True):
                    batch.answers[number], batch.sizes[number] = given, size
                limits = [limit for limit in (batch.memory_limit, report.memory_limit) if limit is not None]
                batch.memory_limit = min(limits, default=None)
                batch.infer_ms += report.infer_ms
                batch.device_error = report.device_error
                return
        for number in numbers:
            batch.answers[number] = Fault("expert_failed", reason)


class ClusterDevices:
    """`Devices` (pool.py) of this PC and of others, and the connection to the Ray driver."""

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

    def pools(
        self,
        facts: Sequence[PoolFacts],
        executors: Sequence[ExecutorFacts],
        read: Read,
        new_mark: Callable[[], Mark],
        max_pixels: int,
    ) -> Sequence[Pool]:
        own = [each for each in facts if each.device not in self._remote]
        remote = [
            RemotePool(each, [one.executor for one in executors if one.pool == each.pool], device, read)
            for each in facts
            if (device := self._remote.get(each.device)) is not None
        ]
        return [*self._own.pools(own, executors, read, new_mark, max_pixels), *remote]

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
            head = {"do": "prefetch", "arguments": [json.dumps(replaced)], "files": files}
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
        if outbox is not None:  # else the connection is gone: its reader notes that, and ends the calls
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
