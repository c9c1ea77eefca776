"""A recorded live run as a machine and a task: its arrivals and chains, and the costs that it measured itself."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from daemon.dispatch.trace import Call, Makeup, TraceError, read_calls, read_makeup
from daemon.policy.actions import Load, Run
from daemon.policy.matrix import Matrix, Performance
from daemon.policy.paper.assign import partition
from daemon.policy.presets import Tuning, preset
from daemon.policy.request import RAM, ExecutorFacts, ExecutorId, PoolFacts, PoolId, Request, RequestId
from experts.spec import ArchitectureId, ExpertId
from tools.simulate.world import Image, SimulatedMachine, Task, TransferChannel

#: A channel whose speed is in the loads' own measured seconds.
_AS_MEASURED = 1e15

Key = tuple[str, ArchitectureId]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace's contents. `answered` and `makespan_s` are the live run's own, from first arrival to last answer."""

    policy: str
    tuning: Tuning
    task: Task
    answered: int
    makespan_s: float
    loads: int
    #: Whether the initial fill was over when the first image came.
    prefilled: bool
    _makeup: Makeup
    _matrix: tuple[Performance, ...]

    @property
    def images_per_s(self) -> float:
        return self.answered / self.makespan_s

    def machine(self, policy: str) -> SimulatedMachine:
        """The recorded machine as `policy` divides it, with the measured costs."""
        pools, executors = _whole_devices(self._makeup, self._matrix)
        new_pools, new_executors = partition(pools, executors, preset(policy))
        devices = {facts.device for facts in pools if facts.pool != RAM}
        counts = {device: sum(facts.pool == device for facts in executors) for device in devices}
        disk, link = TransferChannel("disk", _AS_MEASURED, 0.0), TransferChannel("link", _AS_MEASURED, 0.0)
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


@dataclass(slots=True)
class _Reading:
    """State while the calls are read in order."""

    images: list[list[Any]] = field(default_factory=list)
    by_request: dict[RequestId, int] = field(default_factory=dict)
    going_on: list[int] = field(default_factory=list)
    runs: dict[ExecutorId, Run] = field(default_factory=dict)
    batches: dict[Key, list[tuple[int, float]]] = field(default_factory=dict)
    reads: dict[Key, list[float]] = field(default_factory=dict)
    copies: dict[Key, list[float]] = field(default_factory=dict)
    loads: int = 0
    answered: int = 0
    prefilled: bool = False
    first_s: float | None = None
    last_s: float = 0.0
    ended: bool = False


def read_recorded(path: Path) -> Recorded:
    """Read a recorded trace. Raises OSError, and TraceError if the file is not a trace or holds no image."""
    makeup = read_makeup(path)
    architectures = {facts.expert: facts.architecture for facts in makeup.experts}
    device_of = {facts.pool: facts.device for facts in makeup.pools}
    pool_of = {facts.executor: facts.pool for facts in makeup.executors}
    reading, runs = _Reading(), TypeAdapter(Run)
    for call in read_calls(path):
        _read(reading, call, architectures, device_of, pool_of, runs)
    if reading.first_s is None or reading.last_s <= reading.first_s:
        raise TraceError(f"{path}: no image was answered in this run: there is nothing to predict from")
    first_s = reading.first_s
    images = tuple(
        Image(arrived_s - first_s, tuple(chain), None if deadline_s is None else deadline_s - first_s)
        for arrived_s, deadline_s, chain in reading.images
    )
    makespan_s = reading.last_s - first_s
    return Recorded(
        policy=makeup.policy,
        tuning=makeup.tuning,
        task=Task(path.name, makeup.experts, images),
        answered=reading.answered + len(reading.going_on),
        makespan_s=makespan_s,
        loads=reading.loads,
        prefilled=reading.prefilled,
        _makeup=makeup,
        _matrix=tuple(_measured_rows(makeup, reading, device_of, architectures)),
    )


