"""A control socket that tells what a test wants told: for states of a daemon that no test can bring about here."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import zmq

from daemon.wire.control import ControlServer
from tests.daemon.dashboard.web import Web

#: Pages keep an answer for half a second.
_KEPT_S = 0.6
STATUS: Mapping[str, Any] = {
    "version": "0.1.0",
    "uptime_s": 7300.0,
    "state": "ready",
    "accepted": 10,
    "completed": 10,
    "backlog": 3,
    "images_per_s": 1.5,
    "policy": "coserve-plus",
    "rules_version": "0123456789ab",
    "expert_switches": 0,
    "last_seq": 10,
    "last_error": None,
    "executors": [],
    "pools": [],
    "children": [],
    "consumers": [],
}


@contextmanager
def telling(web: Web, **answers: Any) -> Iterator[None]:
    """A daemon's control socket for `web` that answers each kind of question with what is given."""
    (web.folder / "run").mkdir(exist_ok=True)
    context: zmq.Context[Any] = zmq.Context()
    given = {"status": STATUS, "experts": {"experts": []}, "memory": {"pools": []}, "queues": {"running": []}} | answers
    handlers = {kind: lambda _fields, answer=answer: answer for kind, answer in given.items()}
    server = ControlServer(context, f"ipc://{web.folder}/run/control.sock", handlers)
    server.start()
    time.sleep(_KEPT_S)
    try:
        yield
    finally:
        server.stop()
        context.destroy(linger=0)


def an_expert(name: str, **more: Any) -> dict[str, Any]:
    """A row of control's `experts`."""
    known = {"expert": name, "version": "abcdefabcdef", "architecture": "resnet18", "task": "classify"}
    places: dict[str, Any] = {"resident": [], "loading": [], "pinned": []}
    return {**known, "bytes": 44_720_128, "usage": 0.1, **places, "queued": 0, "failed": None, **more}
