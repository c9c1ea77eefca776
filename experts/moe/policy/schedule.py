"""The order in which waiting generations begin: by SLO slack (eMoE §3.5, Algorithm 1).

The engine calls `admit(waiting, running, now)` before each decode step, prefills the generations returned, and reports
lengths and loading times to `TaskProfiles`. Times are seconds on one clock.

Our reading of the paper's listing (docs/language-models.md): T is the tokens that scheduled requests may come to hold,
padding included, not the length of a queue; line 6 adds R, not S; waiting counts towards a latency; a lost SLO holds
nothing up.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Requests per row that one call considers, so that a long queue costs less than a step.
_CANDIDATES_PER_ROW = 4
#: Expected rest of a request that outlives its profile, as a share of the profile (eMoE §3.5).
_OVERTIME_SHARE = 0.05
#: A request waits for others only while it keeps as much slack as it has spent.
_WAITING_SHARE = 0.5
#: Requests of a task that its profile averages.
_PROFILE_REQUESTS = 64
#: Tasks with a profile; the least recently updated one is dropped.
_MAX_TASKS = 1024


@dataclass(frozen=True, slots=True)
class Generation:
    """One request for text. `slo_s` is from arrival to the last token, `began_s` the time of its prefill, if any."""

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
    """Limits of a batch: rows, and tokens in them (T_max), where each row counts as the longest may become.

    A request that alone is beyond `tokens` is never admitted: intake refuses it.
    """

    rows: int
    tokens: int

    def fits(self, scheduled: Sequence[Generation], candidate: Generation) -> bool:
        rows = len(scheduled) + 1
        longest = max((generation.held_tokens for generation in scheduled), default=0)
        return rows <= self.rows and rows * max(longest, candidate.held_tokens) <= self.tokens


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs of a step: `step_s + row_s × rows` with a past, `step_s + prefill_token_s × tokens` for a prefill."""

    prefill_token_s: float
    step_s: float
    row_s: float

    def decode_s(self, rows: int) -> float:
        return self.step_s + self.row_s * rows

    def prefill_s(self, tokens: int) -> float:
        return self.step_s + self.prefill_token_s * tokens


class TaskProfiles:
    """Expected output length and loading latency of each task: given at first, then averages of the last requests."""

    def __init__(
        self, output_tokens: Mapping[str, float] | None = None, loading_s: Mapping[str, float] | None = None
    ) -> None:
        self._output: dict[str | None, tuple[float, int]] = {
            task: (mean, _PROFILE_REQUESTS) for task, mean in (output_tokens or {}).items()
        }
        self._loading: dict[str | None, tuple[float, int]] = {
            task: (mean, _PROFILE_REQUESTS) for task, mean in (loading_s or {}).items()
        }

    def record_length(self, generation: Generation) -> None:
        """Learn from a complete request; `generated` is its length."""
        _learn(self._output, generation.task, generation.generated)

    def record_loading(self, task: str | None, seconds: float) -> None:
        """Learn the loading time of an admission while no other request of its task was running."""
        _learn(self._loading, task, seconds)

    def remaining(self, generation: Generation) -> int:
        """Return G, the tokens still expected, at least one. Without a profile, all that the request may generate."""
        profiled = self._output.get(generation.task, (float(generation.max_new_tokens), 0))[0]
        rest = math.ceil(profiled) - generation.generated
        if rest <= 0:
            rest = math.ceil(profiled * _OVERTIME_SHARE)
        return max(1, min(rest, generation.max_new_tokens - generation.generated))

    def loading_s(self, task: str | None) -> float:
        """Return ΔE, the loading time of a task that is not running yet."""
        return self._loading.get(task, (0.0, 0))[0]


