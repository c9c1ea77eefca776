"""Batches off the front of a group (CoServe §4.2, request splitting)."""

from daemon.policy.paper.arrange import QueuedGroup
from daemon.policy.request import Request, RequestId
from daemon.policy.residency import Residency

#: Requests that have gone are dropped from a group's list when there are this many and more than half of it.
DROP = 256


def bound(residency: Residency, group: QueuedGroup) -> int:
    """The largest batch now: the profiled maximum or what free memory allows, whichever is less."""
    return residency.max_batch(group.queue.pool, group.expert)


def cut(group: QueuedGroup, limit: int) -> tuple[Request, ...]:
    """Take the next batch of at most `limit` requests out of `group`."""
    batch = group.requests[group.first : group.first + limit] if group.holes is None else _past_holes(group, limit)
    group.first += len(batch)
    group.size -= len(batch)
    if group.first > DROP and 2 * group.first > len(group.requests):
        del group.requests[: group.first]
        group.first = 0
    return tuple(batch)


def _past_holes(group: QueuedGroup, limit: int) -> list[Request]:
    """The next batch where some requests have left without running; moves `first` past those."""
    batch: list[Request] = []
    holes = group.holes if group.holes is not None else set[RequestId]()
    at = group.first
    while len(batch) < limit and at < len(group.requests):
        request = group.requests[at]
        at += 1
        if request.request_id in holes:
            holes.discard(request.request_id)
        else:
            batch.append(request)
    group.first = at - len(batch)
    if not holes:
        group.holes = None
    return batch
