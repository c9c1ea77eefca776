"""Which waiting generations begin: by SLO slack (eMoE §3.5, Algorithm 1), or first come, first served.

The engine asks `admit(waiting, running, now)` before each decode step and prefills those that it names, in their order.
What ends is told to `TaskProfiles.ended`, what an admission loaded to `TaskProfiles.loaded`. Times are seconds on one
clock.

How the paper's listing is read (docs/decisions.md): T is the tokens that scheduled requests may come to hold, padding
included, not the length of a queue; line 6 adds R, not S; waiting counts towards a latency; an SLO that is lost holds
nobody up.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

#: Of requests in order, how many per row are looked at in one call: long queues must not cost more than a step.
_LOOKED_AT_PER_ROW = 4
#: What a request that outlives its profile is expected to generate yet, of its profile (eMoE §3.5).
_RESET = 0.05
#: A request may wait for others if it keeps as much slack as it spends on it.
_RELAXED = 0.5
#: The last so many requests of a task make its profile.
_MEMORY = 64
#: Tasks that have a profile at most; the one that was heard of longest ago goes.
_TASKS = 1024


@dataclass(frozen=True, slots=True)
class Generation:
    """One request for text. `slo_s`: from arrival to the last token; None where nobody asked for one.

    `began_s`: when it was taken in; None while it waits.
    """

    request: str
    task: str | None
    prompt_tokens: int
    max_new_tokens: int
    arrived_s: float
    slo_s: float | None = None
    generated: int = 0
    began_s: float | None = None

    @property
    def held_tokens(self) -> int:
        """Tokens that it may come to hold in the cache of keys and values."""
        return self.prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one batch may hold: rows, and tokens in them (T_max), each row as long as the longest may become.

    What alone is beyond `tokens` is never admitted: intake refuses it.
    """

    rows: int
    tokens: int

    def room(self, scheduled: Sequence[Generation], candidate: Generation) -> bool:
        rows = len(scheduled) + 1
        longest = max((one.held_tokens for one in scheduled), default=0)
        return rows <= self.rows and rows * max(longest, candidate.held_tokens) <= self.tokens


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A step with a past takes `step_s + row_s × rows`; a prefill `step_s + prefill_token_s × tokens`."""

    prefill_token_s: float
    step_s: float
    row_s: float

    def decode_s(self, rows: int) -> float:
        return self.step_s + self.row_s * rows

    def prefill_s(self, tokens: int) -> float:
        return self.step_s + self.prefill_token_s * tokens


class TaskProfiles:
    """Output length and loading latency of each task: given at first, then the average of the last requests."""

    def __init__(
        self, output_tokens: Mapping[str, float] | None = None, loading_s: Mapping[str, float] | None = None
    ) -> None:
        self._output: dict[str | None, tuple[float, int]] = {
            task: (mean, _MEMORY) for task, mean in (output_tokens or {}).items()
        }
        self._loading: dict[str | None, tuple[float, int]] = {
            task: (mean, _MEMORY) for task, mean in (loading_s or {}).items()
        }

    def ended(self, generation: Generation) -> None:
        """A request is complete: `generated` is its length."""
        _learn(self._output, generation.task, generation.generated)

    def loaded(self, task: str | None, seconds: float) -> None:
        """What the admission of a request of `task`, none of which was running, took to load."""
        _learn(self._loading, task, seconds)

    def remaining(self, generation: Generation) -> int:
        """G: tokens that it is expected to generate yet, at least one. Without a profile, all that it may."""
        profiled = self._output.get(generation.task, (float(generation.max_new_tokens), 0))[0]
        left = math.ceil(profiled) - generation.generated
        if left <= 0:
            left = math.ceil(profiled * _RESET)
        return max(1, min(left, generation.max_new_tokens - generation.generated))

    def loading_s(self, task: str | None) -> float:
        """ΔE of a task that is not running yet."""
        return self._loading.get(task, (0.0, 0))[0]


class GenerationScheduler(Protocol):
    def admit(self, waiting: Sequence[Generation], running: Sequence[Generation], now: float) -> tuple[Generation, ...]:
        """Those of `waiting` that begin with the next step. `waiting` is in the order of arrival. Changes nothing."""
        ...


class FirstCome:
    """First come, first served: the peer. The first that has no room holds up those behind it."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits

    def admit(
        self,
        waiting: Sequence[Generation],
        running: Sequence[Generation],
        now: float,  # noqa: ARG002 every scheduler is asked alike
    ) -> tuple[Generation, ...]:
        scheduled = list(running)
        for candidate in waiting:
            if not self._limits.room(scheduled, candidate):
                break
            scheduled.append(candidate)
        return tuple(scheduled[len(running) :])


