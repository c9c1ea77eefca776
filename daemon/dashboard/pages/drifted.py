"""Which experts are not as sure as they were on images held out from training: for the alarms of the Line page.

The catalog is read and the newest answers are counted once a minute at the most, whoever looks; a count that takes too
long is broken off, and says nothing: the Experts page names what could not be counted.
"""

from dataclasses import dataclass

from daemon.dashboard.pages.questions_experts import confidences
from daemon.dashboard.site.cached_answers import Kept
from daemon.dashboard.site.database import NoDatabase, TooMuchToCount
from daemon.dashboard.site.site import Site
from daemon.line.line import load_catalog
from experts.drift import compare

_KEEPS_S = 60.0


@dataclass(frozen=True, slots=True)
class Drifted:
    """`version` is the one in force; `value` is the index that passed the bound."""

    expert: str
    version: str
    value: float


class DriftWatch:
    """Any thread."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._kept = Kept(_KEEPS_S, self._count)

    def names(self) -> list[Drifted]:
        """Those graded `drifted`, worst first; none where it cannot be counted."""
        return self._kept.get()

    def _count(self) -> list[Drifted]:
        try:
            catalog, _, _ = load_catalog(self._site.config.catalog)
            recent = confidences(self._site.database) if catalog is not None and catalog.confidences else {}
        except (NoDatabase, TooMuchToCount, OSError, ValueError):
            return []
        if catalog is None:
            return []
        found: list[Drifted] = []
        for expert, training in catalog.confidences.items():
            version = catalog[expert].version
            now = compare(training, recent.get((expert, version), {}))
            if now.grade == "drifted":
                found.append(Drifted(expert, version, round(now.value, 3)))
        return sorted(found, key=lambda one: -one.value)
