"""`coserve soak`: a real daemon under steady and hostile load for an hour, looked at every few seconds; a verdict."""

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

from daemon.config.settings import load_config
from daemon.wire.control import ControlError, ask
from tests.stress.account import Books, audit
from tests.stress.consumer import Consumer, Heard
from tests.stress.hostile import KINDS, Attack
from tests.stress.line import BOARD_TYPE, IMAGES_PER_BOARD, make_jpegs, make_small_line, write_rules
from tests.stress.sample import Held, Watch, as_row
from tests.stress.steady import SteadyPublisher
from tests.stress.trend import Slope, slope
from tools.setup.service import Service

#: The intake's own words for a message that broke something.
INTAKE_BROKE = ("intake_failed", "intake_waits", "intake_turn_failed", "reply_failed", "examination_failed")
#: What the daemon's log says where a message or a thread broke.
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
#: What a person asks the database while the line runs.
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
        "source_images": 1000,
        "source_bytes": "128MB",
        "in_memory": "64MB",
        "max_payload_bytes": "8MB",
    },
    "retention": {"segment": "16MB", "quarantine": "16MB"},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, how many honest publishers at which rate each, and whether hostile ones come too."""

    minutes: float
    publishers: int
    rate: float
    sample_s: float
    hostile: bool


@dataclass(frozen=True, slots=True)
class Look:
    """One sample: what the daemon held, and the waits for acceptance since the sample before."""

    held: Held
    p50_ms: float | None
    p99_ms: float | None
    accepted: int
    busy: int
    backlog: int | None
    attack: str

    def row(self) -> dict[str, Any]:
        said = {"accepted": self.accepted, "busy": self.busy, "backlog": self.backlog, "attack": self.attack}
        return as_row(self.held) | {"p50_ms": self.p50_ms, "p99_ms": self.p99_ms} | said


@dataclass(slots=True)
class Soak:
    """What came of it. `attacks` are, by kind, what the hostile processes say they did."""

    plan: Plan
    looks: list[Look] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    attacks: dict[str, Counter[str]] = field(default_factory=dict)
    promised: list[tuple[str, int]] = field(default_factory=list)
    heard: Heard = field(default_factory=Heard)
    reloads: int = 0
    queries: int = 0
    troubles: list[str] = field(default_factory=list)
    unanswered: int = 0
    broken_messages: int = 0
    exit_status: int | None = None
    books: Books | None = None

    def slopes(self) -> dict[str, Slope]:
        """Growth after the warm-up."""
        after_s = self.looks[-1].held.at_s * _WARM_UP_SHARE if self.looks else 0.0
        held = [look.held for look in self.looks if look.held.at_s >= after_s]
        at_s = [one.at_s for one in held]
        return {
            "rss_mb": slope(at_s, [one.rss_mb for one in held]),
            "handles": slope(at_s, [one.handles for one in held]),
            "threads": slope(at_s, [one.threads for one in held]),
        }

    def verdicts(self) -> dict[str, bool]:
        """What has to hold, each by name."""
        slopes = self.slopes()
        return {
            "images lost: 0": self.books is not None and self.books.balance and not self.unanswered,
            "results lost to the consumer: 0": self.heard.lost == 0,
            "memory flat": self._is_memory_flat(slopes["rss_mb"]),
            "handles flat": slopes["handles"].is_flat(HANDLES_PER_HOUR),
            "threads flat": slopes["threads"].is_flat(THREADS_PER_HOUR),
            "no message broke the intake": self.broken_messages == 0,
            "queries and reloads answered": not self.troubles,
            "stopped in order": self.exit_status == 0,
        }

    def _is_memory_flat(self, found: Slope) -> bool:
        """Not shown to grow, and samples enough to show it if it did: a short run says no."""
        used_mb = fmean(look.held.rss_mb for look in self.looks) if self.looks else 0.0
        return found.is_flat(MEMORY_MB_PER_HOUR) and found.highest <= _SURE_SHARE * used_mb

    def as_dict(self) -> dict[str, Any]:
        waits_ms = [wait_s * 1000 for wait_s in self.waits_s]
        return {
            "machine": platform.platform(),
            "plan": asdict(self.plan),
            "verdicts": self.verdicts(),
            "per_hour_after_warm_up": {name: asdict(found) for name, found in self.slopes().items()},
            "acceptance_ms": {
                name: percentile(waits_ms, at) for name, at in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            },
            "books": asdict(self.books) if self.books else None,
            "consumer": asdict(self.heard),
            "reloads": self.reloads,
            "queries": self.queries,
            "troubles": self.troubles[:20],
            "unanswered": self.unanswered,
            "broken_messages": self.broken_messages,
            "attacks": {kind: dict(counts) for kind, counts in self.attacks.items()},
            "samples": [look.row() for look in self.looks],
        }


def percentile(values: list[float], share: float) -> float | None:
    """The nearest rank; None where there is nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(0, min(len(ordered) - 1, round(share * len(ordered)) - 1))], 2)


