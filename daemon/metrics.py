"""Counters of the line in Prometheus' own client, in a registry of this daemon (nothing global).

Never labelled by expert, serial or source: a label's values stay few however long the line runs.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from daemon.records import Accepted, ExpertSwitch, Outcome, TextOutcome

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class Metrics:
    """What happened since start; every method is called by the driver to which it happened, from its own thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.accepted_count = 0
        self.completed_count = 0
        self._accepted = Counter("coserve_images_accepted", "Images made durable", registry=self.registry)
        self._answers = Counter("coserve_intake_answers", "Answers to publishers", ["type"], registry=self.registry)
        self._verdicts = Counter("coserve_verdicts", "Images finished", ["verdict", "reason"], registry=self.registry)
        self._switches = Counter(
            "coserve_expert_switches",
            "Loads into a pool after start-up",
            ["device", "tier", "cause"],
            registry=self.registry,
        )
        self._loaded = Counter(
            "coserve_expert_loaded_bytes", "Bytes loaded into pools", ["device"], registry=self.registry
        )
        self._infer = Histogram(
            "coserve_stage_infer_seconds",
            "Inference time per image",
            ["device"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._queued = Histogram(
            "coserve_stage_queued_seconds",
            "Wait of an image before a stage",
            ["device"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._backlog = Gauge("coserve_backlog_images", "Accepted images without a verdict", registry=self.registry)
        self._free = Gauge(
            "coserve_disk_free_bytes",
            "Free on the disk of the journal, database, images",
            ["place"],
            registry=self.registry,
        )
        self._log_bytes = Gauge("coserve_database_log_bytes", "The database's write-ahead log", registry=self.registry)
        self._pruned = Counter("coserve_pruned", "Images and boards that were pruned", ["what"], registry=self.registry)

        self._texts_accepted = Counter(
            "coserve_texts_accepted", "Requests for text made durable", registry=self.registry
        )
        self._texts = Counter(
            "coserve_texts", "Requests for text finished", ["status", "reason"], registry=self.registry
        )
        self._text_tokens = Counter("coserve_text_tokens", "Tokens generated", registry=self.registry)
        self._text_fetches = Counter(
            "coserve_text_expert_fetches", "Loads of language models' experts", registry=self.registry
        )
        self._first_token, self._next_token = (
            Histogram(f"coserve_text_{name}_token_seconds", what, buckets=_SECONDS, registry=self.registry)
            for name, what in (("first", "From acceptance to the first token"), ("next", "Time per further token"))
        )

    def texts_accepted(self, requests: int) -> None:
        self._texts_accepted.inc(requests)

    def text_finished(self, outcome: TextOutcome) -> None:
        self._texts.labels("unknown" if outcome.text is None else "done", outcome.reason or "").inc()
        self._text_tokens.inc(outcome.new_tokens or 0)
        self._text_fetches.inc(outcome.expert_fetches or 0)
        for histogram, value_ms in ((self._first_token, outcome.ttft_ms), (self._next_token, outcome.tpot_ms)):
            if value_ms is not None:
                histogram.observe(value_ms / 1000)

    def accepted(self, images: Sequence[Accepted]) -> None:
        self.accepted_count += len(images)
        self._accepted.inc(len(images))

    def answered(self, kind: str) -> None:
        self._answers.labels(kind).inc()

    def finished(self, outcome: Outcome) -> None:
        self._verdicts.labels(outcome.verdict, outcome.reason or "").inc()
        for stage in outcome.stages:
            self._infer.labels(stage.device).observe(stage.infer_ms / 1000 / max(1, stage.batch_size))
            self._queued.labels(stage.device).observe(stage.queued_ms / 1000)

    def switched(self, switch: ExpertSwitch) -> None:
        self._loaded.labels(switch.device).inc(switch.bytes)
        if switch.cause != "startup":
            self._switches.labels(switch.device, switch.tier, switch.cause).inc()

    def completed(self, images: int, backlog_images: int) -> None:
        """`images` have a durable verdict, and leave so many behind."""
        self.completed_count += images
        self._backlog.set(backlog_images)

    def disk(self, place: str, free_bytes: int) -> None:
        self._free.labels(place).set(free_bytes)

    def database_log(self, size_bytes: int) -> None:
        self._log_bytes.set(size_bytes)

    def pruned(self, what: str, count: int) -> None:
        self._pruned.labels(what).inc(count)

    def exposition(self) -> str:
        """All series in Prometheus' text format."""
        return generate_latest(self.registry).decode()