class SloSlack:
    """eMoE's Algorithm 1: least slack first, and who would cost one that runs its SLO waits until that one has ended.

    Slack is what is left of the SLO after the expected rest of the request (Eq. 3). *Ours*: only a request with slack
    enough waits for others; who cannot make the SLO any more waits behind those who can, up to `patience_s` after
    arrival, and then goes first, as long as such requests hold no more than a quarter of the rows. A request without
    SLO has until `patience_s`. One without room for its tokens is passed over until then, and then holds up those
    behind it: a long text would wait for ever while short ones come and go.
    """

    def __init__(
        self, limits: BatchLimits, costs: StepCosts, profiles: TaskProfiles, *, patience_s: float = 60.0
    ) -> None:
        self._profiles = profiles
        self._limits = limits
        self._costs = costs
        self._patience_s = patience_s

    def admit(self, waiting: Sequence[Generation], running: Sequence[Generation], now: float) -> tuple[Generation, ...]:
        new: list[Generation] = []
        for candidate in self._order(waiting, running, now):
            if len(running) + len(new) >= self._limits.rows:
                break
            if not self._limits.room([*running, *new], candidate):
                if now - candidate.arrived_s > self._patience_s:
                    break
            elif not self._should_wait(running, new, candidate, now):
                new.append(candidate)
        return tuple(new)

    def slack_s(self, generation: Generation, running: Sequence[Generation], now: float) -> float:
        """Seconds that it may still wait if it then runs beside as many as now."""
        loading_s = (
            0.0 if any(one.task == generation.task for one in running) else self._profiles.loading_s(generation.task)
        )
        decode_s = self._costs.decode_s(len(running) + 1) * self._profiles.remaining(generation)
        rest_s = loading_s + self._costs.prefill_s(generation.prompt_tokens) + decode_s
        return self._deadline(generation) - now - rest_s

    def _order(self, waiting: Sequence[Generation], running: Sequence[Generation], now: float) -> list[Generation]:
        # Not by their age now: where texts take longer than patience, all that run would count, and nobody went first.
        began = [one.began_s - one.arrived_s for one in running if one.began_s is not None]
        overdue_rows = sum(1 for waited_s in began if waited_s > self._patience_s)
        overdue_left = max(1, self._limits.rows // 4) - overdue_rows
        ranked: list[tuple[int, float, int, Generation]] = []
        for place, one in enumerate(waiting):
            slack_s = self.slack_s(one, running, now)
            if now - one.arrived_s > self._patience_s and overdue_left > 0:
                ranked.append((0, one.arrived_s, place, one))
                overdue_left -= 1
            elif slack_s >= 0:
                ranked.append((1, slack_s, place, one))
            else:
                ranked.append((2, one.arrived_s, place, one))
        ranked.sort(key=lambda item: item[:3])
        return [item[3] for item in ranked[: _LOOKED_AT_PER_ROW * self._limits.rows]]

    def _should_wait(
        self, running: Sequence[Generation], new: Sequence[Generation], candidate: Generation, now: float
    ) -> bool:
        """Whether some who make their SLO miss it with `candidate`, and it has time to wait until they have ended."""
        before = self._latencies(running, new)
        after = self._latencies(running, [*new, candidate])
        ends_s = 0.0
        for one, without_s, with_s in zip([*running, *new], before, after[:-1], strict=True):
            if without_s <= self._deadline(one) - now < with_s:
                ends_s = max(ends_s, without_s)
        return 0.0 < ends_s <= _RELAXED * self.slack_s(candidate, running, now)

    def _latencies(self, running: Sequence[Generation], new: Sequence[Generation]) -> list[float]:
        """Seconds until each of `running` and `new` ends if `new` begins now (Eq. 3, less the time that has passed).

        While the one with the least left generates it, all rows are there; then one row less, and so on.
        """
        tasks = {one.task for one in running}
        entering = [task for task in dict.fromkeys(one.task for one in new) if task not in tasks]
        elapsed_s = sum(self._profiles.loading_s(task) for task in entering)
        if new:
            elapsed_s += self._costs.prefill_s(sum(one.prompt_tokens for one in new))
        together = [*running, *new]
        left = [self._profiles.remaining(one) for one in together]
        ends = [0.0] * len(together)
        done = 0
        for ended, place in enumerate(sorted(range(len(together)), key=left.__getitem__)):
            elapsed_s += (left[place] - done) * self._costs.decode_s(len(together) - ended)
            done = left[place]
            ends[place] = elapsed_s
        return ends

    def _deadline(self, generation: Generation) -> float:
        allowed_s = self._patience_s if generation.slo_s is None else generation.slo_s
        return generation.arrived_s + allowed_s


def _learn(table: dict[str | None, tuple[float, int]], task: str | None, value: float) -> None:
    mean, count = table.pop(task, (0.0, 0))  # last in the table is who was heard of last
    count = min(count + 1, _MEMORY)
    table[task] = (mean + (value - mean) / count, count)
    if len(table) > _TASKS:  # a client may invent a name for each request
        del table[next(iter(table))]
