"""Recounts: what ledgers, queues and groups keep as sums and lists must follow from the requests and residents."""

from collections import Counter

from daemon.policy.late.demand import DemandTable
from daemon.policy.late.groups import Group, Groups
from daemon.policy.paper.queues import ExecutorQueues
from daemon.policy.scheduler import Scheduler
from experts.ledger import Ledger
from experts.spec import ExpertId


def check_scheduler(scheduler: Scheduler) -> None:
    residency, discipline = scheduler._residency, scheduler._discipline
    if isinstance(discipline, DemandTable):
        check_groups(discipline._groups)
    elif isinstance(discipline, ExecutorQueues):
        check_queues(discipline)
    assert sum(discipline.queued().values()) == scheduler._queued_count
    for pool, ledger in residency.ledgers.items():
        check_ledger(ledger)
        runs = sum(residency.executors[executor].pool == pool for executor in scheduler._running)
        hung = sum(ledger.hung(expert) for expert in ledger.resident)
        users = sum(ledger.users(expert) for expert in ledger.resident)
        assert users == runs + residency.copied_from[pool] + hung, f"users of {pool}"


def check_ledger(ledger: Ledger) -> None:
    entries = ledger._entries.values()
    assert sum(entry.weights_bytes for entry in entries) + ledger._held_bytes == ledger.used_bytes
    assert 0 <= ledger.used_bytes <= ledger.budget_bytes == ledger.used_bytes + ledger.free_bytes
    assert sum(not entry.ready for entry in entries) == ledger.loading_count
    assert all(0 <= entry.hung <= entry.users and (entry.ready or not entry.users) for entry in entries)


def check_queues(queues: ExecutorQueues) -> None:
    counts: Counter[ExpertId] = Counter()
    for queue in queues._queues.values():
        work_ns = queue.running_ns
        for group in queue.groups:
            assert group.requests, f"an empty group waits at {queue.executor}"
            assert all(queues._groups.get(request_id) is group for request_id in group.requests)
            counts[group.expert] += len(group.requests)
            work_ns += group.cost.each_ns * len(group.requests) + group.overhead_ns
        assert work_ns == queue.work_ns
        assert queue.running is not None or not queue.running_ns
        assert all(group in queue.groups for group in queue.newest.values()), "a group that has gone would be joined"
    assert counts == queues.queued()
    assert counts.total() == len(queues._groups)


def check_groups(groups: Groups) -> None:
    groups.settle()
    assert groups.queued == sum(len(group.requests) for group in groups)
    assert groups.gpu_queued == sum(len(group.requests) for group in groups if group.on_gpu)
    assert groups.cpu_queued == sum(len(group.requests) for group in groups if group.copyable)
    for pool, shelf in groups.shelves.items():
        unwanted = groups.victims(pool, wanted=False)
        assert shelf.unwanted_bytes == sum(map(groups._residency.ledgers[pool].bytes_of, unwanted)), pool
    sent: Counter[ExpertId] = Counter()
    for group in groups if groups._foresight else ():
        for subsequent, units in groups._residency.then_units.get(group.expert, ()):
            sent[subsequent] += (len(group.requests) + group.running) * units
    for group in groups:
        assert group.promised == sent[group.expert], group.expert
        _check_place(groups, group)
    for waiting in (groups.absent, groups.staged):
        assert [group.age() for group in waiting] == sorted(group.age() for group in waiting)


def _check_place(groups: Groups, group: Group) -> None:
    expert, waits = group.expert, bool(group.requests)
    assert (group in list(groups.absent)) == (waits and group.absent), expert
    assert (group in list(groups.staged)) == (waits and group.staged), expert
    assert (expert in groups.expected) == (group.absent and not waits and group.promised > 0), expert
    for pool, shelf in groups.shelves.items():
        can_run = groups._residency.can_run(pool, expert)
        assert (expert in shelf.ready) == (waits and can_run and not shelf.is_ram), expert
        assert (expert in shelf.residents) == can_run, expert
