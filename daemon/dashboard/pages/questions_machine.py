"""What the Machine page asks the database: short questions, each over so many rows at the most."""

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Row

from daemon.dashboard.site.database import Database

#: Images over which the rate is taken at which disks fill.
NEWEST: Final = 20_000
SHOWN: Final = 8

_LAST = "SELECT max(inspection_id) AS last FROM inspections"
_TODAY = """
SELECT count(*) AS images, min(accepted_at) AS since,
       sum(CASE WHEN image_path IS NOT NULL THEN image_bytes ELSE 0 END) AS kept_bytes
FROM inspections WHERE inspection_id > :after AND accepted_at >= :today
"""
_KEPT = """
SELECT count(*) AS images, sum(image_bytes) AS bytes, min(completed_at) AS oldest
FROM inspections WHERE image_path IS NOT NULL
"""
_OLDEST = "SELECT completed_at FROM inspections WHERE seq IS NOT NULL ORDER BY seq LIMIT 1"
_POSITION = "SELECT last_seq, pruned FROM stream_position"
_PENDING = "SELECT task, count(*) AS images, sum(length) AS bytes FROM pending GROUP BY task ORDER BY task"
_RULES = f"SELECT rules_version, loaded_at FROM rules_versions ORDER BY loaded_at DESC LIMIT {SHOWN}"  # noqa: S608
_EXPERTS = f"""
SELECT expert, expert_version, first_used_at FROM expert_versions
ORDER BY first_used_at DESC, expert LIMIT {SHOWN}
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the database holds and names, and how fast that grows. None where there is nothing."""

    images_today: int
    since: str | None
    kept_bytes_today: int
    kept_images: int
    kept_bytes: int
    oldest_image: str | None
    oldest_result: str | None
    results: int
    pruned: int
    pending: list[Row[Any]]
    rules: list[Row[Any]]
    experts: list[Row[Any]]


def holdings(database: Database, today: str) -> Holdings:
    """`today` is the day's first moment."""
    last = database.rows(_LAST, limit=1)[0].last or 0
    now = database.rows(_TODAY, {"after": last - NEWEST, "today": today}, limit=1)[0]
    kept = database.rows(_KEPT, limit=1)[0]
    oldest = database.rows(_OLDEST, limit=1)
    position = database.rows(_POSITION, limit=1)
    return Holdings(
        images_today=now.images,
        since=now.since,
        kept_bytes_today=int(now.kept_bytes or 0),
        kept_images=kept.images,
        kept_bytes=int(kept.bytes or 0),
        oldest_image=kept.oldest,
        oldest_result=oldest[0].completed_at if oldest else None,
        results=position[0].last_seq - position[0].pruned if position else 0,
        pruned=position[0].pruned if position else 0,
        pending=database.rows(_PENDING, limit=10),
        rules=database.rows(_RULES, limit=SHOWN),
        experts=database.rows(_EXPERTS, limit=SHOWN),
    )
