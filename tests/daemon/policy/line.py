"""Factories for policy tests, and a tiny clockwork that carries actions out in simulated time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from daemon.policy.actions import Load, Resize, Run, Unload, Wait
from daemon.policy.matrix import Performance
from daemon.policy.paper.assign import partition
from daemon.policy.presets import Tuning, preset
from daemon.policy.request import ExecutorFacts, ExecutorId, ExpertFacts, PoolFacts, PoolId, Request, RequestId
from daemon.policy.scheduler import Scheduler
from experts.spec import ArchitectureId, ExpertId
from tests.daemon.policy.books import check_scheduler

CPU = PoolId("cpu")


def an_expert(
    name: str, weights_bytes: int = 10, usage: float = 0.1, then: Sequence[tuple[str, float]] = ()
) -> ExpertFacts:
    chain = tuple((ExpertId(expert), share) for expert, share in then)
    return ExpertFacts(ExpertId(name), ArchitectureId("resnet18"), weights_bytes, usage, chain)


def a_pool(pool: str = "cpu", budget_bytes: int = 30, max_batch: int = 4) -> PoolFacts:
    return PoolFacts(PoolId(pool), "gpu" if pool.startswith("cuda") else "cpu", budget_bytes, max_batch)


def executors_on(*pools: str) -> tuple[ExecutorFacts, ...]:
    return tuple(ExecutorFacts(ExecutorId(f"{pool}/{n}"), PoolId(pool)) for n, pool in enumerate(pools))


def a_request(
    number: int, expert: str = "a", arrived_s: float = 0.0, deadline_s: float | None = None, step: int = 0
) -> Request:
    return Request(RequestId(number), ExpertId(expert), arrived_s, deadline_s, step)


def a_scheduler(
    experts: Iterable[ExpertFacts],
    pools: Sequence[PoolFacts] = (),
    executors: Sequence[ExecutorFacts] = (),
    policy: str = "coserve-plus",
    tuning: Tuning | None = None,
    matrix: Sequence[Performance] = (),
) -> Scheduler:
    rules = preset(policy)
    pools, executors = partition(pools or [a_pool()], executors or executors_on("cpu"), rules)
    return Scheduler(experts, pools, executors, rules, tuning, matrix)


@dataclass
class Clockwork:
    """Runs a scheduler: loads take `load_s`, batches `k_s` an image and `b_s`. Checks integrity at every turn."""

    scheduler: Scheduler
    executors: Sequence[ExecutorFacts]
    load_s: float = 1.0
    k_s: float = 0.1
    b_s: float = 0.1
    then: Callable[[Request], str | None] = lambda _request: None
    now: float = 0.0
    actions: list[Load | Run | Unload | Resize] = field(default_factory=list)
    ran: list[Request] = field(default_factory=list)
    started_s: dict[int, float] = field(default_factory=dict)
    expired: list[Request] = field(default_factory=list)
    _timers: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _serial: int = 0
    _next_id: int = 1_000_000

    def at(self, when_s: float, do: Callable[[], None]) -> None:
        self._serial += 1
        heappush(self._timers, (when_s, self._serial, do))

    def arrive(self, *requests: Request) -> None:
        for request in requests:
            self.at(request.arrived_s, lambda request=request: self.scheduler.arrive(request, self.now))

    def run(self, until_s: float = 1e9) -> None:
        while self._timers and self._timers[0][0] <= until_s:
            self.now, _, do = heappop(self._timers)
            do()
            while self._timers and self._timers[0][0] == self.now:
                heappop(self._timers)[2]()
            self.turn()

    def turn(self) -> None:
        self.expired += self.scheduler.expire(self.now)
        wake: list[float] = []
        for pool in self.scheduler.pools:
            while not isinstance(action := self.scheduler.next_load(pool, self.now), Wait):
                self._load(action)
            wake += [action.until_s] if action.until_s is not None else []
        for executor in self.executors:
            action = self.scheduler.next_action(executor.executor, self.now)
            if isinstance(action, Run):
                self._run(action)
            elif action.until_s is not None:
                wake.append(action.until_s)
        check_scheduler(self.scheduler)
        if wake and min(wake) > self.now:
            self.at(min(wake), lambda: None)

    def loads(self, cause: str | None = None) -> list[Load]:
        return [action for action in self.actions if isinstance(action, Load) and cause in (None, action.cause)]

    def runs(self) -> list[Run]:
        return [action for action in self.actions if isinstance(action, Run)]

    def _load(self, action: Load | Unload | Resize) -> None:
        self.actions.append(action)
        if isinstance(action, Load):
            self.at(self.now + self.load_s, lambda: self.scheduler.load_done(action, self.load_s))

    def _run(self, run: Run) -> None:
        self.actions.append(run)
        for request in run.batch:
            self.started_s[request.request_id] = self.now
        self.at(self.now + self.k_s * len(run.batch) + self.b_s, lambda: self._ran(run))

    def _ran(self, run: Run) -> None:
        self.scheduler.batch_done(run.executor, self.k_s + self.b_s)
        self.ran += run.batch
        for request in run.batch:
            subsequent = self.then(request)
            if subsequent is not None:
                self._next_id += 1
                later = a_request(self._next_id, subsequent, self.now, request.deadline_s, request.step + 1)
                self.scheduler.arrive(later, self.now)
