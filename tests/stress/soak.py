"""`coserve soak`: a real daemon under steady and hostile load for an hour, sampled every few seconds; a verdict."""

import csv
import json
import platform
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from coserve_client import Results
from daemon.config.settings import load_config
from daemon.wire.control import ControlError, ask
from tests.stress.audit import ResultsAudit, audit
from tests.stress.growth import ResourceMonitor, Slope, slope
from tests.stress.hostile import KINDS, Attack
from tests.stress.line import make_jpegs, make_small_line, write_rules
from tests.stress.steady import SteadyPublisher, quantile_ms
from tools.setup.service import Service

#: Events of the intake for a message that broke something.
INTAKE_BROKE = ("intake_failed", "intake_waits", "intake_turn_failed", "reply_failed", "payload_scan_failed")
#: Words of the daemon's log where a message or a thread broke.
_BROKEN = (*INTAKE_BROKE, "line_stuck", "Traceback")
#: Growth per hour that we call flat; and how sure of it the samples must be, as a share of the memory in use.
MEMORY_MB_PER_HOUR = 2.0
_SURE_SHARE = 0.1
HANDLES_PER_HOUR = 2.0
THREADS_PER_HOUR = 0.5
_WARM_UP_SHARE = 0.15
_IMAGE_BYTES = 20_000
_ATTACK_S = 15.0
_RELOAD_S = 20.0
_QUERY_S = 2.0
_DRAINED_WITHIN_S = 120.0
#: After so long without a result, although heartbeats come, the consumer has them all.
_ALL_READ_S = 5.0
#: Questions that a person asks the database while the line runs.
_QUERIES = (
    "SELECT * FROM board_yield",
    "SELECT * FROM latency_by_hour",
    "SELECT count(*), verdict FROM inspections GROUP BY verdict",
    "SELECT * FROM expert_usage",
)
#: Small, so that back-pressure, segments and the quarantine all turn over many times in the hour.
_SETTINGS: dict[str, Any] = {
    "limits": {
        "backlog_images": 2000,
        "backlog_bytes": "256MB",
        "in_memory": "64MB",
        "max_payload_bytes": "8MB",
    },
}


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The length, the honest publishers with the rate of each, and whether hostile ones come too."""

    minutes: float
    publishers: int
    rate: float
    sample_s: float
    hostile: bool


@dataclass(slots=True)
class ConsumerTally:
    """`lost` counts numbers of the stream that never came."""

    messages: int = 0
    lost: int = 0
    last_seq: int = 0


class StreamConsumer:
    """An honest consumer: reads all results in a thread of its own, from `start` to `stop`."""

    def __init__(self, results: str, intake: str) -> None:
        self.tally = ConsumerTally()
        self._endpoints = results, intake
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="consumer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Catch up to the newest result, and end."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        with Results(*self._endpoints, since=0) as results:
            while (result := results.take(_ALL_READ_S)) is not None or not self._ending.is_set():
                if result is not None:
                    self.tally.messages += 1
                    self.tally.lost += result["seq"] - self.tally.last_seq - 1
                    self.tally.last_seq = result["seq"]


@dataclass(slots=True)
class SoakReport:
    """Counts and samples of a run. `attacks` are, by kind, the counts that the hostile processes print."""

    plan: SoakPlan
    samples: list[dict[str, Any]] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    attacks: dict[str, Counter[str]] = field(default_factory=dict)
    promised: list[tuple[str, int]] = field(default_factory=list)
    consumer: ConsumerTally = field(default_factory=ConsumerTally)
    reloads: int = 0
    queries: int = 0
    troubles: list[str] = field(default_factory=list)
    unanswered: int = 0
    broken_messages: int = 0
    exit_status: int | None = None
    books: ResultsAudit | None = None

    def slopes(self) -> dict[str, Slope]:
        """Return the growth after the warm-up."""
        begin_s = self.samples[-1]["at_s"] * _WARM_UP_SHARE if self.samples else 0.0
        samples = [sample for sample in self.samples if sample["at_s"] >= begin_s]
        at_s = [sample["at_s"] for sample in samples]
        return {name: slope(at_s, [sample[name] for sample in samples]) for name in ("rss_mb", "handles", "threads")}

    def verdicts(self) -> dict[str, bool]:
        """Return by name which promises hold."""
        slopes = self.slopes()
        return {
            "images lost: 0": self.books is not None and self.books.holds and not self.unanswered,
            "results lost to the consumer: 0": self.consumer.lost == 0,
            "memory flat": self._is_memory_flat(slopes["rss_mb"]),
            "handles flat": slopes["handles"].is_flat(HANDLES_PER_HOUR),
            "threads flat": slopes["threads"].is_flat(THREADS_PER_HOUR),
            "no message broke the intake": self.broken_messages == 0,
            "queries and reloads answered": not self.troubles,
            "stopped in order": self.exit_status == 0,
        }

    def _is_memory_flat(self, memory: Slope) -> bool:
        """Return True if memory is not shown to grow, and samples suffice to show it: a short run gives False."""
        used_mb = fmean(sample["rss_mb"] for sample in self.samples) if self.samples else 0.0
        return memory.is_flat(MEMORY_MB_PER_HOUR) and memory.highest <= _SURE_SHARE * used_mb

    def as_dict(self) -> dict[str, Any]:
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {
            "machine": platform.platform(),
            "plan": asdict(self.plan),
            "verdicts": self.verdicts(),
            "per_hour_after_warm_up": {name: asdict(growth) for name, growth in self.slopes().items()},
            "acceptance_ms": {name: quantile_ms(self.waits_s, share) for name, share in shares.items()},
            "books": asdict(self.books) if self.books else None,
            "consumer": asdict(self.consumer),
            "reloads": self.reloads,
            "queries": self.queries,
            "troubles": self.troubles[:20],
            "unanswered": self.unanswered,
            "broken_messages": self.broken_messages,
            "attacks": {kind: dict(counts) for kind, counts in self.attacks.items()},
            "samples": self.samples,
        }


def run_soak(plan: SoakPlan, out: Path, on_sample: Callable[[dict[str, Any]], None] = lambda _: None) -> SoakReport:
    """Carry out `plan`. `out` gets samples.csv as it goes on (a run cut short shows how far it came), and soak.json."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="coserve-soak-") as scratch:
        folder = Path(scratch) / "line"
        config = make_small_line(folder, _SETTINGS)
        log = folder / "daemon.log"
        report = SoakReport(plan)
        with Service(config, log) as service:
            assert service.process is not None
            _SoakRun(report, folder, service.process.pid, on_sample).carry_out(out / "samples.csv")
            report.exit_status = service.stop()
        report.books = audit(folder / "inspection.db", report.promised)
        text = log.read_text(encoding="utf-8", errors="replace")
        report.broken_messages = sum(text.count(event) for event in _BROKEN)
        (out / "daemon.log").write_text(text[-1_000_000:], encoding="utf-8")
    (out / "soak.json").write_text(json.dumps(report.as_dict(), indent=2), encoding="utf-8")
    return report


