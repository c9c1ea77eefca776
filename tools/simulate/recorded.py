"""A recorded live run as a machine and a task: its arrivals and chains, and its measured costs."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, validate_call

from daemon.dispatch.trace import CONTRADICTS, Makeup, TraceError, read_calls, read_makeup, trace_line
from daemon.policy.actions import Load, Run
from daemon.policy.matrix import Matrix, Performance
from daemon.policy.paper.assign import partition
from daemon.policy.presets import preset
from daemon.policy.request import RAM, ExecutorFacts, ExecutorId, PoolFacts, PoolId, Request, RequestId
from experts.spec import ArchitectureId, ExpertId
from tools.simulate.fit import fit_line
from tools.simulate.world import SimulatedMachine, Task, TaskImage, TransferChannel

#: A channel whose speed is in the loads' own measured seconds.
_AS_MEASURED = 1e15

Key = tuple[str, ArchitectureId]
_Took = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Recorded:
    """A trace's contents, put together from its calls in order.

    `answered` and `makespan_s` are the live run's own, from first arrival to last answer; `prefilled`: the initial fill
    was over when the first image came.
    """

    def __init__(self, path: Path) -> None:
        """Read a recorded trace. Raises OSError, and TraceError if the file is not a trace or holds no image."""
        self._makeup = makeup = read_makeup(path)
        self.policy, self.tuning = makeup.policy, makeup.tuning
        self.answered, self.loads, self.prefilled = 0, 0, False
        self._architectures = {facts.expert: facts.architecture for facts in makeup.experts}
        self._device_of = {facts.pool: facts.device for facts in makeup.pools}
        self._pool_of = {facts.executor: facts.pool for facts in makeup.executors}
        self._run_of = TypeAdapter(Run).validate_python
        #: When each image arrived, its deadline, and its experts so far.
        self._images: list[tuple[float, float | None, list[ExpertId]]] = []
        self._first_s: float | None = None
        self._last_s = 0.0
        self._ended = False
        self._by_request: dict[RequestId, int] = {}
        self._going_on: list[int] = []
        self._runs: dict[ExecutorId, Run] = {}
        self._batches: dict[Key, list[tuple[int, float]]] = {}
        self._reads: dict[Key, list[float]] = {}
        self._copies: dict[Key, list[float]] = {}
        for call in read_calls(path):
            with trace_line(path, call.line, CONTRADICTS):
                if call.name != "arrive":
                    self._end_batch()
                if report := getattr(self, f"on_{call.name}", None):
                    report(call.recorded.get("result"), *call.arguments)
        self._end_batch()
        first_s = self._first_s
        if first_s is None or self._last_s <= first_s:
            raise TraceError(f"{path}: no image was answered in this run: there is nothing to predict from")
        self.makespan_s = self._last_s - first_s
        self.images_per_s = self.answered / self.makespan_s
        images = tuple(
            TaskImage(arrived_s - first_s, tuple(chain), None if deadline_s is None else deadline_s - first_s)
            for arrived_s, deadline_s, chain in self._images
        )
        self.task = Task(path.name, makeup.experts, images)
        self._matrix = tuple(self._measured_rows())

    def machine(self, policy: str) -> SimulatedMachine:
        """Return the recorded machine as `policy` divides it, with the measured costs."""
        pools, executors = _whole_devices(self._makeup, self._matrix)
        new_pools, new_executors = partition(pools, executors, preset(policy))
        devices = {facts.device for facts in pools if facts.pool != RAM}
        counts = {device: sum(facts.pool == device for facts in executors) for device in devices}
        rates = [
            facts.weights_bytes / row.disk_s
            for facts in self._makeup.experts
            for row in self._matrix
            if row.architecture == facts.architecture
        ]
        # Loads take their measured seconds; the fastest rate is for the bound, which must not be too slow.
        disk, link = TransferChannel("disk", max(rates), 0.0), TransferChannel("link", _AS_MEASURED, 0.0)
        return SimulatedMachine(
            pools=new_pools,
            executors=new_executors,
            matrix=self._matrix,
            # What executors cost each other is in the measured batches already.
            concurrency={device: float(max(1, count)) for device, count in counts.items()},
            from_disk=dict.fromkeys((*devices, str(RAM)), (disk,)),
            from_ram={**dict.fromkeys(devices, (link,)), str(RAM): (TransferChannel("link back", _AS_MEASURED, 0.0),)},
            memory_bytes=sum(facts.budget_bytes for facts in pools),
            load_s={(row.device, row.architecture): (row.disk_s, row.ram_s or 0.0) for row in self._matrix},
        )

    @validate_call
    def on_arrive(self, result: str | None, request: Request, now: float) -> None:
        """Take a new image, or the next step of any image of the batch that has just ended."""
        if result is not None:
            return
        if self._first_s is None:
            self._first_s = now
        if request.step > 0 and self._going_on:
            number = self._going_on.pop(0)
            self._images[number][2].append(request.expert)
        else:
            number = len(self._images)
            self._images.append((request.arrived_s, request.deadline_s, [request.expert]))
        self._by_request[request.request_id] = number

    @validate_call
    def on_next_action(self, result: dict[str, Any], executor: ExecutorId, now: float) -> None:
        self._at(now)
        if "batch" in result:
            self._runs[executor] = self._run_of(result)

    @validate_call
    def on_expire(self, _result: Any, now: float) -> None:
        self._at(now)

    @validate_call
    def on_next_load(self, _result: Any, _pool: Any, now: float) -> None:
        self._at(now)

    @validate_call
    def on_batch_done(self, _result: Any, executor: ExecutorId, infer_s: _Took) -> None:
        run = self._runs.pop(executor)
        key = (self._device_of[self._pool_of[executor]], self._architectures[run.expert])
        self._batches.setdefault(key, []).append((len(run.batch), infer_s))
        self._going_on = [self._by_request[request.request_id] for request in run.batch]
        self._ended = True

    @validate_call
    def on_load_done(self, _result: Any, load: Load, load_s: _Took) -> None:
        self.loads += load.cause != "startup"
        if load.cause == "startup":
            self.prefilled = self._first_s is None
        if load.expert in self._architectures:
            times = self._reads if load.source is None else self._copies
            times.setdefault((self._device_of[load.pool], self._architectures[load.expert]), []).append(load_s)

    def _end_batch(self) -> None:
        """Count the images that did not continue right after their batch: they have their answer."""
        self.answered += len(self._going_on)
        self._going_on = []

    def _at(self, now: float) -> None:
        """Give a report, which carries no time, the time of the next decision."""
        if self._ended:
            self._last_s, self._ended = now, False

    def _measured_rows(self) -> Iterator[Performance]:
        rows = Matrix(self._makeup.matrix)
        for device in dict.fromkeys(device for pool, device in self._device_of.items() if pool != RAM):
            for architecture in dict.fromkeys(self._architectures.values()):
                key = (device, architecture)
                row = rows.of(device, architecture)
                batches = self._batches.get(key)
                line = fit_line(batches, (row.k_s, row.b_s)) if batches else row
                disk_s = median(self._reads[key]) if self._reads.get(key) else row.disk_s
                ram_s = median(self._copies[key]) if self._copies.get(key) else row.ram_s
                yield replace(row, k_s=line.k_s, b_s=line.b_s, disk_s=disk_s, ram_s=ram_s)


def _whole_devices(
    makeup: Makeup, matrix: Iterable[Performance]
) -> tuple[tuple[PoolFacts, ...], tuple[ExecutorFacts, ...]]:
    """Return the devices as they were before the recorded policy divided them."""
    profiled = max((row.max_batch for row in matrix), default=1)
    pools: dict[str, PoolFacts] = {}
    for facts in makeup.pools:
        before = pools.get(facts.device)
        budget_bytes = facts.budget_bytes + (before.budget_bytes if before else 0)
        bound = min(profiled, 64) if preset(makeup.policy).batch_bound is not None else facts.max_batch
        pools[facts.device] = replace(facts, pool=PoolId(facts.device), budget_bytes=budget_bytes, max_batch=bound)
    executors = tuple(ExecutorFacts(facts.executor, PoolId(facts.pool.partition("/")[0])) for facts in makeup.executors)
    return tuple(pools.values()), executors
