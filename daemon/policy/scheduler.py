"""The scheduler as drivers see it: reports in, actions out. Pure: `now` comes in as an argument (docs/architecture.md).

After each report a driver asks `next_load` for every pool before `next_action` for every idle executor: an urgent load
marks the experts that must become idle for it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from daemon.policy.actions import NOTHING, Load, PoolSnapshot, Resize, Run, Snapshot, Unload, Wait
from daemon.policy.discipline import Discipline, Evict, Want
from daemon.policy.late.balance import Pace
from daemon.policy.late.deadlines import Deadlines
from daemon.policy.late.demand import DemandTable
from daemon.policy.matrix import Matrix, Performance
from daemon.policy.operate import Operator
from daemon.policy.paper.queues import ExecutorQueues
from daemon.policy.predict import LeastTimes, initial_fill
from daemon.policy.presets import Preset, Tuning
from daemon.policy.request import ExecutorFacts, ExecutorId, ExpertFacts, PoolFacts, PoolId, Request
from daemon.policy.residency import Failure, Residency
from experts.spec import ExpertId, name_of


class Scheduler:
    """Facts, ledgers and one discipline over what `partition` made. Each request leaves once: run, failed, expired."""

    def __init__(
        self,
        experts: Iterable[ExpertFacts],
        pools: Sequence[PoolFacts],
        executors: Sequence[ExecutorFacts],
        preset: Preset,
        tuning: Tuning | None = None,
        matrix: Sequence[Performance] = (),
    ) -> None:
        self._preset = preset
        self._tuning = tuning or Tuning()
        self._residency = Residency(experts, pools, executors, Matrix(matrix), across_devices=preset.across_devices)
        self._measured = LeastTimes()
        for row in matrix:
            self._measured.inferred(row.architecture, row.k_s + row.b_s)
        self._pace = Pace(executors)
        self._deadlines = Deadlines(self._least_s)
        self._discipline: Discipline = (
            ExecutorQueues(self._residency, self._preset)
            if self._preset.binding == "arrival"
            else DemandTable(self._residency, self._deadlines, self._pace, self._preset, self._tuning)
        )
        self._queued_count = 0
        self._running: dict[ExecutorId, Run] = {}
        #: When the passing of time alone may next change an answer.
        self.next_turn_s: float | None = None
        self._fill = self._first_fill() if preset.initial_fill else {}
        self._operator = Operator(self._residency, self._discipline)

    # Requests

    def arrive(self, request: Request, now: float) -> str | None:
        """Queue `request`, unless its expert cannot serve it: then return the reason."""
        expert = request.expert
        if not self._residency.is_usable(expert):
            reason = self._why_not(expert, now)
            if reason is not None:
                return reason
            self._residency.failures.pop(expert, None)
        self._queued_count += 1
        if request.deadline_s is not None:
            self._deadlines.add(request)
        self._discipline.add(request)
        return None

    def expire(self, now: float) -> tuple[Request, ...]:
        due = self._deadlines.due(now)
        for request in due:
            self._discard(request)
        return due

    # Decisions

    def next_action(self, executor: ExecutorId, now: float) -> Run | Wait:
        """Return the next batch of an idle executor; the caller must report its end."""
        if executor not in self._residency.executors or executor in self._running:
            return NOTHING
        batch = self._discipline.take(executor, now)
        if not batch:
            return self._wait(now)
        expert = batch[0].expert
        self._queued_count -= len(batch)
        if self._deadlines:
            for request in batch:
                self._deadlines.discard(request)
        self._residency.ledgers[self._residency.executors[executor].pool].use(expert)
        run = Run(executor, expert, batch)
        self._running[executor] = run
        return run

    def pools_to_ask(self, pools: Iterable[PoolId], now: float) -> list[PoolId]:
        """Return those of `pools` whose `next_load` may differ from its last answer."""
        asks_all = bool(self._deadlines) or (self.next_turn_s is not None and now >= self.next_turn_s)
        ledgers, may_want = self._residency.ledgers, self._discipline.may_want
        return [pool for pool in pools if asks_all or pool not in ledgers or may_want(pool)]

    def next_load(self, pool: PoolId, now: float) -> Load | Unload | Resize | Wait:
        """Return the next change of the residents of `pool`; the caller must report the end of a `Load`."""
        residency = self._residency
        ledger = residency.ledgers.get(pool)
        if ledger is None:
            return NOTHING
        residency.forgive(now)
        residency.draining[pool].clear()
        if residency.leaving[pool] or ledger.budget_bytes != residency.targets_bytes[pool]:
            change = self._operator.next_change(pool)
            if change is not None:
                for expert in change.experts if isinstance(change, Unload) else ():
                    self._residency_changed(expert)
                return change
            if ledger.budget_bytes != residency.targets_bytes[pool]:
                return self._wait(now)
        copying, max_loads = residency.copying[pool], self._preset.loads_in_flight
        if copying >= max_loads and ledger.loading_count - copying >= max_loads:
            return self._wait(now)
        wants = self._discipline.wants(pool, now)
        if self._fill.get(pool) or ledger.pinned:
            wants = self._wants_of_all(pool, wants)
        load = self._first_load(pool, wants) if wants else None
        return load or self._wait(now)

    # Reports

    def load_done(self, load: Load, load_s: float) -> None:
        self._residency.ledgers[load.pool].finish_load(load.expert)
        self._residency.suspects.pop(load.expert, None)
        self._residency.unrefuse(load.pool, load.expert)
        self._free_source(load)
        facts = self._residency.experts.get(load.expert)
        if facts is not None:
            self._measured.loaded(facts.architecture, load_s)
        self._residency_changed(load.expert)

    def load_failed(self, load: Load, reason: str, now: float, is_device_error: bool = False) -> tuple[Request, ...]:
        """Free the bytes; if no other pool can provide the expert, take out and return its requests, which fail.

        A failed load into host memory fails no request, nor does that of a failed device (`is_device_error`) if another
        takes the expert. Such a pool is not asked for it again before `retry_s`.
        """
        residency, pool, expert = self._residency, load.pool, load.expert
        residency.ledgers[pool].abandon_load(expert)
        residency.forget_reader(residency.pools[pool].host, [expert])
        self._free_source(load)
        was_leaving = self._operator.load_failed(pool, expert)
        is_ram = residency.pools[pool].processor == "ram"
        retry_s = now + self._tuning.retry_s
        if (is_ram or is_device_error) and not was_leaving:
            residency.refuse(pool, expert, retry_s)
        self._residency_changed(expert)
        if (
            was_leaving
            or is_ram
            or residency.homes(expert)
            or (is_device_error and residency.is_taken(expert, "gpu", "cpu"))
        ):
            return ()
        # Another pool's load of it may still succeed. Only the first failure waits for that: two pools that load what
        # cannot be loaded would otherwise wait for each other for ever.
        if residency.is_coming(expert) and expert not in residency.suspects:
            residency.suspects[expert] = None
            return ()
        residency.suspects.pop(expert, None)
        residency.failures[expert] = Failure(reason, retry_s)
        return self._take_out(expert)

    def batch_done(self, executor: ExecutorId, infer_s: float) -> None:
        """Note that the batch was answered; its images' next steps arrive after this report."""
        run = self._end(executor)
        facts = self._residency.experts.get(run.expert)
        if facts is not None:
            self._measured.inferred(facts.architecture, infer_s)
        self._pace.ran(self._residency.executors[executor].pool, len(run.batch), infer_s)

    def batch_failed(self, executor: ExecutorId) -> tuple[Request, ...]:
        """Return the requests of a batch that gave no answer at all; they have left the scheduler."""
        return self._end(executor).batch

    def batch_hung(self, executor: ExecutorId) -> None:
        """Abandon the batch of `executor`; the thread that computes it still holds the weights."""
        run = self._running.pop(executor)
        self._residency.ledgers[self._residency.executors[executor].pool].hang(run.expert)
        self._discipline.ended(executor, run.expert, len(run.batch))
        self._discipline.residency_changed(run.expert)

    def hung_batch_ended(self, pool: PoolId, expert: ExpertId) -> None:
        self._residency.ledgers[pool].release_hung(expert)
        self._discipline.residency_changed(expert)

    def load_hung(self, load: Load) -> tuple[Request, ...]:
        """Stop waiting for `load`, whose bytes stay taken.

        Takes out and returns the requests that no other pool can serve: they arrive again when the load has ended.
        """
        residency, pool, expert = self._residency, load.pool, load.expert
        residency.stuck[pool, expert] = residency.ledgers[pool].bytes_of(expert)
        residency.ledgers[pool].hold(expert)
        residency.forget_reader(residency.pools[pool].host, [expert])
        self._free_source(load)
        self._operator.load_failed(pool, expert)
        residency.room_changed()
        self._residency_changed(expert)
        if not self.is_stuck(expert):
            return ()
        return self._take_out(expert)

    def hung_load_ended(self, load: Load) -> None:
        """Give back the bytes of a hung load, whose weights were unloaded: its pool may load the expert again."""
        self._residency.ledgers[load.pool].give_back(self._residency.stuck.pop((load.pool, load.expert)))
        self._residency.room_changed()
        self._residency_changed(load.expert)

    def is_stuck(self, expert: ExpertId) -> bool:
        residency = self._residency
        if not any(stuck == expert for _, stuck in residency.stuck):
            return False
        return not (residency.homes(expert) or residency.is_coming(expert) or residency.is_taken(expert, "gpu", "cpu"))

    def fail(self, expert: ExpertId, reason: str) -> tuple[Request, ...]:
        """Take `expert` out of use until the next `replace_facts`, and return its requests, which fail."""
        self._residency.failures[expert] = Failure(reason, math.inf)
        return self._take_out(expert)

    def limit_batch(self, executor: ExecutorId, expert: ExpertId, limit: int) -> None:
        """Limit batches of this architecture on `executor`'s device: a larger one ran out of memory."""
        self._residency.limit_batch(self._residency.executors[executor].pool, expert, limit)
        self._discipline.rebuild()

    def misfits(self, experts: Iterable[ExpertFacts]) -> list[str]:
        """Return why `experts` would be refused: used by the rules, but too large for each pool beside its pins."""
        names = {name_of(facts.expert) for facts in experts}
        rooms = {
            pool: self._residency.targets_bytes[pool]
            - sum(self._residency.bytes_of(each) for each in ledger.pinned if name_of(each) not in names)
            for pool, ledger in self._residency.ledgers.items()
            if self._residency.pools[pool].processor != "ram"
        }
        most = max(rooms.values(), default=0)
        return [
            f"expert {name_of(facts.expert)} needs {facts.weights_bytes} bytes and the largest pool has room for"
            f" {most}: raise a device's expert_memory, or unpin experts"
            for facts in experts
            if facts.usage > 0.0 and facts.weights_bytes > most
        ]

    def replace_facts(self, experts: Iterable[ExpertFacts]) -> tuple[Request, ...]:
        """Replace the experts; return the requests of those that are gone or no longer fit anywhere.

        Residents that are gone are unloaded when idle; failed loads are retried.
        """
        known = {facts.expert: facts for facts in experts}
        self._residency.failures.clear()
        for pool, ledger in self._residency.ledgers.items():
            for expert in (*ledger.resident, *ledger.loading):
                if expert in known:
                    self._residency.leaving[pool].pop(expert, None)
                else:
                    self._residency.leaving[pool][expert] = None
        queued = self._discipline.queued()
        self._residency.set_facts(known.values())
        gone = [expert for expert in queued if expert not in known or self._residency.why_never(expert) is not None]
        self._discipline.rebuild()
        lost = tuple(request for expert in gone for request in self._take_out(expert))
        self._operator.forget(expert for expert in tuple(self._operator.pins()) if expert not in known)
        return lost

    # Requests of the operator (each raises OperationRefusedError)

    def pin(self, expert: ExpertId, pool: PoolId | None) -> PoolId:
        return self._operator.pin(expert, pool)

    def unpin(self, expert: ExpertId, pool: PoolId | None) -> None:
        self._operator.unpin(expert, pool)

    def unload(self, expert: ExpertId, pool: PoolId | None) -> None:
        self._operator.unload(expert, pool)

    def set_budget(self, pool: PoolId, budget_bytes: int) -> None:
        self._operator.set_budget(pool, budget_bytes)

    # Devices of other PCs

    def pool_lost(self, pool: PoolId) -> None:
        """Note that `pool` has lost its residents: each leaves as soon as its last batch or its load is reported."""
        self._residency.forget_reader(self._residency.pools[pool].host, self._residency.readers)
        ledger = self._residency.ledgers[pool]
        for expert in (*ledger.resident, *ledger.loading):
            self._residency.leaving[pool][expert] = None
            self._residency_changed(expert)

    def pool_back(self, pool: PoolId) -> None:
        """Ask `pool`, which is empty, again for every expert, and fill it as at the start."""
        self._residency.forgive(math.inf)  # what failed may have failed because this pool was gone
        failures = self._residency.failures
        for expert in [expert for expert, failure in failures.items() if failure.retry_s != math.inf]:
            del failures[expert]
        self._fill[pool] = self._first_fill().get(pool, []) if self._preset.initial_fill else []

    # Reading the state

    def predicted_s(self, executor: ExecutorId, expert: ExpertId, images: int) -> float | None:
        """Return the expected seconds of a batch; None if nothing was profiled or measured."""
        facts = self._residency.experts.get(expert)
        device = self._residency.pools[self._residency.executors[executor].pool].device
        if facts is None:
            return None
        row = self._residency.matrix.of(device, facts.architecture)
        if self._residency.matrix.was_measured(device, facts.architecture):
            return row.k_s * images + row.b_s
        least_s = self._measured.least_s(facts.architecture, resident=True)
        return least_s * images if least_s > 0.0 else None

    @property
    def pools(self) -> tuple[PoolId, ...]:
        return tuple(self._residency.pools)

    def budgets(self) -> dict[PoolId, int]:
        return dict(self._residency.targets_bytes)

    def snapshot(self) -> Snapshot:
        pools = tuple(
            PoolSnapshot(pool, held.resident, held.loading, tuple(held.pinned), held.used_bytes, held.budget_bytes)
            for pool, held in self._residency.ledgers.items()
        )
        running = {executor: run.expert for executor, run in self._running.items()}
        failed = {expert: failure.reason for expert, failure in self._residency.failures.items()}
        return Snapshot(pools, self._discipline.queued(), running, failed)

    # Parts

    def _first_fill(self) -> dict[PoolId, list[ExpertId]]:
        """Return the experts to load first: the most used where they can run, the next most used in the RAM tier."""
        pools = self._residency.pools.values()
        experts = self._residency.experts
        fill = initial_fill(experts.values(), [facts for facts in pools if facts.processor != "ram"])
        filled = {expert for of_pool in fill.values() for expert in of_pool}
        rest = [facts for facts in experts.values() if facts.expert not in filled]
        if self._preset.binding == "late":
            fill |= initial_fill(rest, [facts for facts in pools if facts.processor == "ram"])
        return {pool: list(of_pool) for pool, of_pool in fill.items()}

    def _least_s(self, expert: ExpertId) -> float:
        facts = self._residency.experts.get(expert)
        if facts is None:
            return 0.0
        resident = bool(self._residency.homes(expert)) or self._residency.is_coming(expert)
        return self._measured.least_s(facts.architecture, resident=resident)

    def _wants_of_all(self, pool: PoolId, wants: Iterable[Want]) -> Iterator[Want]:
        """Yield pinned experts first, then those with images; the initial fill comes last."""
        yield from self._operator.wants(pool)
        yield from wants
        if self._residency.ledgers[pool].loading_count == 0:
            fill = self._fill.get(pool, [])
            while fill:
                expert = fill.pop(0)
                is_somewhere = self._residency.homes(expert) or self._residency.is_coming(expert)
                if not is_somewhere and not self._residency.is_refused(pool, expert):
                    yield Want(expert, "startup", "none")

    def _first_load(self, pool: PoolId, wants: Iterable[Want]) -> Load | None:
        residency, ledger = self._residency, self._residency.ledgers[pool]
        # The least bytes that had no room, by what a load may evict: larger experts have none either.
        refused_bytes: dict[Evict, int] = {}
        for want in wants:
            if ledger.holds(want.expert) or want.expert not in residency.experts:
                continue
            need_bytes = residency.bytes_of(want.expert)
            if need_bytes >= refused_bytes.get(want.evict, need_bytes + 1):
                continue
            load = self._plan(pool, want)
            if load is not None:
                self._begin(load, want)
                return load
            refused_bytes[want.evict] = need_bytes
        return None

    def _plan(self, pool: PoolId, want: Want) -> Load | None:
        """Return the load of `want` with its evictions. Mark the experts that must become idle for an urgent one."""
        ledger, expert = self._residency.ledgers[pool], want.expert
        need_bytes = self._residency.bytes_of(expert)
        evict = ledger.plan_room(need_bytes, self._discipline.victims(pool, want.evict))
        if evict is not None:
            return Load(pool, expert, evict, want.cause, self._residency.source_for(pool, expert))
        if want.evict == "any" and not self._residency.draining[pool]:
            patient = ledger.plan_room(need_bytes, self._discipline.victims(pool, "any"), when_idle=True)
            self._residency.draining[pool].update(dict.fromkeys(patient or ()))
        return None

    def _begin(self, load: Load, want: Want) -> None:
        self._residency.draining[load.pool].clear()
        self._residency.ledgers[load.pool].begin_load(load.expert, self._residency.bytes_of(load.expert), load.evict)
        if load.source is not None:
            self._residency.ledgers[load.source].use(load.expert)
            self._residency.copying[load.pool] += 1
            self._residency.copied_from[load.source] += 1
        else:
            readers = self._residency.readers.setdefault(load.expert, {})
            readers[self._residency.pools[load.pool].host] = None
        self._discipline.granted(want, load.pool)
        for expert in (*load.evict, load.expert):
            self._residency_changed(expert)

    def _free_source(self, load: Load) -> None:
        if load.source is not None:
            self._residency.ledgers[load.source].release(load.expert)
            self._residency.copying[load.pool] -= 1
            self._residency.copied_from[load.source] -= 1
            self._discipline.residency_changed(load.expert)

    def _residency_changed(self, expert: ExpertId) -> None:
        if self._deadlines:
            self._deadlines.refresh(expert)
        self._discipline.residency_changed(expert)

    def _take_out(self, expert: ExpertId) -> tuple[Request, ...]:
        requests = self._discipline.requests_of(expert)
        for request in requests:
            self._discard(request)
        return requests

    def _discard(self, request: Request) -> None:
        self._queued_count -= 1
        self._deadlines.discard(request)
        self._discipline.discard(request)

    def _end(self, executor: ExecutorId) -> Run:
        run = self._running.pop(executor)
        self._residency.ledgers[self._residency.executors[executor].pool].release(run.expert)
        self._discipline.ended(executor, run.expert, len(run.batch))
        return run

    def _why_not(self, expert: ExpertId, now: float) -> str | None:
        failure = self._residency.failures.get(expert)
        if failure is not None and now < failure.retry_s:
            return failure.reason
        if expert not in self._residency.experts:
            return f"expert {name_of(expert)} is not in the catalog"
        return self._residency.why_never(expert)

    def _wait(self, now: float) -> Wait:
        """Wait until time changes something: a due group, a deadline, a retry. A report may come earlier."""
        until_s = self._discipline.next_turn_s(now)
        for time_s in (self._deadlines.next_s(), self._residency.next_forgiven_s()):
            if time_s is not None and (until_s is None or time_s < until_s):
                until_s = time_s
        self.next_turn_s = until_s
        return NOTHING if until_s is None else Wait(until_s)
