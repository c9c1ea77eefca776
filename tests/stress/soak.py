"""`coserve soak`: a real daemon under steady and hostile load for an hour, sampled every few seconds; a verdict."""

import json
import math
import platform
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import psutil
from scipy import stats

from coserve_client import Results
from tests.contract.client import Line
from tests.stress.hostile import KINDS, Attack
from tests.stress.line import assert_judged, make_jpegs, make_small_line, rules_of
from tests.stress.steady import SteadyPublisher, quantile_ms

_CONFIDENCE = 0.95
#: Neighbouring samples of memory are nearly the same: only the means of so many blocks count as independent.
_BLOCKS = 30
#: Words of the daemon's log where a message or a thread broke.
_BROKEN = (
    *("intake_failed", "intake_waits", "intake_turn_failed", "reply_failed", "payload_scan_failed"),
    *("line_stuck", "Traceback"),
)
#: Growth per hour that we call flat; and how sure of memory's the samples must be, as a share of the memory in use.
_FLAT_PER_HOUR = {"rss_mb": 2.0, "handles": 2.0, "threads": 0.5}
_SURE_SHARE = 0.1
_WARM_UP_SHARE = 0.15
_RATE, _IMAGE_BYTES = 10.0, 20_000
_SAMPLE_S = 5.0
_ATTACK_S = 15.0
_RELOAD_S = 20.0
_QUERY_S = 2.0
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
_LIMITS = {"backlog_images": 2000, "backlog_bytes": "256MB", "in_memory": "64MB", "max_payload_bytes": "8MB"}


class Slope(NamedTuple):
    """Growth per hour, and the bounds between which it lies with 95 % confidence; infinite where samples are few."""

    per_hour: float
    lowest: float
    highest: float

    def is_flat(self, tolerance_per_hour: float) -> bool:
        """Return True if growth beyond the tolerance is not shown."""
        return self.per_hour <= tolerance_per_hour or self.lowest <= 0


