"""Events on the line, counted and timed by Prometheus' own client, and gauges sampled at scrape time.

Never labelled by expert, serial, source or board: the values of a label stay few however long the line runs.
"""

from collections import Counter as Sums
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from daemon.records import BatchDone, ExpertSwitch, Generation, Image, Message
from daemon.wire.messages import Answer, Code
from routing_rules.routes import GUARDS, VerdictName

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)
#: Steps of a chain beyond this one count as it.
_LAST_STEP = 9
_ANSWERS = ("accepted", "duplicate", "rejected", "busy")
#: The usual reasons of `unknown`; others appear when they do.
_REASONS = ("deadline", "expert_failed", "bad_image", "no_expert")


class Metrics:
    """Counts since the start; each driver reports its own events, from its own thread."""

    def __init__(self) -> None:
        disable_created_metrics()  # the creation time of a series is of no use, and would double the number of series
        self.registry = CollectorRegistry()
        self.accepted_count = 0
        self.completed_count = 0
        ProcessCollector(registry=self.registry)
        self._intake()
        self._begin_at_zero()
        self._stages()
        self._texts()
        # Cached: `labels` costs more than the counting.
        self._answer_of, self._verdict_of = cache(self._answers.labels), cache(self._verdicts.labels)
        self._queued_at = cache(self._queued.labels)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"coserve_{name}", what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, *labels: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(f"coserve_{name}", what, labels, buckets=buckets, registry=self.registry)

    def _intake(self) -> None:
        self._accepted = self._counter("images_accepted", "Images made durable")
        self._answers = self._counter("intake_answers", "Answers to publishers", "type")
        self._rejects = self._counter("intake_rejects", "Messages that will never be accepted", "code")
        self.acceptance = self._histogram(
            "acceptance_seconds", "From an image's admission at intake to its acceptance, which is durable"
        )
        self._verdicts = self._counter("verdicts", "Images with a durable verdict", "verdict", "reason")
        self._latency = self._histogram("verdict_latency_seconds", "From acceptance to the durable verdict")
        self._boards = self._counter("boards", "Board attempts that closed", "verdict", "reason")
        self._reviews = self._counter("reviews", "Decisions of people, by what they decided", "verdict")

    def _begin_at_zero(self) -> None:
        """Create series at zero: one that appears with its first event has no rate, and raises no alert."""
        for kind in _ANSWERS:
            self._answers.labels(kind)
        for code in get_args(Code):
            self._rejects.labels(code)
        for verdict in ("pass", "fail", "review"):
            self._verdicts.labels(verdict, "")
        for reason in _REASONS:
            self._verdicts.labels("unknown", reason)
        for guard in GUARDS:
            self._verdicts.labels("review", guard)
        for verdict in get_args(VerdictName):
            self._boards.labels(verdict, "complete")
            self._boards.labels(verdict, "time_limit")
            self._reviews.labels(verdict)

    def _stages(self) -> None:
        where = ("step", "architecture", "device")
        self._queued = self._histogram("stage_queued_seconds", "Wait of an image before a step of its chain", *where)
        self._load = self._histogram("stage_load_seconds", "Load that a batch had to wait for, where it had to", *where)
        self._infer = self._histogram("stage_inference_seconds", "A batch in its network and head", *where)
        self._batch = self._histogram("batch_images", "Images of a batch", *where, buckets=_IMAGES)
        self._switches = self._counter("expert_switches", "Loads into a pool after start-up", "device", "tier", "cause")
        self._loaded = self._counter("expert_loaded_bytes", "Bytes loaded into pools", "device")
        self._pruned = self._counter("pruned", "Images and boards that retention took out", "what")

    def _texts(self) -> None:
        self._texts_accepted = self._counter("texts_accepted", "Requests for text made durable")
        self._texts_done = self._counter("texts", "Requests for text finished", "status", "reason")
        self._text_tokens = self._counter("text_tokens", "Tokens generated")
        self._text_fetches = self._counter("text_expert_fetches", "Loads of language models' experts")
        self._first_token = self._histogram("text_first_token_seconds", "From acceptance to the first token")
        self._next_token = self._histogram("text_next_token_seconds", "Time per further token")

    # Images

    def accepted(self, images: Sequence[Image]) -> None:
        self.accepted_count += len(images)
        self._accepted.inc(len(images))

    def answered(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._answer_of(answer.kind).inc()
            if answer.code is not None:
                self._rejects.labels(answer.code).inc()

    def batch_done(self, batch: BatchDone) -> None:
        where = (str(min(batch.step, _LAST_STEP)), batch.architecture, batch.device)
        self._batch.labels(*where).observe(batch.images)
        for step, waited_ms in batch.waits:
            self._queued_at(min(step, _LAST_STEP), *where[1:]).observe(waited_ms / 1000)
        self._infer.labels(*where).observe(batch.infer_ms / 1000)
        if batch.load_ms:
            self._load.labels(*where).observe(batch.load_ms / 1000)

    def switched(self, switch: ExpertSwitch) -> None:
        self._loaded.labels(switch.device).inc(switch.bytes)
        if switch.cause != "startup":
            self._switches.labels(switch.device, switch.tier, switch.cause).inc()

    def published(self, messages: Sequence[Message]) -> None:
        for message in messages:
            kind, _, _ = message.topic.partition("/")
            if kind == "inspection":
                self._verdict_of(message.body["verdict"], message.body["reason"] or "").inc()
                self._latency.observe(message.body["latency_ms"] / 1000)
            elif kind == "board":
                self._boards.labels(message.body["verdict"], message.body["reason"] or "").inc()

    def completed(self, images: int) -> None:
        self.completed_count += images

    def reviewed(self, verdict: str) -> None:
        self._reviews.labels(verdict).inc()

    def pruned(self, what: str, count: int) -> None:
        self._pruned.labels(what).inc(count)

    # Texts

    def texts_accepted(self, requests: int) -> None:
        self._texts_accepted.inc(requests)

    def text_finished(self, outcome: Generation) -> None:
        self._texts_done.labels("unknown" if outcome.text is None else "done", outcome.reason or "").inc()
        self._text_tokens.inc(outcome.new_tokens or 0)
        self._text_fetches.inc(outcome.expert_fetches or 0)
        for histogram, value_ms in ((self._first_token, outcome.ttft_ms), (self._next_token, outcome.tpot_ms)):
            if value_ms is not None:
                histogram.observe(value_ms / 1000)

    def exposition(self) -> str:
        return generate_latest(self.registry).decode()


STATES = ("starting", "ready", "degraded", "draining")


#: The line as it is now (Operations.facts). `scheduler` is the last status of the drive, empty before the first.
Facts = Mapping[str, Any]


class Gauges(Collector):
    """Samples the line once for each scrape, in the thread of the scrape."""

    def __init__(self, look: Callable[[], Facts]) -> None:
        self._look = look
        self._log: Any = structlog.get_logger("metrics")

    def collect(self) -> Iterable[Metric]:
        try:
            facts = self._look()
        except Exception:  # noqa: BLE001 - counters are reported all the same
            self._log.exception("gauges_failed")
            return
        for part in (_line, _scheduler, _beside, _models):
            yield from part(facts)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: else the registry would sample a line that has not started."""
        return ()


def _line(facts: Facts) -> Iterator[Metric]:
    yield _gauge("build_info", "What runs", {(facts["version"], facts["policy"]): 1}, "version", "policy")
    yield _gauge("rules_info", "Rules in force", {facts["rules_version"]: 1}, "rules_version")
    states = {state: float(state == facts["state"]) for state in STATES}
    yield _gauge("state", "1 for the state that the line is in, 0 for the others", states, "state")
    yield _gauge("ready", "Whether images are taken and judged, as /readyz says", float(facts["is_ready"]))
    yield _gauge("probe_held_seconds", "How long one thread has kept the probe that goes through all", facts["held_s"])
    yield _gauge("backlog_images", "Accepted images without a verdict", facts["backlog"])
    yield _gauge("backlog_bytes", "Bytes of accepted images without a verdict", facts["backlog_bytes"])
    if facts["last_seq"] is not None:
        yield _gauge("last_seq", "The newest number of the results stream", facts["last_seq"])
    yield _gauge("alarm_active", "Active alarms of each alarm of the rules", facts["alarm_counts"], "alarm")
    yield _gauge("database_wal_bytes", "The database's write-ahead log", facts["wal_bytes"])


def _scheduler(facts: Facts) -> Iterator[Metric]:
    known = facts["scheduler"]
    if not known:
        return
    pools, executors = known["pools"], known["executors"]
    yield _by_device("expert_memory_used_bytes", "Bytes of experts in memory", pools, "used_bytes")
    yield _by_device("expert_memory_budget_bytes", "Bytes that experts may have in memory", pools, "budget_bytes")
    yield _by_device("resident_experts", "Experts in memory", pools, "experts")
    queued, unloaded = known["queued"]["by_device"], known["queued"]["unloaded"]
    yield _gauge("queued_requests", "Requests that wait for experts resident on a device", queued, "device")
    yield _gauge("queued_requests_unloaded", "Requests that wait for experts that are resident nowhere", unloaded)
    yield _gauge("failed_experts", "Experts that cannot be loaded", len(known["failed"]))
    busy = {row["name"]: row["busy_share"] for row in executors}
    yield _gauge("executor_busy_ratio", "Share of the last 10 to 20 s spent on batches", busy, "executor")
    out = {row["name"]: float("out_of_service" in row) for row in executors}
    yield _gauge("executor_out_of_service", "1 for an executor whose device has failed", out, "executor")
    yield CounterMetricFamily(
        "coserve_image_retries", "Images tried once more, for their device or the disk had failed", known["retries"]
    )


def _beside(facts: Facts) -> Iterator[Metric]:
    free = {place: space.free_bytes for place, space in facts["disks"].items()}
    total = {place: space.total_bytes for place, space in facts["disks"].items()}
    yield _gauge("disk_free_bytes", "Free on the disk where this lies", free, "place")
    yield _gauge("disk_size_bytes", "Size of the disk where this lies", total, "place")
    up = {str(child["name"]): float(child["state"] == "running") for child in facts["children"]}
    yield _gauge("child_up", "1 for a process beside the line that runs", up, "child")
    restarts = CounterMetricFamily("coserve_child_restarts", "Starts after the first", labels=("child",))
    for child in facts["children"]:
        restarts.add_metric((str(child["name"]),), child["restarts"])
    yield restarts
    behind = {str(row["name"]): row["behind"] for row in facts["consumers"] if row.get("behind") is not None}
    yield _gauge("consumer_lag_messages", "Messages of the stream that a consumer has not taken", behind, "consumer")
    for name, what in (("answers", "Answers of versions in shadow"), ("dropped", "Images that no shadow had time for")):
        yield CounterMetricFamily(f"coserve_shadow_{name}", what, sum(row[name] for row in facts["shadows"]))
    heat = {reading.sensor: reading.celsius for reading in facts["temperatures"]}
    yield _gauge("temperature_celsius", "The hottest of each sensor chip and GPU", heat, "sensor")


def _models(facts: Facts) -> Iterator[Metric]:
    used: dict[tuple[str, ...], float] = {}
    budget: dict[tuple[str, ...], float] = {}
    for model in facts["models"]:
        for what, of in (("experts", ""), ("texts", "text_")):
            used[model["name"], what] = model.get(f"{of}used_bytes", 0)
            budget[model["name"], what] = model.get(f"{of}budget_bytes", 0)
    labels = ("model", "what")
    yield _gauge("model_memory_used_bytes", "Bytes of a language model's experts, and of its texts", used, *labels)
    yield _gauge("model_memory_budget_bytes", "Bytes that a language model may have for them", budget, *labels)


def _gauge(name: str, what: str, value: float | Mapping[Any, float], *labels: str) -> Metric:
    """`value` is a number, or with `labels` one for each of their values (a tuple for several labels)."""
    if not isinstance(value, Mapping):
        return GaugeMetricFamily(f"coserve_{name}", what, value)
    family = GaugeMetricFamily(f"coserve_{name}", what, labels=labels)
    for values, number in value.items():
        family.add_metric(values if isinstance(values, tuple) else (str(values),), number)
    return family


def _by_device(name: str, what: str, pools: Sequence[Mapping[str, Any]], key: str) -> Metric:
    sums = Sums[str]()
    for pool in pools:
        sums[pool["device"]] += pool[key]
    return _gauge(name, what, sums, "device")
