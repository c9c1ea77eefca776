"""What the results keep of one expert's answer, of one load and of the weights that answered (RESULTS.md).

Tables `stages`, `expert_switches`, `expert_versions`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from daemon.dispatch.orders import Answered, BatchOrder, BatchReport, LoadEnd, device_of
from daemon.policy.actions import Run
from daemon.policy.request import PoolId, Request
from daemon.records import BatchDone, ExpertSwitch, Stage


@dataclass(frozen=True, slots=True)
class FreshLoad:
    """A load that no batch has run after yet: the first one tells of it. `ended_s` is of the drive's clock."""

    load_ms: float
    ended_s: float

    def held_up_ms(self, batch: Sequence[Request]) -> float:
        """How long the first of `batch` waited for this load; 0 where it came later: start-up, a prefetch in time."""
        since_s = min(request.arrived_s for request in batch)
        return min(self.load_ms, max(0.0, self.ended_s - since_s) * 1000.0)


def stage_of(
    request: Request, result: Answered, order: BatchOrder, report: BatchReport, pool: PoolId, load_ms: float
) -> Stage:
    """`load_ms` is how long this batch waited for a load, 0 where its expert was resident already."""
    return Stage(
        expert=request.expert,
        expert_version=order.spec.version,
        label=result.answer.label,
        confidence=result.answer.confidence,
        detections=result.answer.detections,
        device=device_of(pool),
        executor=report.executor,
        batch_id=report.batch_id,
        batch_size=len(report.results),
        queued_ms=max(0.0, report.started_s - request.arrived_s) * 1000.0,
        load_ms=load_ms,
        infer_ms=report.infer_ms,
    )


def batch_of(
    run: Run, order: BatchOrder, report: BatchReport, pool: PoolId, load_ms: float, wall_ahead_s: float
) -> BatchDone:
    """`wall_ahead_s` is what the wall clock shows more than the drive's."""
    return BatchDone(
        executor=report.executor,
        device=device_of(pool),
        expert=run.expert,
        architecture=order.spec.architecture,
        step=run.batch[0].step,
        images=len(run.batch),
        started_wall_s=report.started_s + wall_ahead_s,
        ended_wall_s=report.ended_s + wall_ahead_s,
        load_ms=load_ms,
        infer_ms=report.infer_ms,
    )


def switch_of(end: LoadEnd, at_wall_s: float) -> ExpertSwitch:
    load = end.load
    return ExpertSwitch(
        at_wall_s=at_wall_s,
        executor=load.pool,
        device=device_of(load.pool),
        loaded=load.expert,
        evicted=load.evict,
        bytes=end.bytes,
        load_ms=end.load_ms,
        tier=end.tier,
        cause=load.cause,
    )