class SloSlack:
    """eMoE's Algorithm 1: least slack first; a request that would make a running one miss its SLO waits for its end.

    Slack is the rest of the SLO after the expected rest of the request (Eq. 3). *Ours*: only a request with enough
    slack waits for others. A request that has lost its SLO waits behind those that can keep theirs, up to `patience_s`
    after arrival, and then goes first, as long as such requests hold no more than a quarter of the rows. A request
    without SLO has until `patience_s`. One that does not fit is passed over until then, and then holds up those behind
    it: otherwise a long text would wait for ever while short ones come and go.
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
            if not self._limits.fits([*running, *new], candidate):
                if now - candidate.arrived_s > self._patience_s:
                    break
            elif not self._should_wait(running, new, candidate, now):
                new.append(candidate)
        return tuple(new)

    def slack_s(self, generation: Generation, running: Sequence[Generation], now: float) -> float:
        """Return the seconds that it may still wait if it then runs beside as many as now."""
        loading_s = (
            0.0 if any(row.task == generation.task for row in running) else self._profiles.loading_s(generation.task)
        )
        decode_s = self._costs.decode_s(len(running) + 1) * self._profiles.remaining(generation)
        rest_s = loading_s + self._costs.prefill_s(generation.prompt_tokens) + decode_s
        return self._deadline(generation) - now - rest_s

    def _order(self, waiting: Sequence[Generation], running: Sequence[Generation], now: float) -> list[Generation]:
        # By their wait, not their age: if texts take longer than patience, all running ones would count as overdue.
        waits_s = [row.began_s - row.arrived_s for row in running if row.began_s is not None]
        overdue_rows = sum(wait_s > self._patience_s for wait_s in waits_s)
        overdue_left = max(1, self._limits.rows // 4) - overdue_rows
        ranked: list[tuple[int, float, int, Generation]] = []
        for place, generation in enumerate(waiting):
            slack_s = self.slack_s(generation, running, now)
            if now - generation.arrived_s > self._patience_s and overdue_left > 0:
                ranked.append((0, generation.arrived_s, place, generation))
                overdue_left -= 1
            elif slack_s >= 0:
                ranked.append((1, slack_s, place, generation))
            else:
                ranked.append((2, generation.arrived_s, place, generation))
        ranked.sort(key=lambda item: item[:3])
        return [item[3] for item in ranked[: _CANDIDATES_PER_ROW * self._limits.rows]]

    def _should_wait(
        self, running: Sequence[Generation], new: Sequence[Generation], candidate: Generation, now: float
    ) -> bool:
        """Return True if others would miss their SLO beside `candidate`, and it has time to wait for their end."""
        before = self._latencies(running, new)
        after = self._latencies(running, [*new, candidate])
        ends_s = 0.0
        for generation, without_s, with_s in zip([*running, *new], before, after[:-1], strict=True):
            if without_s <= self._deadline(generation) - now < with_s:
                ends_s = max(ends_s, without_s)
        return 0.0 < ends_s <= _WAITING_SHARE * self.slack_s(candidate, running, now)

    def _latencies(self, running: Sequence[Generation], new: Sequence[Generation]) -> list[float]:
        """Return the seconds until each of `running` and `new` ends if `new` begins now (Eq. 3 without past time).

        All rows run until the one with the fewest tokens left ends; then one row less, and so on.
        """
        tasks = {generation.task for generation in running}
        entering = [task for task in dict.fromkeys(generation.task for generation in new) if task not in tasks]
        elapsed_s = sum(self._profiles.loading_s(task) for task in entering)
        if new:
            elapsed_s += self._costs.prefill_s(sum(generation.prompt_tokens for generation in new))
        together = [*running, *new]
        rest = [self._profiles.remaining(generation) for generation in together]
        ends = [0.0] * len(together)
        done = 0
        for ended, place in enumerate(sorted(range(len(together)), key=rest.__getitem__)):
            elapsed_s += (rest[place] - done) * self._costs.decode_s(len(together) - ended)
            done = rest[place]
            ends[place] = elapsed_s
        return ends

    def _deadline(self, generation: Generation) -> float:
        allowed_s = self._patience_s if generation.slo_s is None else generation.slo_s
        return generation.arrived_s + allowed_s


def _learn(table: dict[str | None, tuple[float, int]], task: str | None, value: float) -> None:
    mean, count = table.pop(task, (0.0, 0))  # the table is in the order of updates
    count = min(count + 1, _PROFILE_REQUESTS)
    table[task] = (mean + (value - mean) / count, count)
    if len(table) > _MAX_TASKS:  # a client may invent a name for each request
        del table[next(iter(table))]
