"""What the Experts pages ask the database. Every question looks back over so many images or loads, never over all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Row

from daemon.dashboard.site.database import Database
from daemon.storage.database.judged import Calls, by_version, calls_statement, confidences_statement

#: Images that rates, hit rate and drift look back over, and loads.
NEWEST: Final = 20_000
NEWEST_FOR_CALLS: Final = 100_000
NEWEST_LOADS: Final = 50_000
#: More experts than any catalog has.
_EXPERTS: Final = 10_000
#: Of all experts' versions and labels.
_BINS: Final = 200_000
ANSWERS: Final = 24

_LAST = "SELECT max(inspection_id) AS last FROM inspections"
_RATES = """
SELECT stages.expert, count(*) AS answers, avg(stages.confidence) AS confidence,
       1.0 * sum(CASE WHEN inspections.verdict = 'fail' THEN 1 ELSE 0 END) / count(*) AS fail_rate,
       1.0 * sum(CASE WHEN inspections.verdict = 'review' THEN 1 ELSE 0 END) / count(*) AS review_rate,
       1.0 * sum(CASE WHEN inspections.verdict = 'unknown' THEN 1 ELSE 0 END) / count(*) AS unknown_rate,
       max(inspections.completed_at) AS last_at
FROM stages JOIN inspections ON inspections.inspection_id = stages.inspection_id
WHERE stages.inspection_id > :after
GROUP BY stages.expert
"""
_BATCHES = """
SELECT expert, count(*) AS batches, sum(CASE WHEN load_ms > 0 THEN 1 ELSE 0 END) AS after_load
FROM (
    SELECT expert, executor, batch_id, max(load_ms) AS load_ms
    FROM stages WHERE inspection_id > :after
    GROUP BY expert, executor, batch_id
) AS batch
GROUP BY expert
"""
_LOADS = f"""
SELECT loaded AS expert, count(*) AS loads, avg(load_ms) AS mean_load_ms
FROM (
    SELECT loaded, load_ms FROM expert_switches WHERE cause <> 'startup' ORDER BY switch_id DESC LIMIT {NEWEST_LOADS}
) AS newest
GROUP BY loaded
"""  # noqa: S608 - our own number
_LOADS_PER_MINUTE = f"""
SELECT substr(at, 1, 16) AS minute, device, count(*) AS loads
FROM (
    SELECT at, device FROM expert_switches WHERE cause <> 'startup' ORDER BY switch_id DESC LIMIT {NEWEST_LOADS}
) AS newest
WHERE at >= :since
GROUP BY substr(at, 1, 16), device
"""  # noqa: S608
_ANSWERS = f"""
SELECT stages.inspection_id, stages.step, stages.label, stages.confidence, stages.expert_version,
       inspections.board_id, inspections.designator, inspections.component, inspections.verdict,
       inspections.completed_at, inspections.image_path
FROM stages JOIN inspections ON inspections.inspection_id = stages.inspection_id
WHERE stages.inspection_id > :after AND stages.expert = :expert {{only}}
ORDER BY stages.inspection_id DESC, stages.step
LIMIT {ANSWERS}
"""  # noqa: S608
_VERSIONS = """
SELECT expert_version, architecture, bytes, dtype, origin, first_used_at
FROM expert_versions WHERE expert = :expert ORDER BY first_used_at DESC
"""
_RULES = "SELECT text FROM rules_versions WHERE rules_version = :version"

#: Of each (expert, version): counts of confidence in 20 bins, by answered label.
Histograms = Mapping[tuple[str, str], Mapping[str, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Recent:
    """What the newest images tell of each expert, by its name."""

    rates: Mapping[str, Row[Any]]
    batches: Mapping[str, Row[Any]]
    loads: Mapping[str, Row[Any]]

    @property
    def hit_rate(self) -> float | None:
        """Share of the newest batches that needed no load."""
        batches = sum(row.batches for row in self.batches.values())
        return 1 - sum(row.after_load for row in self.batches.values()) / batches if batches else None


def recent(database: Database) -> Recent:
    after = {"after": _after(database, NEWEST)}
    return Recent(
        {row.expert: row for row in database.rows(_RATES, after, limit=_EXPERTS)},
        {row.expert: row for row in database.rows(_BATCHES, after, limit=_EXPERTS)},
        {row.expert: row for row in database.rows(_LOADS, limit=_EXPERTS)},
    )


def confidences(database: Database, expert: str | None = None) -> Histograms:
    """How sure each version was lately."""
    return by_version(database.rows(confidences_statement(expert), limit=_BINS))


def calls(database: Database, expert: str | None = None) -> list[Calls]:
    """What each version did in the newest images, and what people made of it."""
    after = max(0, _after(database, NEWEST_FOR_CALLS))
    return [Calls(*row) for row in database.rows(calls_statement(expert, after), limit=_EXPERTS)]


def loads_per_minute(database: Database, since: str) -> list[Row[Any]]:
    """(minute, device, loads), without minutes in which nothing was loaded."""
    return database.rows(_LOADS_PER_MINUTE, {"since": since}, limit=_EXPERTS)


def newest_answers(database: Database, expert: str) -> list[Row[Any]]:
    """Those whose picture was kept; where none was, the newest."""
    asked = {"expert": expert, "after": _after(database, NEWEST_FOR_CALLS)}
    with_picture = _ANSWERS.format(only="AND inspections.image_path IS NOT NULL")
    found = database.rows(with_picture, asked, limit=ANSWERS)
    return found or database.rows(_ANSWERS.format(only=""), asked, limit=ANSWERS)


def versions(database: Database, expert: str) -> list[Row[Any]]:
    """Versions that ever gave an answer, the newest first."""
    return database.rows(_VERSIONS, {"expert": expert}, limit=100)


def rules_text(database: Database, version: str) -> str | None:
    """The rules of this version as they were read."""
    found = database.rows(_RULES, {"version": version}, limit=1)
    return found[0].text if found else None


def _after(database: Database, images: int) -> int:
    """The number after which the newest so many images come."""
    return (database.rows(_LAST, limit=1)[0].last or 0) - images