def wait_for_verdicts(control: str, within_s: float = 60.0) -> None:
    """Wait until the line has judged its backlog, or the time is up."""
    until_s = time.monotonic() + within_s
    while ask(control, "status", timeout_s=20.0)["backlog"] and time.monotonic() < until_s:
        time.sleep(0.1)


class _SoakRun:
    """The clients around the daemon: publishers, a consumer, a person who asks and reloads, and hostile peers."""

    def __init__(self, report: SoakReport, folder: Path, pid: int, on_sample: Callable[[dict[str, Any]], None]) -> None:
        self._report = report
        self._plan = plan = report.plan
        self._folder = folder
        self._on_sample = on_sample
        self._endpoints = load_config(folder / "coserve.yaml").endpoints
        self._monitor = ResourceMonitor(pid, folder)
        images = make_jpegs(16, _IMAGE_BYTES)
        intakes = self._endpoints.intake
        self._publishers = [
            SteadyPublisher(intakes[number % len(intakes)], f"steady-{number}", images, plan.rate)
            for number in range(plan.publishers)
        ]
        self._consumer = StreamConsumer(self._endpoints.results, intakes[0])
        self._ending = threading.Event()
        self._attack = ""

    def carry_out(self, samples: Path) -> None:
        threads = [threading.Thread(target=self._ask_and_reload, name="operator", daemon=True)]
        if self._plan.hostile:
            threads.append(threading.Thread(target=self._attack_in_turn, name="hostile", daemon=True))
        self._consumer.start()
        for each in (*self._publishers, *threads):
            each.start()
        self._sample_all(samples)
        self._ending.set()
        for thread in threads:
            thread.join()
        for publisher in self._publishers:
            publisher.stop()
        wait_for_verdicts(self._endpoints.control, _DRAINED_WITHIN_S)
        self._consumer.stop()
        report = self._report
        report.consumer = self._consumer.tally
        for publisher in self._publishers:
            report.promised.append((publisher.source, publisher.tally.sent))
            report.unanswered += publisher.unanswered
            report.troubles += publisher.tally.rejected

    def _sample_all(self, samples: Path) -> None:
        until_s = time.monotonic() + self._plan.minutes * 60
        with samples.open("w", encoding="utf-8", newline="") as file:
            writer: csv.DictWriter[str] | None = None
            while (left_s := until_s - time.monotonic()) > 0:
                time.sleep(min(self._plan.sample_s, left_s))
                sample = self._sample()
                self._report.samples.append(sample)
                if writer is None:
                    writer = csv.DictWriter(file, list(sample))
                    writer.writeheader()
                writer.writerow(sample)
                file.flush()
                self._on_sample(sample)

    def _sample(self) -> dict[str, Any]:
        """Return the daemon's resources, and the waits for acceptance since the sample before."""
        waits_s = [wait_s for publisher in self._publishers for wait_s in publisher.take_waits_s()]
        self._report.waits_s += waits_s
        return {
            **self._monitor.sample(),
            "p50_ms": quantile_ms(waits_s, 0.5),
            "p99_ms": quantile_ms(waits_s, 0.99),
            "accepted": sum(publisher.tally.accepted for publisher in self._publishers),
            "busy": sum(publisher.tally.busy for publisher in self._publishers),
            "backlog": (self._ask("status", 10.0) or {}).get("backlog"),
            "attack": self._attack,
        }

    def _ask(self, kind: str, timeout_s: float) -> dict[str, Any] | None:
        try:
            return ask(self._endpoints.control, kind, timeout_s=timeout_s)
        except ControlError as error:
            self._report.troubles.append(f"{kind}: {error.reason}")
            return None

    def _ask_and_reload(self) -> None:
        reload_at_s = time.monotonic() + _RELOAD_S
        while not self._ending.wait(_QUERY_S):
            sql = _QUERIES[self._report.queries % len(_QUERIES)]
            self._report.queries += 1
            try:
                with closing(sqlite3.connect(f"file:{self._folder}/inspection.db?mode=ro", uri=True)) as database:
                    database.execute(sql).fetchall()
            except sqlite3.Error as error:
                self._report.troubles.append(f"{sql}: {error}")
            if time.monotonic() >= reload_at_s:
                self._report.reloads += 1
                write_rules(self._folder, self._report.reloads)
                self._ask("reload", 30.0)
                reload_at_s = time.monotonic() + _RELOAD_S

    def _attack_in_turn(self) -> None:
        """Run one kind after the other, over ipc and TCP in turn, with pauses; kill every third half-way."""
        seed = 0
        while not self._ending.wait(_ATTACK_S / 5):
            kind = list(KINDS)[seed % len(KINDS)]
            intake = self._endpoints.intake[seed % len(self._endpoints.intake)]
            self._attack = kind
            attack = Attack(kind, intake, self._endpoints.results, _ATTACK_S, seed)
            if seed % 3 == 2:
                self._ending.wait(_ATTACK_S * 0.7)
                attack.kill()
                counts = {"killed": 1}
            else:
                counts = attack.finish()
            self._report.attacks.setdefault(kind, Counter()).update(counts)
            self._attack = ""
            seed += 1