def run_soak(plan: Plan, out: Path, tell: Callable[[Look], None] = lambda _: None) -> Soak:
    """Carry it out. `out` gets samples.csv as it goes on (a run cut short shows how far it came), and soak.json."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="coserve-soak-") as scratch:
        folder = Path(scratch)
        config = make_small_line(folder, _SETTINGS)
        log = folder / "daemon.log"
        soak = Soak(plan)
        with Service(config, log) as service:
            assert service.process is not None
            _Run(soak, folder, service.process.pid, tell).carry_out(out / "samples.csv")
            soak.exit_status = service.stop()
        soak.books = audit(folder / "inspection.db", soak.promised, BOARD_TYPE, IMAGES_PER_BOARD)
        said = log.read_text(encoding="utf-8", errors="replace")
        soak.broken_messages = sum(said.count(event) for event in _BROKEN)
        (out / "daemon.log").write_text(said[-1_000_000:], encoding="utf-8")
    (out / "soak.json").write_text(json.dumps(soak.as_dict(), indent=2), encoding="utf-8")
    return soak


class _Run:
    """Everybody around the daemon: publishers, a consumer, a person who asks and reloads, and the hostile ones."""

    def __init__(self, soak: Soak, folder: Path, pid: int, tell: Callable[[Look], None]) -> None:
        self._soak = soak
        self._plan = plan = soak.plan
        self._folder = folder
        self._tell = tell
        self._endpoints = load_config(folder / "coserve.yaml").endpoints
        self._watch = Watch(pid, folder)
        images = make_jpegs(16, _IMAGE_BYTES)
        intakes = self._endpoints.intake
        self._publishers = [
            SteadyPublisher(intakes[number % len(intakes)], f"steady-{number}", images, plan.rate)
            for number in range(plan.publishers)
        ]
        self._consumer = Consumer(self._endpoints.results, self._endpoints.intake[0])
        self._ending = threading.Event()
        self._attack = ""

    def carry_out(self, samples: Path) -> None:
        around = [threading.Thread(target=self._ask_and_reload, name="operator", daemon=True)]
        if self._plan.hostile:
            around.append(threading.Thread(target=self._send_hostile_ones, name="hostile", daemon=True))
        self._consumer.start()
        for one in (*self._publishers, *around):
            one.start()
        self._sample(samples)
        self._ending.set()
        for thread in around:
            thread.join()
        for publisher in self._publishers:
            publisher.stop()
        self._wait_for_verdicts()
        self._consumer.stop()
        self._close_books()

    def _sample(self, samples: Path) -> None:
        until_s = time.monotonic() + self._plan.minutes * 60
        with samples.open("w", encoding="utf-8", newline="") as file:
            writer: csv.DictWriter[str] | None = None
            while (left_s := until_s - time.monotonic()) > 0:
                time.sleep(min(self._plan.sample_s, left_s))
                look = self._look()
                self._soak.looks.append(look)
                if writer is None:
                    writer = csv.DictWriter(file, list(look.row()))
                    writer.writeheader()
                writer.writerow(look.row())
                file.flush()
                self._tell(look)

    def _look(self) -> Look:
        waits_s = [wait_s for publisher in self._publishers for wait_s in publisher.take_waits_s()]
        self._soak.waits_s += waits_s
        waits_ms = [wait_s * 1000 for wait_s in waits_s]
        return Look(
            self._watch.look(),
            percentile(waits_ms, 0.5),
            percentile(waits_ms, 0.99),
            sum(publisher.tally.accepted for publisher in self._publishers),
            sum(publisher.tally.busy for publisher in self._publishers),
            self._backlog(),
            self._attack,
        )

    def _backlog(self) -> int | None:
        try:
            return int(ask(self._endpoints.control, "status", timeout_s=10.0)["backlog"])
        except ControlError as error:
            self._soak.troubles.append(f"status: {error.reason}")
            return None

    def _ask_and_reload(self) -> None:
        reload_at_s = time.monotonic() + _RELOAD_S
        while not self._ending.wait(_QUERY_S):
            self._query(_QUERIES[self._soak.queries % len(_QUERIES)])
            if time.monotonic() >= reload_at_s:
                self._reload()
                reload_at_s = time.monotonic() + _RELOAD_S

    def _query(self, sql: str) -> None:
        try:
            with closing(sqlite3.connect(f"file:{self._folder}/inspection.db?mode=ro", uri=True)) as database:
                database.execute(sql).fetchall()
        except sqlite3.Error as error:
            self._soak.troubles.append(f"{sql}: {error}")
        self._soak.queries += 1

    def _reload(self) -> None:
        write_rules(self._folder, self._soak.reloads + 1)
        try:
            ask(self._endpoints.control, "reload", timeout_s=30.0)
        except ControlError as error:
            self._soak.troubles.append(f"reload: {error.reason}")
        self._soak.reloads += 1

    def _send_hostile_ones(self) -> None:
        """One kind after the other, over ipc and TCP in turn; every third is killed in the middle. Then some peace."""
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
            self._soak.attacks.setdefault(kind, Counter()).update(counts)
            self._attack = ""
            seed += 1

    def _wait_for_verdicts(self) -> None:
        until_s = time.monotonic() + _DRAINED_WITHIN_S
        while self._backlog() and time.monotonic() < until_s:
            time.sleep(0.2)

    def _close_books(self) -> None:
        soak = self._soak
        soak.heard = self._consumer.heard
        for publisher in self._publishers:
            soak.promised.append((publisher.source, publisher.tally.sent))
            soak.unanswered += publisher.unanswered
            soak.troubles += publisher.tally.rejected
