"""Any order of arrivals, reports, time and operators' wishes keeps the scheduler's promises."""

from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from daemon.policy.actions import Load, Resize, Run, Unload, Wait
from daemon.policy.operate import OperationRefusedError
from daemon.policy.paper.assign import partition
from daemon.policy.presets import PRESETS, Tuning
from daemon.policy.request import RAM, PoolFacts, PoolId
from experts.spec import ExpertId
from tests.daemon.policy.books import check_scheduler
from tests.daemon.policy.line import a_pool, a_request, a_scheduler, an_expert, executors_on

NAMES = ["a", "b", "c", "d", "e", "huge"]
SIZES = {"a": 10, "b": 20, "c": 10, "d": 15, "e": 5, "huge": 500}
ON_PC2 = [
    PoolFacts(PoolId("pc2-gpu"), "gpu", 35, 4, host="pc2"),
    PoolFacts(PoolId("pc2-cpu"), "cpu", 20, 2, host="pc2"),
    PoolFacts(PoolId("pc2-ram"), "ram", 20, 1, host="pc2"),
]
POOLS = {
    "one slot": ([a_pool(budget_bytes=20)], executors_on("cpu")),
    "two executors": ([a_pool(budget_bytes=35)], executors_on("cpu", "cpu")),
    "gpu and cpu": ([a_pool("cuda:0", 30), a_pool("cpu", 25, 2)], executors_on("cuda:0", "cuda:0", "cpu")),
    "two gpus": ([a_pool("cuda:0", 20), a_pool("cuda:1", 30)], executors_on("cuda:0", "cuda:1")),
    "gpu and ram": ([a_pool("cuda:0", 50), PoolFacts(RAM, "ram", 25, 1)], executors_on("cuda:0", "cuda:0")),
    "two pcs": (
        [a_pool("cuda:0", 30), a_pool("cpu", 25, 2), *ON_PC2],
        executors_on("cuda:0", "cpu", "pc2-gpu", "pc2-gpu", "pc2-cpu"),
    ),
    "everything": (
        [a_pool("cuda:0", 60), PoolFacts(RAM, "ram", 20, 1), a_pool("cpu", 40, 2)],
        executors_on("cuda:0", "cuda:0", "cuda:0", "cpu", "cpu"),
    ),
}


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(list(PRESETS)), shape=st.sampled_from(list(POOLS)))
    def start(self, policy: str, shape: str) -> None:
        self.pools, self.executors = partition(*POOLS[shape], PRESETS[policy])
        self.experts = [
            an_expert(name, SIZES[name], usage=0.1 * n, then=[("d", 0.5)] if name in "ab" else [])
            for n, name in enumerate(NAMES)
        ]
        tuning = Tuning(max_wait_s=5.0, deadline_margin_s=1.0, retry_s=4.0)
        self.scheduler = a_scheduler(self.experts, self.pools, self.executors, policy, tuning)
        self.now = 0.0
        self.open: dict[int, str] = {}
        self.ended: set[int] = set()
        self.loads: list[Load] = []
        self.runs: list[Run] = []
        self.resident: dict[tuple[str, str], int] = {}
        #: When a pool may be asked again for what it could not load: by pool and expert.
        self.refused_s: dict[tuple[str, str], float] = {}
        self.outdated: list[Load] = []
        self.budgets = {facts.pool: facts.budget_bytes for facts in self.pools}
        self.next_id = 0

    def end(self, number: int) -> None:
        assert number not in self.ended, "a request ended twice"
        assert number in self.open
        del self.open[number]
        self.ended.add(number)

    @rule(
        expert=st.sampled_from(NAMES),
        count=st.integers(1, 6),
        deadline=st.none() | st.floats(0.5, 20),
        step=st.integers(0, 1),
    )
    def arrive(self, expert: str, count: int, deadline: float | None, step: int) -> None:
        for _ in range(count):
            self.next_id += 1
            due_s = None if deadline is None else self.now + deadline
            refused = self.scheduler.arrive(a_request(self.next_id, expert, self.now, due_s, step), self.now)
            self.open[self.next_id] = expert
            if refused is not None:
                self.end(self.next_id)
            else:
                assert expert != "huge"

    @rule(seconds=st.floats(0.0, 6.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for request in self.scheduler.expire(self.now):
            assert request.deadline_s is not None
            self.end(request.request_id)

    @rule(data=st.data())
    def ask_for_a_load(self, data: st.DataObject) -> None:
        pool = data.draw(st.sampled_from([facts.pool for facts in self.pools]))
        pinned = next((state.pinned for state in self.scheduler.snapshot().pools if state.pool == pool), ())
        action = self.scheduler.next_load(pool, self.now)
        match action:
            case Load(expert=expert, evict=evict):
                for victim in evict:
                    assert victim not in pinned
                    self.evict(pool, victim)
                assert (pool, expert) not in self.resident
                if action.cause != "pin":
                    assert self.refused_s.get((pool, expert), 0.0) <= self.now, "asked again for what it refused"
                self.resident[pool, expert] = SIZES[expert]
                self.loads.append(action)
            case Unload(experts=experts):
                for victim in experts:
                    self.evict(pool, victim)
            case Resize(budget_bytes=budget_bytes):
                self.budgets[pool] = budget_bytes
            case Wait():
                pass
        resident_bytes = sum(size for (where, _), size in self.resident.items() if where == pool)
        assert resident_bytes <= self.budgets[pool], "over budget"

    def evict(self, pool: str, expert: str) -> None:
        assert not any(load.pool == pool and load.expert == expert for load in self.loads), "evicted while loading"
        assert not any(run.expert == expert and self.scheduler_pool(run) == pool for run in self.runs), (
            "evicted while in use"
        )
        assert not any(load.source == pool and load.expert == expert for load in self.loads), "evicted while copied"
        del self.resident[pool, expert]

    def scheduler_pool(self, run: Run) -> str:
        return next(facts.pool for facts in self.executors if facts.executor == run.executor)

    @rule(data=st.data())
    def ask_for_a_batch(self, data: st.DataObject) -> None:
        executor = data.draw(st.sampled_from(self.executors))
        action = self.scheduler.next_action(executor.executor, self.now)
        if isinstance(action, Run):
            assert (executor.pool, action.expert) in self.resident
            assert 1 <= len(action.batch) <= next(f.max_batch for f in self.pools if f.pool == executor.pool)
            assert all(request.expert == action.expert for request in action.batch)
            assert all(run.executor != executor.executor for run in self.runs)
            self.runs.append(action)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), succeeds=st.booleans(), is_device_error=st.booleans())
    def a_load_ends(self, data: st.DataObject, succeeds: bool, is_device_error: bool) -> None:
        load = data.draw(st.sampled_from(self.loads))
        self.loads.remove(load)
        if succeeds:
            self.scheduler.load_done(load, 0.5)
            self.refused_s.pop((load.pool, load.expert), None)
            return
        del self.resident[load.pool, load.expert]
        lost = self.scheduler.load_failed(load, "corrupt", self.now, is_device_error)
        assert not (lost and load.pool == RAM), "host memory can be done without"
        if (load.pool == RAM or is_device_error) and load not in self.outdated:
            self.refused_s[load.pool, load.expert] = self.now + 4.0
        for request in lost:
            assert request.expert == load.expert
            self.end(request.request_id)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), fails=st.booleans())
    def a_batch_ends(self, data: st.DataObject, fails: bool) -> None:
        run = data.draw(st.sampled_from(self.runs))
        self.runs.remove(run)
        if fails:
            assert self.scheduler.batch_failed(run.executor) == run.batch
        else:
            self.scheduler.batch_done(run.executor, 0.2)
        for request in run.batch:
            self.end(request.request_id)

    @rule(data=st.data(), wish=st.sampled_from(["pin", "unpin", "unload"]), expert=st.sampled_from([*NAMES, "none"]))
    def an_operator_wishes(self, data: st.DataObject, wish: str, expert: str) -> None:
        pool = data.draw(st.none() | st.sampled_from([facts.pool for facts in self.pools] + [PoolId("cuda:9")]))
        with suppress(OperationRefusedError):
            getattr(self.scheduler, wish)(ExpertId(expert), pool)

    @rule(data=st.data(), budget_bytes=st.integers(0, 60))
    def a_budget_changes(self, data: st.DataObject, budget_bytes: int) -> None:
        pool = data.draw(st.sampled_from([facts.pool for facts in self.pools]))
        with suppress(OperationRefusedError):
            self.scheduler.set_budget(pool, budget_bytes)

    @rule(gone=st.sampled_from([None, "c", "e"]), shift=st.booleans())
    def facts_are_replaced(self, gone: str | None, shift: bool) -> None:
        self.experts = [
            an_expert(name, SIZES[name], 0.2, then=[("e", 0.25)] if shift and name == "a" and gone != "e" else [])
            for name in NAMES
            if name != gone
        ]
        for request in self.scheduler.replace_facts(self.experts):
            self.end(request.request_id)
        self.refused_s.clear()
        self.outdated += self.loads

    @invariant()
    def everything_adds_up(self) -> None:
        check_scheduler(self.scheduler)
        waiting = sum(self.scheduler.snapshot().queued.values())
        assert waiting + sum(len(run.batch) for run in self.runs) == len(self.open)

    def teardown(self) -> None:
        """Report everything and let time pass: every request ends."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(400):
            if not self.open:
                break
            self.now += 0.5
            self.report_everything()
            self.decide_everything()
        assert not self.open, f"never ended: {self.open}, {self.scheduler.snapshot()}"

    def report_everything(self) -> None:
        for request in self.scheduler.expire(self.now):
            self.end(request.request_id)
        for load in self.loads:
            self.scheduler.load_done(load, 0.5)
        for run in self.runs:
            self.scheduler.batch_done(run.executor, 0.2)
            for request in run.batch:
                self.end(request.request_id)
        self.loads, self.runs = [], []

    def decide_everything(self) -> None:
        for pool in self.scheduler.pools_to_ask([facts.pool for facts in self.pools], self.now):
            while not isinstance(action := self.scheduler.next_load(pool, self.now), Wait):
                if isinstance(action, Load):
                    self.loads.append(action)
        for executor in self.executors:
            if isinstance(action := self.scheduler.next_action(executor.executor, self.now), Run):
                self.runs.append(action)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
