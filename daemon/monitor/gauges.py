"""Gauges sampled at scrape time, each left out while it is not available. Counters and times are in metrics.py."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
        for part in (_line, _scheduler, _disks, _beside, _models):
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


def _disks(facts: Facts) -> Iterator[Metric]:
    free = {place: space.free_bytes for place, space in facts["disks"].items()}
    total = {place: space.total_bytes for place, space in facts["disks"].items()}
    yield _gauge("disk_free_bytes", "Free on the disk where this lies", free, "place")
    yield _gauge("disk_size_bytes", "Size of the disk where this lies", total, "place")


def _beside(facts: Facts) -> Iterator[Metric]:
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
    sums = Counter[str]()
    for pool in pools:
        sums[pool["device"]] += pool[key]
    return _gauge(name, what, sums, "device")