def slope(at_s: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit a straight line by least squares over the means of blocks of samples."""
    blocks = min(_BLOCKS, len(at_s))
    if blocks < 3:
        return Slope(0.0, -math.inf, math.inf)
    hours = [float(np.mean(block)) / 3600 for block in np.array_split(np.asarray(at_s), blocks)]
    means = [float(np.mean(block)) for block in np.array_split(np.asarray(values), blocks)]
    if max(means) == min(means):
        return Slope(0.0, 0.0, 0.0)
    fit: Any = stats.linregress(hours, means)
    margin = float(stats.t.ppf((1 + _CONFIDENCE) / 2, blocks - 2)) * float(fit.stderr)
    return Slope(float(fit.slope), float(fit.slope) - margin, float(fit.slope) + margin)


class StreamConsumer:
    """An honest consumer: reads all results in a thread of its own; `lost` counts numbers that never came."""

    def __init__(self, results: str, intake: str) -> None:
        self.lost = self.last_seq = 0
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
                    self.lost += result["seq"] - self.last_seq - 1
                    self.last_seq = result["seq"]


def run_soak(minutes: float, out: Path, on_sample: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return the figures, which `out` gets as soak.json; the samples are there already while it runs."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="coserve-soak-") as scratch:
        line = make_small_line(Path(scratch), _LIMITS)
        with line.service() as service:
            assert service.process is not None
            soak = Soak(line, service.process.pid)
            soak.run(minutes, out / "soak.json", on_sample)
            exit_status = service.stop()
        (out / "daemon.log").write_text(line.log()[-1_000_000:], encoding="utf-8")
        figures = soak.figures(exit_status)
    (out / "soak.json").write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return figures


class Soak:
    """The clients around the daemon: publishers, a consumer, a person who asks and reloads, and hostile peers."""

    def __init__(self, line: Line, pid: int) -> None:
        self._line = line
        self._daemon, self._began_s = psutil.Process(pid), time.monotonic()
        self._intakes = [line.intake, line.endpoints["intake"][1]]
        images = make_jpegs(16, _IMAGE_BYTES)
        self._publishers = [
            SteadyPublisher(intake, f"steady-{number}", images, _RATE) for number, intake in enumerate(self._intakes)
        ]
        self._consumer = StreamConsumer(line.results, line.intake)
        self._ending = threading.Event()
        self._attack = ""
        self._attacks: dict[str, Counter[str]] = {}
        self._samples: list[dict[str, Any]] = []
        self._waits_s: list[float] = []
        self._troubles: list[str] = []
        self._reloads = self._queries = 0

    def run(self, minutes: float, file: Path, on_sample: Callable[[dict[str, Any]], None]) -> None:
        """Let all work for so long; `file` gets the samples so far."""
        threads = [
            threading.Thread(target=self._ask_and_reload, name="operator", daemon=True),
            threading.Thread(target=self._attack_in_turn, name="hostile", daemon=True),
        ]
        for each in (self._consumer, *self._publishers, *threads):
            each.start()
        until_s = time.monotonic() + minutes * 60
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(_SAMPLE_S, left_s))
            self._samples.append(self._sample())
            file.write_text(json.dumps({"samples": self._samples}), encoding="utf-8")
            on_sample(self._samples[-1])
        self._ending.set()
        for thread in threads:
            thread.join()
        for publisher in self._publishers:
            publisher.stop()
        self._line.idle()
        self._consumer.stop()

    def figures(self, exit_status: int) -> dict[str, Any]:
        """Return what was counted, and by name which promises hold; the daemon has stopped."""
        accounts = {publisher.source: publisher.account for publisher in self._publishers}
        wrong, log = "", self._line.log()
        try:
            assert_judged(self._line, {source: account.sent for source, account in accounts.items()})
        except AssertionError as error:
            wrong = str(error)
        begin_s = self._samples[-1]["at_s"] * _WARM_UP_SHARE
        warm = [sample for sample in self._samples if sample["at_s"] >= begin_s]
        slopes = {name: slope([s["at_s"] for s in warm], [s[name] for s in warm]) for name in _FLAT_PER_HOUR}
        is_flat = {name: growth.is_flat(_FLAT_PER_HOUR[name]) for name, growth in slopes.items()}
        # A short run does not show that memory is flat.
        is_sure = slopes["rss_mb"].highest <= _SURE_SHARE * fmean(sample["rss_mb"] for sample in self._samples)
        return {
            "machine": platform.platform(),
            "verdicts": {
                "images lost: 0": not wrong and all(account.complete for account in accounts.values()),
                "results lost to the consumer: 0": self._consumer.lost == 0,
                "memory flat": is_flat["rss_mb"] and is_sure,
                "handles flat": is_flat["handles"],
                "threads flat": is_flat["threads"],
                "no message broke the intake": not any(event in log for event in _BROKEN),
                "queries and reloads answered": not self._troubles,
                "stopped in order": exit_status == 0,
            },
            "per_hour_after_warm_up": {name: growth._asdict() for name, growth in slopes.items()},
            "acceptance_ms": {share: quantile_ms(self._waits_s, share) for share in (0.5, 0.99, 1.0)},
            "published": {source: account.as_dict() for source, account in accounts.items()},
            "wrong": wrong,
            "reloads": self._reloads,
            "queries": self._queries,
            "troubles": self._troubles[:20],
            "attacks": self._attacks,
            "samples": self._samples,
        }

    def _sample(self) -> dict[str, Any]:
        """Return the daemon's resources, and the waits for acceptance since the sample before."""
        waits_s = [wait_s for publisher in self._publishers for wait_s in publisher.take_waits_s()]
        self._waits_s += waits_s
        return {
            "at_s": round(time.monotonic() - self._began_s, 3),
            "handles": self._daemon.num_fds(),
            "threads": self._daemon.num_threads(),
            "rss_mb": round(self._daemon.memory_info().rss / 1e6, 3),
            "p50_ms": quantile_ms(waits_s, 0.5),
            "p99_ms": quantile_ms(waits_s, 0.99),
            "backlog": self._line.status()["backlog"],
            "attack": self._attack,
        }

    def _ask_and_reload(self) -> None:
        reload_at_s = time.monotonic() + _RELOAD_S
        while not self._ending.wait(_QUERY_S):
            sql = _QUERIES[self._queries % len(_QUERIES)]
            self._queries += 1
            try:
                self._line.rows(sql)
            except sqlite3.Error as error:
                self._troubles.append(f"{sql}: {error}")
            if time.monotonic() >= reload_at_s:
                self._reloads += 1
                self._line.write_rules(rules_of(self._reloads))
                if (answer := self._line.control("reload"))["type"] != "ok":
                    self._troubles.append(str(answer))
                reload_at_s = time.monotonic() + _RELOAD_S

    def _attack_in_turn(self) -> None:
        """Run one kind after the other, over ipc and TCP in turn, with pauses; kill every third half-way."""
        seed = 0
        while not self._ending.wait(_ATTACK_S / 5):
            kind = list(KINDS)[seed % len(KINDS)]
            intake = self._intakes[seed % 2]
            self._attack = kind
            attack = Attack(kind, intake, self._line.results, _ATTACK_S, seed)
            if seed % 3 == 2:
                self._ending.wait(_ATTACK_S * 0.7)
                attack.kill()
                counts = {"killed": 1}
            else:
                counts = attack.finish()
            self._attacks.setdefault(kind, Counter()).update(counts)
            self._attack = ""
            seed += 1
