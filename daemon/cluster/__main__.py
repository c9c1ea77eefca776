"""`python -m daemon.cluster CONFIG SOCKET --heart FD`: the Ray driver of a line, as a process that the daemon keeps.

It keeps one actor going for each device of another PC. Ray ends this process together with its own on this PC.
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from daemon.cluster.joining import join, last_line, ray_environment, resource_of, unreachable
from daemon.cluster.messages import code_version, receive, send
from daemon.cluster.worker import DeviceWorker
from daemon.config.settings import load_config
from daemon.errors import MissingExtraError, StartError
from daemon.host.children import live_with_parent

#: A worker that has not answered for this long is lost: its PC is off, cut off or frozen.
_SILENT_S = 15.0
#: How long a worker may take to import torch and open its device.
_OPEN_WITHIN_S = 300.0
_PING_EVERY_S = 1.0
_RETRY_S = 1.0
_CHUNK_BYTES = 4 << 20
#: Parts of a file that are sent at the same time.
_WINDOW = 4
#: Hung batches that may still hold a thread, beside one batch of each executor (watch.py).
_MAX_HUNG = 4
#: The worker's methods that the daemon calls (remote_devices.py).
_ORDERS = frozenset({"run", "load", "prefetch", "unload", "resize"})


def relay(line: socket.socket, ray: Any) -> None:
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    devices: dict[str, RelayedDevice] = {}

    def answer() -> None:
        while True:
            send(line, answers.get())

    def listen() -> None:
        stream = line.makefile("rb")
        while (message := receive(stream)) is not None:
            head, body = message
            if head["do"] == "open":
                device = devices[head["device"]] = RelayedDevice(head["device"], head["about"], ray, answers.put)
                _start_thread(device.keep)
            else:
                devices[head["device"]].carry_out(head, body)
        os._exit(0)  # the daemon has ended

    _start_thread(answer)
    _start_thread(listen)


class RelayedDevice:
    """One device of another PC and its actor, which is replaced when lost."""

    def __init__(self, name: str, about: dict[str, Any], ray: Any, say: Callable[[dict[str, Any]], None]) -> None:
        self._name = name
        self._about = about
        self._ray = ray
        self._say = say
        self._actor: Any = None
        self._life = ""
        self._lost = threading.Event()
        self._hangs = False
        self._sending = threading.Lock()
        self._calls = ThreadPoolExecutor(len(about["executors"]) + 3 * _MAX_HUNG, thread_name_prefix=f"calls {name}")

    # Its actor

    def keep(self) -> None:
        """Start the actor, and another whenever it is lost. Never returns."""
        while True:
            self._lost.clear()
            self._hangs = False
            reason = f"its worker on {self._about['host']} has ended"
            try:
                self._start()
                while not self._lost.wait(_PING_EVERY_S):
                    self._ray.get(self._actor.ping.options(concurrency_group="ping").remote(), timeout=_SILENT_S)
                if self._hangs:
                    reason = f"a batch did not end in time, so its worker on {self._about['host']} is started again"
            except self._ray.exceptions.GetTimeoutError:
                reason = f"its worker on {self._about['host']} has not answered for {_SILENT_S:g} s"
            except self._ray.exceptions.RayActorError as error:
                if "creation task" in str(error):  # Ray cannot load our class there, so nothing can say its version
                    host, ours = self._about["host"], code_version()
                    reason = (
                        f"{host} does not have this line's version of CoServe, {ours}, or not all of it"
                        f" ({last_line(error)}): install the same on both"
                    )
            except Exception as error:  # noqa: BLE001  reported and tried again
                reason = _text(error)
            self._life = ""
            self._say({"say": "lost", "device": self._name, "reason": reason})
            with suppress(Exception):
                self._ray.kill(self._actor)
            time.sleep(_RETRY_S)

    def _start(self) -> None:
        groups = {"ping": 1, "files": 1, "loads": 1, "batches": len(self._about["executors"]) + _MAX_HUNG}
        host = self._about["host"]
        actor_class = self._ray.remote(concurrency_groups=groups)(DeviceWorker)
        self._actor = actor_class.options(num_cpus=0, resources={resource_of(host): 0.001}, max_restarts=0).remote()
        hello = self._actor.hello.remote()
        while not self._ray.wait([hello], timeout=5.0)[0]:
            has_joined = resource_of(host) in self._ray.cluster_resources()
            reason = f"no worker {host} has joined yet: run coserve worker --name {host} on that PC"
            reason = f"its worker on {host} is starting" if has_joined else reason
            self._say({"say": "lost", "device": self._name, "reason": reason})
        theirs, ours = self._ray.get(hello), code_version()
        if theirs != ours:
            raise StartError(f"{host} has CoServe {theirs}, this line {ours}: install the same version on both")
        try:
            self._ray.get(self._actor.open.remote(json.dumps(self._about)), timeout=_OPEN_WITHIN_S)
        except self._ray.exceptions.GetTimeoutError:
            raise StartError(f"its worker on {host} has not opened its device within {_OPEN_WITHIN_S:g} s") from None
        self._life = uuid.uuid4().hex
        self._say({"say": "found", "device": self._name, "life": self._life})

    # Orders of the daemon

    def carry_out(self, head: dict[str, Any], body: bytes) -> None:
        """Call the worker's method; drop an order for an earlier life of the device, which was reported as lost."""
        if head["life"] != self._life:
            return
        if head["do"] == "give_up":  # only a new process frees what the hung thread holds of the device
            self._hangs = True
            self._lost.set()
            return
        if head["do"] not in _ORDERS:
            raise ValueError(f"an unknown order: {head['do']}")
        actor, group = self._actor, "batches" if head["do"] == "run" else "loads"
        method = getattr(actor, head["do"]).options(concurrency_group=group)

        def call() -> Any:
            return method.remote(*head["arguments"], *([body] if body else []))

        if "call" in head:
            self._calls.submit(self._answer, actor, head, call(), call)
        else:
            call()

    def _answer(self, actor: Any, head: dict[str, Any], first: Any, again: Callable[[], Any]) -> None:
        """Pass on the answer; if weights are missing, send them and pass on the answer of `again`."""
        try:
            answer = json.loads(self._ray.get(first))
            if "missing" in answer:
                with self._sending:  # another order may have sent them in the meantime
                    answer = json.loads(self._ray.get(again()))
                    if missing := answer.get("missing"):
                        sent = (self._send_file(actor, digest, Path(head["files"][digest])) for digest in missing)
                        answer = next(filter(None, sent), None) or json.loads(self._ray.get(again()))
            if "missing" in answer:
                message = "the weights left the worker's cache before they were read: raise its --cache-size"
                answer = {"error": message, "is_device_error": True}
        except Exception as error:  # noqa: BLE001  one order failed, and the daemon must learn that it is over
            of_ray = self._ray.exceptions
            if isinstance(error, of_ray.RayError) and not isinstance(error, of_ray.RayTaskError):
                if head["life"] == self._life:
                    self._lost.set()
                return  # its process has ended, perhaps for lack of memory (no RayActorError): `lost` ends the order
            answer = {"error": _text(error), "is_device_error": isinstance(error, of_ray.RayError)}
        answer = answer if isinstance(answer, dict) else {"error": f"its worker sent {answer!r:.80}"}
        self._say(answer | {"say": "answer", "device": self._name, "call": head["call"]})

    def _send_file(self, actor: Any, digest: str, path: Path) -> dict[str, Any] | None:
        take = actor.take.options(concurrency_group="files")
        pending: list[Any] = []
        with path.open("rb") as file:
            size, offset = os.fstat(file.fileno()).st_size, 0
            while chunk := file.read(min(_CHUNK_BYTES, size - offset)):
                pending.append(take.remote(digest, size, offset, chunk))
                offset += len(chunk)
                if len(pending) >= _WINDOW or offset == size:
                    for refusal in self._ray.get(pending):
                        if refusal:
                            return json.loads(refusal)
                    pending.clear()
        if offset == 0 or offset < size:
            raise OSError(f"{path} has only {offset} bytes: restore the weights file")
        return None


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, StartError) else last_line(error)


