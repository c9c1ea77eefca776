"""What the Experts pages show, put together from the daemon, the catalog and the results: values, no HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daemon.config.settings import Config
from daemon.dashboard.pages import questions_experts as questions
from daemon.dashboard.site.cached_answers import Kept
from daemon.dashboard.site.database import Database, NoDatabase, TooMuchToCount
from daemon.dashboard.site.site import Site
from daemon.line.line import compile_kept_rules, load_catalog
from daemon.storage.database.judged import Calls
from daemon.wire.control import ControlError
from experts.catalog import Catalog
from experts.drift import BINS, Drift, compare
from experts.spec import ExpertId
from routing_rules.routes import Routes

#: Worst first: what a technician looks for.
HEALTH = ("cannot be loaded", "drifted", "shifting", "never used", "well")
_CATALOG_KEEPS_S = 10.0
_PLACES_KEEP_S = 0.5
_RECENT_KEEPS_S = 5.0
_DRIFT_KEEPS_S = 60.0


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """One expert in the list. Rates are shares of the images that it answered lately; None where there were none."""

    name: str
    architecture: str
    version: str
    size_bytes: int
    health: str
    why: str | None
    resident: Sequence[str]
    loading: Sequence[str]
    pinned: Sequence[str]
    queued: int
    usage: float
    answers: int
    confidence: float | None
    fail_rate: float | None
    review_rate: float | None
    unknown_rate: float | None
    batches: int
    hit_rate: float | None
    loads: int
    mean_load_ms: float | None
    drift: Drift | None
    has_training: bool
    false_calls: int
    escapes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All experts, and what could not be found out, in words."""

    rows: Sequence[ExpertRow]
    hit_rate: float | None
    problems: Sequence[str]


@dataclass(slots=True)
class _Gathered:
    """What is asked one by one, so that what fails takes only itself away."""

    problems: list[str] = field(default_factory=list[str])

    def __call__(self, what: str, ask: Any, instead: Any) -> Any:
        try:
            return ask()
        except TooMuchToCount:
            self.problems.append(f"{what}: not counted, it took longer than 5 s")
        except (NoDatabase, ControlError) as error:
            self.problems.append(f"{what}: {getattr(error, 'reason', error)}")
        return instead


class ExpertFacts:
    """Everything that is counted is kept for some seconds, for all who look."""

    def __init__(self, site: Site) -> None:
        self._site = site
        database = site.database
        self.catalog = Kept(_CATALOG_KEEPS_S, lambda: _catalog(site.config))
        self._experts = Kept(_PLACES_KEEP_S, lambda: site.ask_daemon("experts")["experts"])
        self._recent = Kept(_RECENT_KEEPS_S, lambda: questions.recent(database))
        self._confidences = Kept(_DRIFT_KEEPS_S, lambda: questions.confidences(database))
        self._calls = Kept(_DRIFT_KEEPS_S, lambda: questions.calls(database))

    def listing(self) -> Listing:
        gathered = _Gathered()
        catalog, broken = self.catalog.get()
        told = gathered("Where experts are", self._experts.get, None)
        if told is None:
            told = [_not_asked(catalog, name) for name in catalog]
        recent = gathered("Rates and loads", self._recent.get, questions.Recent({}, {}, {}))
        histograms = gathered("Drift", self._confidences.get, {})
        calls: Sequence[Calls] = gathered("False calls and escapes", self._calls.get, ())
        by_version = {(one.expert, one.expert_version): one for one in calls}
        rows = [_row_of(one, catalog, recent, histograms, by_version) for one in told]
        return Listing(rows, recent.hit_rate, [*gathered.problems, *broken])

    def trained(self, name: str) -> Mapping[str, Sequence[int]] | None:
        """How sure it was on images held out in training; None where nobody has measured that."""
        return self.catalog.get()[0].confidences.get(ExpertId(name))


def _catalog(config: Config) -> tuple[Catalog, list[str]]:
    """The catalog's file as it is now, and what is wrong with it: a broken weights file is named."""
    try:
        catalog, problems, unusable = load_catalog(config.catalog)
    except (OSError, ValueError) as error:
        return Catalog({}, {}), [f"The catalog cannot be read: {error}"]
    return catalog or Catalog({}, {}), [str(problem) for problem in (*problems, *unusable)]


