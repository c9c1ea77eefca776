"""`coserve bench scheduler`: processor time of the scheduler per request, at any number of queued requests."""

import gc
import platform
import random
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated

import typer

from daemon.policy.actions import Load, Run, Wait
from daemon.policy.matrix import Performance
from daemon.policy.paper.assign import partition
from daemon.policy.presets import preset
from daemon.policy.request import ExecutorFacts, ExecutorId, ExpertFacts, PoolFacts, PoolId, Request, RequestId
from daemon.policy.scheduler import Scheduler
from experts.spec import ArchitectureId, ExpertId
from tests.bench.tables import print_rows
from tools.terminal.console import print_json
from tools.terminal.option_values import must_be_policies

_CLASSIFIERS, _DETECTORS, _EXPERT_BYTES = 350, 8, 178_000_000
_PASS_RATE = 0.95
#: Component types that come at one time, and images after which one of them gives way to the next.
_AT_ONCE, _IMAGES_EACH = 12, 50
_SEED = 5
_K_S, _B_S, _LOAD_S = {"cuda:0": 0.03, "cpu": 0.11}, {"cuda:0": 0.024, "cpu": 0.06}, 0.34


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per request, everything included: arrival, expiry, loads, batches and their reports."""

    policy: str
    queued: int
    us_per_request: float
    lowest: float
    highest: float


class _Line:
    """A scheduler with a backlog: 3 GPU executors and one CPU, 358 experts, memory for a hundred of them.

    A dozen component types come at a time and change slowly, so that the work for one request is of the same kind
    whether a hundred wait or a million: full batches, and a new expert every 50 images.
    Time is simulated, so that nothing but the scheduler's own work is measured.
    """

    def __init__(self, policy: str, queued: int) -> None:
        self._random = random.Random(_SEED)
        self._names = [ExpertId(f"c{number}") for number in range(_CLASSIFIERS)]
        # Thrown beforehand: the dice cost as much as an arrival.
        self._draws = [self._random.randrange(_AT_ONCE) for _ in range(1 << 16)]
        self._passes = [self._random.random() < _PASS_RATE for _ in range(1 << 16)]
        self._detectors = {
            name: ExpertId(f"d{number % _DETECTORS}") for number, name in enumerate(self._names) if number % 5 < 2
        }
        then = {name: ((detector, _PASS_RATE),) for name, detector in self._detectors.items()}
        experts = [
            ExpertFacts(name, ArchitectureId("resnet101"), _EXPERT_BYTES, 1 / _CLASSIFIERS, then.get(name, ()))
            for name in self._names
        ]
        experts += [
            ExpertFacts(ExpertId(f"d{number}"), ArchitectureId("yolov5l"), _EXPERT_BYTES, 0.05)
            for number in range(_DETECTORS)
        ]
        devices = [
            PoolFacts(PoolId("cuda:0"), "gpu", 37 * _EXPERT_BYTES, 8),
            PoolFacts(PoolId("cpu"), "cpu", 62 * _EXPERT_BYTES, 5),
        ]
        streams = [ExecutorFacts(ExecutorId(f"cuda:0/{number}"), PoolId("cuda:0")) for number in range(3)]
        streams.append(ExecutorFacts(ExecutorId("cpu/0"), PoolId("cpu")))
        rules = preset(policy)
        pools, executors = partition(devices, streams, rules)
        rows = [
            Performance(device, ArchitectureId(name), _K_S[device], _B_S[device], 8, 0, _LOAD_S, 0.02)
            for device in _K_S
            for name in ("resnet101", "yolov5l")
        ]
        self._scheduler = Scheduler(experts, pools, executors, rules, None, rows)
        self._pools = [facts.pool for facts in pools]
        self._idle = {facts.executor: None for facts in executors}
        self._device = {facts.executor: facts.pool.partition("/")[0] for facts in executors}
        self._now_s = 0.0
        self._next_id = 0
        self._loads: list[tuple[float, Load]] = []
        self._runs: list[tuple[float, Run]] = []
        for _ in range(queued):
            self._arrive(self._name(), 0)
        self._decide()

    def serve(self, requests: int) -> int:
        """Let batches end and as many requests arrive; decide after each report. Returns how many there were."""
        served = 0
        while served < requests:
            served += self._turn()
        return served

    def _turn(self) -> int:
        """The next report, of a load or of a batch; a batch's images go on or are replaced by new ones."""
        next_load_s = self._loads[0][0] if self._loads else float("inf")
        next_run_s = min((until_s for until_s, _ in self._runs), default=float("inf"))
        if next_load_s <= next_run_s and self._loads:
            self._now_s, load = self._loads.pop(0)
            self._scheduler.load_done(load, _LOAD_S)
            self._decide()
            return 0
        position = min(range(len(self._runs)), key=lambda number: self._runs[number][0])
        self._now_s, run = self._runs.pop(position)
        self._idle[run.executor] = None
        self._scheduler.batch_done(run.executor, 0.1)
        for request in run.batch:
            detector = self._detectors.get(request.expert)
            if request.step == 0 and detector is not None and self._passes[self._next_id & 0xFFFF]:
                self._arrive(detector, 1)
            else:
                self._arrive(self._name(), 0)
        self._decide()
        return len(run.batch)

    def _name(self) -> ExpertId:
        newest = self._next_id // _IMAGES_EACH
        return self._names[(newest + self._draws[self._next_id & 0xFFFF]) % _CLASSIFIERS]

    def _arrive(self, expert: ExpertId, step: int) -> None:
        self._next_id += 1
        self._scheduler.arrive(Request(RequestId(self._next_id), expert, self._now_s, None, step), self._now_s)

    def _decide(self) -> None:
        scheduler, now_s = self._scheduler, self._now_s
        scheduler.expire(now_s)
        for pool in self._pools:
            while not isinstance(action := scheduler.next_load(pool, now_s), Wait):
                if isinstance(action, Load):
                    self._loads.append((now_s + _LOAD_S, action))
        for executor in list(self._idle):
            if isinstance(action := scheduler.next_action(executor, now_s), Run):
                del self._idle[executor]
                device = self._device[executor]
                self._runs.append((now_s + _K_S[device] * len(action.batch) + _B_S[device], action))