def _start_thread(target: Callable[[], None]) -> None:
    """End the process if `target` fails: the daemon starts another."""

    def run() -> None:
        try:
            target()
        except BaseException as error:  # noqa: BLE001
            sys.stderr.write(f"cluster: {type(error).__name__}: {error}\n")
            os._exit(1)

    threading.Thread(target=run, daemon=True).start()


def connect(address: str, control: socket.socket, beat: Callable[[], None]) -> None:
    ours, theirs = socket.socketpair()
    socket.send_fds(control, [b"line"], [theirs.fileno()])
    theirs.close()
    while problem := unreachable(address):
        beat()
        send(ours, {"say": "lost", "reason": problem})
        time.sleep(_RETRY_S)
    try:
        import ray  # noqa: PLC0415  an extra, imported once the cluster can be reached

        join(ray, address)
    except Exception as error:  # noqa: BLE001
        is_missing = isinstance(error, ImportError)
        hint = ": compare cluster.token with the head's" if isinstance(error, ConnectionError) else ""
        reason = f"the cluster at {address} cannot be joined: {_text(error)}{hint}"
        reason = str(MissingExtraError("ray", "a cluster", "cluster")) if is_missing else reason
        send(ours, {"say": "lost", "reason": reason})
        raise SystemExit(1) from None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler writes a page of addresses
    relay(ours, ray)


def main() -> None:
    live_with_parent()
    config, fd, _, heart = sys.argv[1:]
    settings = load_config(Path(config)).cluster
    if settings.address is None:
        raise SystemExit(f"{config}: expected `cluster.address`, the HOST:PORT of the cluster's head")
    os.environ.update(ray_environment(settings.token))

    def beat() -> None:
        os.eventfd_write(int(heart), 1)

    connect(settings.address, socket.socket(fileno=int(fd)), beat)
    while True:
        beat()
        time.sleep(1.0)


if __name__ == "__main__":
    main()
