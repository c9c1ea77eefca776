"""Rules and catalog in force, and earlier ones that are still needed: by open board attempts, by unwritten verdicts.

Written by the control thread, read by the writer and the drive: each access is one operation, never half a version.
"""

import threading
import time
from collections.abc import Collection
from typing import Any

from daemon.records import ExpertVersion
from experts.catalog import Catalog
from experts.spec import ExpertId, setting_changes
from routing_rules.routes import Routes

#: Versions that stay known though no open attempt uses them: an image may come late, to an attempt that has closed.
_NEWEST_KEPT = 8
#: The longest that a reload waits for a group: a disk that hangs must not keep it from ending.
_GROUP_S = 1.0


class Rulebook:
    """Routes by rules version; `current` routes new board attempts."""

    def __init__(self, current: Routes) -> None:
        self._by_version: dict[str, Routes] = {current.version: current}
        self.current = current
        #: Held while a group of images is written, so that a reload takes effect between two groups.
        self.opening = threading.Lock()

    @property
    def is_alone(self) -> bool:
        return len(self._by_version) == 1

    def get(self, version: str) -> Routes | None:
        return self._by_version.get(version)

    def keep(self, routes: Routes) -> None:
        self._by_version.setdefault(routes.version, routes)

    def replace(self, routes: Routes, in_use: Collection[str] | None = None) -> float:
        """Put `routes` in force for attempts that open from now on, and return when that was (wall clock, seconds).

        Old versions are forgotten, but none that is `in_use`.
        """
        known = [kept for version, kept in self._by_version.items() if version != routes.version] + [routes]
        if in_use is not None:
            newest = known[-_NEWEST_KEPT:]
            known = [kept for kept in known if kept in newest or kept.version in in_use]
        self._by_version = {kept.version: kept for kept in known}
        is_between = self.opening.acquire(timeout=_GROUP_S)
        try:
            at_s = time.time()
            self.current = routes
        finally:
            if is_between:
                self.opening.release()
        return at_s


class Catalogs:
    """The catalog in force (`current`), and weights of earlier ones."""

    def __init__(self, current: Catalog) -> None:
        self.current = current
        self._earlier: dict[tuple[str, str], ExpertVersion] = {}

    def replace(self, catalog: Catalog) -> None:
        """Put `catalog` in force, before the drive uses it: old and new weights both give verdicts for a while."""
        for expert, spec in self.current.items():
            known = version_of(self.current, expert, spec.version)
            if known is not None:
                self._earlier[expert, spec.version] = known
        self.current = catalog

    def version(self, expert: str, expert_version: str) -> ExpertVersion | None:
        """Describe weights at their first verdict, by any catalog since the start."""
        return version_of(self.current, expert, expert_version) or self._earlier.get((expert, expert_version))

    def architecture_of(self, expert: str) -> str | None:
        spec = self.current.get(ExpertId(expert))
        return None if spec is None else spec.architecture


def changed_experts(before: Catalog, after: Catalog) -> list[dict[str, Any]]:
    changed: list[dict[str, Any]] = []
    for expert in dict.fromkeys((*after, *before)):
        old, new = before.get(expert), after.get(expert)
        if old is None or new is None:
            what = "new" if old is None else "removed"
        else:
            weights = [f"version {old.version} → {new.version}"] if old.version != new.version else []
            what = ", ".join([*weights, *map(str, setting_changes(old.settings, new.settings))])
        if what:
            version, settings = (new.version, new.settings_digest) if new else (None, None)
            changed.append({"expert": expert, "version": version, "settings": settings, "what": what})
    return changed


def version_of(catalog: Catalog, expert: str, expert_version: str) -> ExpertVersion | None:
    spec = catalog.get(ExpertId(expert))
    if spec is None or spec.version != expert_version:
        return None
    header = catalog.headers.get(ExpertId(spec.name))
    metadata = header.metadata if header else {}
    return ExpertVersion(
        expert=expert,
        expert_version=expert_version,
        sha256=spec.sha256,
        architecture=spec.architecture,
        classes=spec.classes,
        bytes=spec.read_bytes,
        dtype=metadata.get("dtype", "float32"),
        origin=metadata.get("origin", ""),
    )
