"""The policies by name, each a combination of switches (docs/architecture.md)."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Preset:
    """`binding` is when a request gets its executor: at its arrival, or when an executor is free to pull it."""

    name: str
    binding: Literal["arrival", "late"]
    #: All requests go through the first executor, whose pool is then the only one in use.
    single_executor: bool = False
    #: Each executor has an equal share of its device's memory for itself; else they share one pool.
    own_pools: bool = False
    #: How an executor's queue is chosen, for policies that bind a request at its arrival.
    assign: Literal["round robin", "least makespan"] = "round robin"
    #: Where in the queue: last, or behind the requests of the same expert.
    arrange: Literal["last", "behind its group"] = "last"
    #: A chain's next step goes to the front of the queue that ran the step before.
    chain_first: bool = False
    #: Order in which experts leave a full pool.
    evict: Literal["lru", "fifo", "two stages", "least wanted"] = "least wanted"
    #: Largest batch in images, even if a pool allows more; None: the pool decides.
    batch_bound: int | None = None
    #: The most used experts are loaded before the first request for them (CoServe §4.1).
    initial_fill: bool = True
    #: Loads under way per pool.
    loads_in_flight: int = 1
    #: Demand counts what queued preliminary experts will send on, not only what is queued.
    foresight: bool = False
    #: A GPU copies experts from the CPU's pool instead of reading them.
    across_devices: bool = True
    #: Where the disk binds and memory is full, small groups are finished first so that their experts can be evicted.
    makes_room: bool = False
    #: A GPU and a CPU divide groups by their backlogs, and the CPU prefers small batches; else both choose alike.
    balances: bool = False


@dataclass(frozen=True, slots=True)
class Tuning:
    """Seconds: a request's wait before its group is due, how near a deadline is, when a failed load is retried."""

    max_wait_s: float = 20.0
    deadline_margin_s: float = 1.0
    retry_s: float = 30.0


# The policies that the paper compares (CoServe §5.1, §5.3); each adds one idea to the one before.
_SAMBA = Preset(
    "samba", "arrival", single_executor=True, chain_first=True, evict="lru", batch_bound=1, initial_fill=False
)
_SAMBA_FIFO = replace(_SAMBA, name="samba-fifo", evict="fifo")
_SAMBA_PARALLEL = replace(_SAMBA, name="samba-parallel", single_executor=False, own_pools=True)
_NONE = Preset("coserve-none", "arrival", own_pools=True, evict="fifo")
_MANAGED = replace(_NONE, name="coserve-em", evict="two stages")
_ARRANGED = replace(_MANAGED, name="coserve-em-ra", arrange="behind its group")
_COSERVE = replace(_ARRANGED, name="coserve", assign="least makespan")

_LATE = Preset(
    name="coserve-plus",
    binding="late",
    evict="least wanted",
    loads_in_flight=3,
    foresight=True,
    makes_room=True,
    balances=True,
)
#: Late binding without one idea each: `coserve-plus-without-foresight` measures the gain of foresight.
WITHOUT: dict[str, Preset] = {
    "one-pool": replace(_LATE, own_pools=True),
    "initial-fill": replace(_LATE, initial_fill=False),
    "running-ahead": replace(_LATE, loads_in_flight=1),
    "foresight": replace(_LATE, foresight=False),
    "copies": replace(_LATE, across_devices=False),
    "making-room": replace(_LATE, makes_room=False),
    "balance": replace(_LATE, balances=False),
}
PRESETS: dict[str, Preset] = {
    policy.name: policy
    for policy in (_SAMBA, _SAMBA_FIFO, _SAMBA_PARALLEL, _NONE, _MANAGED, _ARRANGED, _COSERVE, _LATE)
}


class UnknownPolicyError(ValueError):
    """A policy name that is not in `PRESETS`."""


def preset(name: str) -> Preset:
    """Return a policy by name; `coserve-plus-without-IDEA` lacks an idea of `WITHOUT`. Raises UnknownPolicyError."""
    base, _, idea = name.partition("-without-")
    policy = WITHOUT.get(idea) if base == _LATE.name and idea else PRESETS.get(name)
    if policy is None:
        ideas = f"{_LATE.name}-without-{' or -'.join(WITHOUT)}"
        raise UnknownPolicyError(f"policy {name!r} is unknown: expected one of {', '.join(PRESETS)}, or {ideas}")
    return replace(policy, name=name)
