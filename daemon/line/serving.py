"""The edition in force and the replaced ones that still serve: nothing else holds them.

A board belongs to the edition in which its attempt began. The drive adds and ends editions, the control thread puts
one in force, the writer reads: each access is one operation, never half an edition.
"""

import threading
import time
from collections.abc import Mapping
from typing import Any

from daemon.line.served import Served
from daemon.records import ExpertVersion
from experts.catalog import Catalog
from experts.spec import ExpertId, setting_changes

#: The longest that a change waits for a group of images: a disk that hangs must not keep it from ending.
_GROUP_S = 1.0


class Serving:
    """The edition `current`, in which attempts begin, and replaced ones until `end`."""

    def __init__(self, current: Served) -> None:
        #: By number; replaced as a whole, so that any thread may read it.
        self.served: Mapping[int, Served] = {current.number: current}
        #: When a replaced edition ends, in monotonic seconds.
        self._ends_s: dict[int, float] = {}
        self.current = current
        #: Held while a group of images is written, so that an edition comes into force between two groups.
        self.opening = threading.Lock()

    def all(self) -> tuple[Served, ...]:
        """Return every edition that serves, the current one first."""
        current = self.current
        return (current, *(served for served in self.served.values() if served is not current))

    def add(self, served: Served, now_s: float | None = None) -> None:
        """Let an edition serve for boards that began in it; with `now_s` as one that was replaced then."""
        self.served = {**self.served, served.number: served}
        if now_s is not None:
            self._ends_s[served.number] = now_s + served.serves_s

    def put_in_force(self, served: Served, now_s: float) -> float:
        """Let attempts begin in `served`, which was added before; return since when (wall clock, seconds)."""
        before = self.current
        is_between = self.opening.acquire(timeout=_GROUP_S)
        try:
            at_s = time.time()
            self.current = served
        finally:
            if is_between:
                self.opening.release()
        self._ends_s.pop(served.number, None)
        if before.number != served.number:
            self._ends_s[before.number] = now_s + before.serves_s
        return at_s

    def due(self, now_s: float) -> list[int]:
        return [number for number, ends_s in tuple(self._ends_s.items()) if ends_s <= now_s]

    def next_end_s(self) -> float | None:
        return min(tuple(self._ends_s.values()), default=None)

    def end(self, numbers: list[int]) -> None:
        """End replaced editions: what comes for them, or is still on its way, is `unknown`."""
        gone = [number for number in numbers if number != self.current.number]
        self.served = {number: served for number, served in self.served.items() if number not in gone}
        for number in gone:
            self._ends_s.pop(number, None)

    def version(self, expert: str, expert_version: str) -> ExpertVersion | None:
        """Describe weights at their first verdict."""
        found = (version_of(served.catalog, expert, expert_version) for served in self.all())
        return next((version for version in found if version is not None), None)


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
    header = catalog.headers.get(ExpertId(expert))
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