def measure(policy: str, queued: int, *, requests: int, rounds: int) -> Cost:
    """Median processor time per request of `rounds` stretches of `requests`, with `queued` waiting all the time."""
    line = _Line(policy, queued)
    line.serve(requests)
    gc.collect()
    gc.freeze()
    runs: list[float] = []
    try:
        for _ in range(rounds):
            began_s = time.process_time()
            served = line.serve(requests)
            runs.append((time.process_time() - began_s) / served * 1e6)
    finally:
        gc.unfreeze()
    return Cost(policy, queued, *(round(figure, 2) for figure in (median(runs), min(runs), max(runs))))


def bench_scheduler(
    queued: Annotated[list[int] | None, typer.Option(help="Requests that wait; repeat.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies; repeat.")] = None,
    requests: Annotated[int, typer.Option(help="Requests in each measured stretch.")] = 5000,
    rounds: Annotated[int, typer.Option(help="Stretches; the median is printed.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the scheduler's processor time per request, all decisions included, however many requests wait.

    Example: coserve bench scheduler --policy coserve --queued 10000
    """
    sizes = queued or [100, 10_000, 1_000_000]
    names = policy or ["coserve", "coserve-plus"]
    must_be_policies(names)
    costs = [measure(name, size, requests=requests, rounds=rounds) for name in names for size in sizes]
    if as_json:
        print_json({"machine": platform.platform(), "costs": [asdict(cost) for cost in costs]})
    else:
        print_rows("The scheduler's work for one request, median", [asdict(cost) for cost in costs])