def _read(
    reading: _Reading,
    call: Call,
    architectures: Mapping[ExpertId, ArchitectureId],
    device_of: Mapping[PoolId, str],
    pool_of: Mapping[ExecutorId, PoolId],
    runs: TypeAdapter[Run],
) -> None:
    result = call.recorded.get("result")
    if call.name != "arrive":
        # Requests that did not continue right after their batch have their answer.
        reading.answered += len(reading.going_on)
        reading.going_on = []
    match call.name, call.arguments:
        case "arrive", (request, now):
            if result is None:
                _arrived(reading, request, now)
        case "next_action", (executor, now):
            _at(reading, now)
            if isinstance(result, dict) and "batch" in result:
                reading.runs[executor] = runs.validate_python(result)
        case "expire" | "next_load", (*_, now):
            _at(reading, now)
        case "batch_done", (executor, infer_s):
            run = reading.runs.pop(executor)
            key = (device_of[pool_of[executor]], architectures[run.expert])
            reading.batches.setdefault(key, []).append((len(run.batch), infer_s))
            reading.going_on = [reading.by_request[request.request_id] for request in run.batch]
            reading.ended = True
        case "load_done", (load, load_s):
            _loaded(reading, load, load_s, architectures, device_of)
        case _:
            pass


def _arrived(reading: _Reading, request: Request, now: float) -> None:
    """A new image, or the next step of one whose batch has just ended (which of the batch's does not matter)."""
    if reading.first_s is None:
        reading.first_s = now
    if request.step > 0 and reading.going_on:
        number = reading.going_on.pop(0)
        reading.images[number][2].append(request.expert)
    else:
        number = len(reading.images)
        reading.images.append([request.arrived_s, request.deadline_s, [request.expert]])
    reading.by_request[request.request_id] = number


def _at(reading: _Reading, now: float) -> None:
    """Reports carry no time of their own: the next decision's is theirs."""
    if reading.ended:
        reading.last_s, reading.ended = now, False


def _loaded(
    reading: _Reading,
    load: Load,
    load_s: float,
    architectures: Mapping[ExpertId, ArchitectureId],
    device_of: Mapping[PoolId, str],
) -> None:
    reading.loads += load.cause != "startup"
    if load.cause == "startup":
        reading.prefilled = reading.first_s is None
    if load.expert in architectures:
        times = reading.reads if load.source is None else reading.copies
        times.setdefault((device_of[load.pool], architectures[load.expert]), []).append(load_s)


def _measured_rows(
    makeup: Makeup, reading: _Reading, device_of: Mapping[PoolId, str], architectures: Mapping[ExpertId, ArchitectureId]
) -> Iterator[Performance]:
    rows = Matrix(makeup.matrix)
    devices = dict.fromkeys(device for pool, device in device_of.items() if pool != RAM)
    for device in devices:
        for architecture in dict.fromkeys(architectures.values()):
            key = (device, architecture)
            row = rows.of(device, architecture)
            k_s, b_s = fit_costs(reading.batches.get(key, ()), row)
            disk_s = median(reading.reads[key]) if reading.reads.get(key) else row.disk_s
            ram_s = median(reading.copies[key]) if reading.copies.get(key) else row.ram_s
            yield replace(row, k_s=k_s, b_s=b_s, disk_s=disk_s, ram_s=ram_s)


def fit_costs(batches: Iterable[tuple[int, float]], profiled: Performance) -> tuple[float, float]:
    """K and B in seconds of (images, seconds), by least squares; with one size only, the profiled proportion scaled."""
    sizes, seconds = (np.array(column, float) for column in zip(*batches, strict=True)) if batches else (None, None)
    if sizes is None or seconds is None:
        return profiled.k_s, profiled.b_s
    if len(np.unique(sizes)) > 1:
        (k_s, b_s), *_ = np.linalg.lstsq(np.column_stack((sizes, np.ones_like(sizes))), seconds, rcond=None)
        if k_s > 0.0 and b_s >= 0.0:
            return float(k_s), float(b_s)
    scale = float(seconds.sum() / (profiled.k_s * sizes + profiled.b_s).sum())
    return profiled.k_s * scale, profiled.b_s * scale


def _whole_devices(
    makeup: Makeup, matrix: Iterable[Performance]
) -> tuple[tuple[PoolFacts, ...], tuple[ExecutorFacts, ...]]:
    """Devices as they were before the recorded policy divided them."""
    profiled = max((row.max_batch for row in matrix), default=1)
    pools: dict[str, PoolFacts] = {}
    for facts in makeup.pools:
        before = pools.get(facts.device)
        budget_bytes = facts.budget_bytes + (before.budget_bytes if before else 0)
        bound = min(profiled, 64) if preset(makeup.policy).batch_bound is not None else facts.max_batch
        pools[facts.device] = replace(facts, pool=PoolId(facts.device), budget_bytes=budget_bytes, max_batch=bound)
    executors = tuple(ExecutorFacts(facts.executor, PoolId(facts.pool.partition("/")[0])) for facts in makeup.executors)
    return tuple(pools.values()), executors