def _not_asked(catalog: Catalog, name: ExpertId) -> dict[str, Any]:
    """A row of control's `experts` as far as the catalog alone knows it."""
    spec = catalog[name]
    known = {"expert": name, "version": spec.version, "architecture": spec.architecture, "bytes": spec.weights_bytes}
    return {**known, "usage": 0.0, "resident": [], "loading": [], "pinned": [], "queued": 0, "failed": None}


def _row_of(
    told: Mapping[str, Any],
    catalog: Catalog,
    recent: questions.Recent,
    histograms: questions.Histograms,
    calls: Mapping[tuple[str, str], Calls],
) -> ExpertRow:
    name, version = told["expert"], told["version"]
    rates, batches, loads = recent.rates.get(name), recent.batches.get(name), recent.loads.get(name)
    # The file may name another version than the daemon has: that one's training says nothing of this one.
    is_in_force = name in catalog and catalog[name].version == version
    training = catalog.confidences.get(name) if is_in_force else None
    drift = compare(training, histograms.get((name, version), {})) if training else None
    judged = calls.get((name, version))
    return ExpertRow(
        name=name,
        architecture=told["architecture"],
        version=version,
        size_bytes=told["bytes"],
        health=_health(told, rates, drift),
        why=told["failed"],
        resident=told["resident"],
        loading=told["loading"],
        pinned=told["pinned"],
        queued=told["queued"],
        usage=told["usage"],
        answers=rates.answers if rates else 0,
        confidence=rates.confidence if rates else None,
        fail_rate=rates.fail_rate if rates else None,
        review_rate=rates.review_rate if rates else None,
        unknown_rate=rates.unknown_rate if rates else None,
        batches=batches.batches if batches else 0,
        hit_rate=1 - batches.after_load / batches.batches if batches else None,
        loads=loads.loads if loads else 0,
        mean_load_ms=loads.mean_load_ms if loads else None,
        drift=drift,
        has_training=training is not None,
        false_calls=judged.false_calls if judged else 0,
        escapes=judged.escapes if judged else 0,
    )


def _health(row: Mapping[str, Any], rates: Any, drift: Drift | None) -> str:
    if row["failed"]:
        return "cannot be loaded"
    if drift is not None and drift.grade in ("drifted", "shifting"):
        return drift.grade
    return "well" if rates else "never used"


# The list's order


def _worst_first(row: ExpertRow) -> tuple[Any, ...]:
    return HEALTH.index(row.health), -row.answers, row.name


#: What the list can be sorted by; the largest comes first but for names and the worst.
SORTS: Mapping[str, Any] = {
    "health": _worst_first,
    "name": lambda row: row.name,
    "size": lambda row: -row.size_bytes,
    "usage": lambda row: -row.usage,
    "answers": lambda row: -row.answers,
    "confidence": lambda row: row.confidence if row.confidence is not None else 2.0,
    "fail": lambda row: -(row.fail_rate or 0.0),
    "hit": lambda row: row.hit_rate if row.hit_rate is not None else 2.0,
    "loads": lambda row: -row.loads,
    "drift": lambda row: -(row.drift.value if row.drift else -1.0),
    "calls": lambda row: (-row.escapes, -row.false_calls),
}
SHOWN: Mapping[str, Any] = {
    "all": lambda _row: True,
    "resident": lambda row: bool(row.resident or row.loading),
    "trouble": lambda row: row.health in HEALTH[:3],
    "pinned": lambda row: bool(row.pinned),
    "unused": lambda row: row.health == "never used",
}


def chosen(rows: Sequence[ExpertRow], text: str, show: str, sort: str) -> list[ExpertRow]:
    """Those whose name or architecture has `text` in it, in the order asked for."""
    wanted = text.casefold()
    found = [row for row in rows if wanted in f"{row.name} {row.architecture}".casefold() and SHOWN[show](row)]
    return sorted(found, key=SORTS[sort])


# One expert


def rules_in_force(database: Database, version: str, catalog: Catalog) -> Routes | None:
    """As the daemon reads them; None where they are not in the database, or no longer fit the catalog."""
    text = questions.rules_text(database, version)
    return compile_kept_rules(text, catalog) if text else None


def shares(counts: Sequence[int]) -> list[float]:
    """Counts as percent, so that few answers and many can be compared."""
    whole = sum(counts)
    return [round(100 * count / whole, 2) if whole else 0.0 for count in counts]


def added(histograms: Mapping[str, Sequence[int]]) -> list[int]:
    """Counts of all labels together."""
    return [sum(column) for column in zip([0] * BINS, *histograms.values(), strict=True)]
