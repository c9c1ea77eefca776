"""The order in which waiting texts begin: by SLO slack (eMoE §3.5, Algorithm 1). Times are seconds on one clock.

Our reading of the paper's listing (docs/language-models.md): T is the tokens that texts may come to hold, padding
included, not the length of a queue; waiting counts towards a latency; a lost SLO holds nothing up.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

#: Texts per row that one call considers, so that a long queue costs less than a step.
_CANDIDATES_PER_ROW = 4
#: Expected rest of a text that outlives its profile, as a share of the profile (eMoE §3.5).
_OVERTIME_SHARE = 0.05
#: A text waits for others only while it keeps as much slack as it has spent.
_WAITING_SHARE = 0.5
#: Texts of a task that its profile averages, and steps that a cost averages.
_PROFILE_TEXTS = 64
_COST_STEPS = 32
#: Tasks with a profile; the least recently updated one is dropped.
_MAX_TASKS = 1024


@dataclass(eq=False, slots=True)
class TextRequest:
    """One text from its request to its end. `tokens` is the prompt, `new` the answer so far.

    `slo_s` from arrival to the last token orders the queue; after `deadline_s` it ends without an answer. At its end
    it has a `text`, or the `reason` why it has none, and the `error` that broke its step.
    """

    request: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    task: str | None
    arrived_s: float
    slo_s: float | None = None
    deadline_s: float | None = None
    new: list[int] = field(default_factory=list[int])
    #: Time of its first token, and of its last one so far.
    first_s: float | None = None
    last_s: float = 0.0
    text: str | None = None
    reason: str | None = None
    error: Exception | None = None

    @property
    def held_tokens(self) -> int:
        """Tokens that it may come to hold in the cache of keys and values."""
        return len(self.tokens) + self.max_new_tokens

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of the tokens after the first; None without such."""
        if self.first_s is None or len(self.new) < 2:
            return None
        return (self.last_s - self.first_s) / (len(self.new) - 1)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a batch: rows, and tokens in them (T_max). Rows are padded: each counts as the longest may become.

    A text that alone is beyond `tokens` never begins: intake refuses it.
    """

    rows: int
    tokens: int

    def fits(self, running: Collection[TextRequest], candidate: TextRequest) -> bool:
        return len(running) < self.rows and batch_tokens([*running, candidate]) <= self.tokens


def batch_tokens(texts: Collection[TextRequest]) -> int:
    return len(texts) * max((text.held_tokens for text in texts), default=0)


@dataclass(slots=True)
class StepCosts:
    """Seconds of a decoding step and of a prompt's token: assumed at first, then moving means."""

    prefill_token_s: float = 0.001
    step_s: float = 0.02

    def record_prefill(self, tokens: int, seconds: float) -> None:
        self.prefill_token_s += (seconds / tokens - self.prefill_token_s) / _COST_STEPS

    def record_decode(self, seconds: float) -> None:
        self.step_s += (seconds - self.step_s) / _COST_STEPS


class TaskProfiles:
    """Expected output length and loading time of each task: averages of its last texts."""

    def __init__(self) -> None:
        self._output: dict[str | None, tuple[float, int]] = {}
        self._loading: dict[str | None, tuple[float, int]] = {}

    def record_length(self, text: TextRequest) -> None:
        _learn(self._output, text.task, len(text.new))

    def record_loading(self, task: str | None, seconds: float) -> None:
        """Learn the loading time of a text that began while no other one of its task was running."""
        _learn(self._loading, task, seconds)

    def remaining(self, text: TextRequest) -> int:
        """Return G, the tokens still expected, at least one. Without a profile, all that the text may have."""
        profiled = self._output.get(text.task, (float(text.max_new_tokens), 0))[0]
        rest = math.ceil(profiled) - len(text.new)
        if rest <= 0:
            rest = math.ceil(profiled * _OVERTIME_SHARE)
        return max(1, min(rest, text.max_new_tokens - len(text.new)))

    def loading_s(self, task: str | None) -> float:
        """Return ΔE, the loading time of a task that is not running yet."""
        return self._loading.get(task, (0.0, 0))[0]


