"""The policies by name: each a combination of switches, so that each idea can be measured alone (DESIGN.md §5, §7)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Preset:
    """`binding` is when a request gets its executor: at its arrival (first come, first served) or when one is free."""

    name: str
    binding: Literal["arrival", "late"]
    #: All requests go through the first executor, whose pool is then the only one in use.
    single_executor: bool
    #: Images per batch at most, whatever a pool would allow; None: the pool decides.
    batch_bound: int | None
    #: Most used experts are loaded before anybody asks for them (CoServe §4.1).
    initial_fill: bool
    #: Loads under way per pool.
    loads_in_flight: int
    #: Share of batches, and of loads, that requests past `max_wait_s` may pull forward.
    age_share: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """Seconds: how long a request waits before it is urgent, how near a deadline is, when a failed load is retried."""

    max_wait_s: float = 10.0
    deadline_margin_s: float = 1.0
    retry_s: float = 30.0


PRESETS: dict[str, Preset] = {
    "samba": Preset(
        name="samba",
        binding="arrival",
        single_executor=True,
        batch_bound=1,
        initial_fill=False,
        loads_in_flight=1,
        age_share=0.0,
    ),
    "coserve-plus": Preset(
        name="coserve-plus",
        binding="late",
        single_executor=False,
        batch_bound=None,
        initial_fill=True,
        loads_in_flight=3,
        age_share=0.25,
    ),
}


class UnknownPolicyError(ValueError):
    """A policy name that is not in `PRESETS`."""


def preset(name: str) -> Preset:
    found = PRESETS.get(name)
    if found is None:
        raise UnknownPolicyError(f"unknown policy {name!r}: expected one of {', '.join(PRESETS)}")
    return found
