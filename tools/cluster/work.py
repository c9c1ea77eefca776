"""Join a cluster and have its workers do tasks. Ray sends each to a free process, and to another if that one dies.

Answers are kept on this PC until all have come: a command that is started again asks only for the missing ones.
"""

import hashlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from daemon.cluster.joining import cluster_problems, join, last_line, ray_environment, unreachable
from experts.durable import replace_durably
from tools.cluster.carry_out import carry_out, work_version
from tools.terminal.console import CommandError
from tools.terminal.open_line import settings_of

#: Tasks that are given to Ray at once, for each process that workers offer.
_AHEAD = 3
_ANSWERS = Path("~/.cache/coserve/long-work")
_WITHOUT_CLUSTER = "without --cluster this PC does the work alone"


class Task(NamedTuple):
    """Work for one process, as `carry_out` takes it; `weights` are files that many tasks need, by their path there."""

    kind: str
    values: dict[str, Any]
    contents: dict[str, bytes]
    weights: dict[str, Path]


@contextmanager
def work_on(config: Path, *, use_cluster: bool) -> "Iterator[LongWork | None]":
    """Yield a connection to the cluster of a coserve.yaml, None without `use_cluster`. Raises CommandError."""
    if not use_cluster:
        yield None
        return
    settings = settings_of(config)
    address = settings.cluster.address
    if address is None:
        raise CommandError(f"{config} has no `cluster: {{address: …}}`; {_WITHOUT_CLUSTER}", status=2)
    if problem := "\n".join(cluster_problems(settings)) or unreachable(address):
        raise CommandError(f"{problem}; {_WITHOUT_CLUSTER}")
    os.environ.update(ray_environment(settings.cluster.token))
    import ray

    try:
        join(ray, address)
    except Exception as error:
        raise CommandError(
            f"the cluster at {address} cannot be joined: {last_line(error)}; {_WITHOUT_CLUSTER}"
        ) from error
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler writes a page of addresses
    with redirect_stdout(sys.stderr):  # Ray prints lost PCs to stdout, where the command prints its JSON
        try:
            if not ray.cluster_resources().get("CPU"):
                raise CommandError(
                    f"no worker at {address} offers a process: start one with --cpus 1 or more; {_WITHOUT_CLUSTER}"
                )
            if ray.available_resources().get("CPU", 0) < 1:
                print(f"all processes of the workers at {address} are busy with other work: waiting for a free one")
            yield LongWork(ray)
        finally:
            ray.shutdown()


class LongWork:
    """A cluster that this process has joined."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._run = ray.remote(num_cpus=1, max_retries=3)(carry_out)
        self._sent: dict[Path, tuple[str, Any]] = {}

    def answers(self, tasks: Iterable[Task]) -> Iterator[dict[str, Any]]:
        """Yield the answer of each task, in order: its values, or an `error`. Raises CommandError, OSError."""
        kept: list[Path] = []
        begun: deque[tuple[Path, Any]] = deque()
        for task in tasks:
            kept.append(_ANSWERS.expanduser() / _key(task))
            begun.append((kept[-1], None if kept[-1].exists() else self._begin(task)))
            while len(begun) >= _AHEAD * max(1, self._ray.cluster_resources().get("CPU", 0)):
                yield self._end(*begun.popleft())
        while begun:
            yield self._end(*begun.popleft())
        for file in kept:
            file.unlink(missing_ok=True)

    def _begin(self, task: Task) -> Any:
        for path in task.weights.values():
            if path not in self._sent:
                content = path.read_bytes()
                self._sent[path] = hashlib.sha256(content).hexdigest(), self._ray.put(content)
        weights = {name: self._sent[path] for name, path in task.weights.items()}
        return self._run.remote(work_version(), task.kind, json.dumps(task.values), task.contents, weights)

    def _end(self, kept: Path, begun: Any) -> dict[str, Any]:
        """Return an answer; keep it on disk unless it is an error, which may be mended before the next run."""
        if begun is None:
            return json.loads(kept.read_text(encoding="utf-8"))
        try:
            text = self._ray.get(begun)
        except self._ray.exceptions.RayTaskError as error:
            version = f"each worker needs CoServe {work_version()}, as here"
            raise CommandError(f"a worker failed: {last_line(error)}; {version}") from error
        except self._ray.exceptions.RayError as error:
            return {"error": f"each process that tried it has ended, perhaps for lack of memory: {last_line(error)}"}
        answer = json.loads(text)
        if refused := answer.get("refused"):
            raise CommandError(refused)
        if "error" not in answer:
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_durably(kept, text, 0o600)
        return answer


def _key(task: Task) -> str:
    """Return a digest of everything that an answer depends on; the values include the sha256 of weights."""
    digest = hashlib.sha256(json.dumps([work_version(), task.kind, task.values, [*task.contents]]).encode())
    for content in task.contents.values():
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()