def _learn(table: dict[str | None, tuple[float, int]], task: str | None, value: float) -> None:
    mean, count = table.pop(task, (0.0, 0))  # the table is in the order of updates
    count = min(count + 1, _PROFILE_TEXTS)
    table[task] = (mean + (value - mean) / count, count)
    if len(table) > _MAX_TASKS:  # a client may invent a name for each request
        del table[next(iter(table))]


class SloSlack:
    """eMoE's Algorithm 1: least slack first; a text that would make a running one miss its SLO waits for its end.

    Slack is the rest of the SLO after the expected rest of the text (Eq. 3). *Ours*: only a text with enough slack
    waits for others. A text that has lost its SLO waits behind those that can keep theirs, up to `patience_s` after
    arrival, and then goes first, as long as such texts hold no more than a quarter of the rows. A text without SLO has
    until `patience_s`. One that does not fit is passed over until then, and then holds up those behind it: otherwise a
    long text would wait for ever while short ones come and go.
    """

    def __init__(self, limits: BatchLimits, costs: StepCosts | None = None, *, patience_s: float = 60.0) -> None:
        self.limits = limits
        self.costs = costs or StepCosts()
        self.profiles = TaskProfiles()
        self._patience_s = patience_s

    def next_text(
        self, waiting: Collection[TextRequest], running: Collection[TextRequest], now: float
    ) -> TextRequest | None:
        if len(running) >= self.limits.rows:
            return None
        for candidate in self._order(waiting, running, now):
            if not self.limits.fits(running, candidate):
                if now - candidate.arrived_s > self._patience_s:
                    return None
            elif not self._should_wait(running, candidate, now):
                return candidate
        return None

    def _order(
        self, waiting: Collection[TextRequest], running: Collection[TextRequest], now: float
    ) -> Sequence[TextRequest]:
        # By their wait, not their age: if texts take longer than patience, all running ones would count as overdue.
        running_overdue = sum((text.ttft_s or 0.0) > self._patience_s for text in running)
        max_overdue = max(0, max(1, self.limits.rows // 4) - running_overdue)
        overdue = [text for text in waiting if now - text.arrived_s > self._patience_s][:max_overdue]

        def rank(text: TextRequest) -> tuple[int, float]:
            if text in overdue:
                return 0, text.arrived_s
            slack_s = self._slack_s(text, running, now)
            return (1, slack_s) if slack_s >= 0 else (2, text.arrived_s)

        return sorted(waiting, key=rank)[: _CANDIDATES_PER_ROW * self.limits.rows]

    def _should_wait(self, running: Collection[TextRequest], candidate: TextRequest, now: float) -> bool:
        """Return True if others would miss their SLO beside `candidate`, and it has time to wait for their end."""
        delay_s, ends_s = self._begin_s(candidate, running), 0.0
        for text in running:
            rest_s = self._decode_s(text)
            if rest_s <= self._until_deadline_s(text, now) < rest_s + delay_s:
                ends_s = max(ends_s, rest_s)
        return 0.0 < ends_s <= _WAITING_SHARE * self._slack_s(candidate, running, now)

    def _slack_s(self, text: TextRequest, running: Collection[TextRequest], now: float) -> float:
        return self._until_deadline_s(text, now) - self._begin_s(text, running) - self._decode_s(text)

    def _begin_s(self, text: TextRequest, running: Collection[TextRequest]) -> float:
        """Return the seconds of its loading and its prefill, in which running texts get no token."""
        loaded = any(other.task == text.task for other in running)
        loading_s = 0.0 if loaded else self.profiles.loading_s(text.task)
        return loading_s + self.costs.prefill_token_s * len(text.tokens)

    def _decode_s(self, text: TextRequest) -> float:
        return self.costs.step_s * self.profiles.remaining(text)

    def _until_deadline_s(self, text: TextRequest, now: float) -> float:
        return text.arrived_s + (self._patience_s if text.slo_s is None else text.slo_s) - now