def draw_soak(report: SoakReport, file: Path) -> None:
    """Write curves as a PNG; the shaded spans are those with a hostile process."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    curves = {
        "resident MB": ("rss_mb",),
        "count": ("handles", "threads"),
        "MB on disk": ("database_mb", "wal_mb", "journal_mb", "images_mb", "quarantine_mb"),
        "ms to acceptance": ("p50_ms", "p99_ms"),
    }
    minutes = [sample["at_s"] / 60 for sample in report.samples]
    figure, panels = plt.subplots(len(curves), 1, figsize=(10, 9), sharex=True, layout="constrained")
    for panel, (label, names) in zip(panels, curves.items(), strict=True):
        for name in names:
            panel.plot(minutes, [sample[name] for sample in report.samples], linewidth=1, label=name)
        for begin, end, sample in zip([0.0, *minutes], minutes, report.samples, strict=False):
            if sample["attack"]:
                panel.axvspan(begin, end, color="#b0653a", alpha=0.06, linewidth=0)
        panel.set_ylabel(label)
        panel.legend(fontsize=8, loc="upper left")
        panel.grid(alpha=0.2)
    panels[-1].set_yscale("log")
    panels[-1].set_xlabel("minutes")
    memory = report.slopes()["rss_mb"]
    panels[0].set_title(
        f"memory {memory.per_hour:+.1f} MB an hour (95 %: {memory.lowest:+.1f} to {memory.highest:+.1f})", fontsize=9
    )
    figure.savefig(file, dpi=110)
    plt.close(figure)
