"""The catalog in force, and what its predecessors said of their weights: verdicts of these may still be unwritten.

Written by the control thread at a reload, read by the writer and the drive's reports; each access is one attribute or
dict operation, as with the rules (rulebook.py).
"""

from daemon.records import ExpertVersion
from experts.catalog import Catalog
from experts.spec import ExpertId


class Catalogs:
    """`current` is the one in force."""

    def __init__(self, current: Catalog) -> None:
        self._current = current
        self._earlier: dict[tuple[str, str], ExpertVersion] = {}

    @property
    def current(self) -> Catalog:
        return self._current

    def replace(self, catalog: Catalog) -> None:
        """Before the drive uses it: its weights may give a verdict at once, and those before it still do."""
        for expert, spec in self._current.items():
            known = version_of(self._current, expert, spec.version)
            if known is not None:
                self._earlier[expert, spec.version] = known
        self._current = catalog

    def version(self, expert: str, expert_version: str) -> ExpertVersion | None:
        """Describe weights at their first verdict, by any catalog since the start."""
        return version_of(self._current, expert, expert_version) or self._earlier.get((expert, expert_version))

    def architecture_of(self, expert: str) -> str | None:
        spec = self._current.get(ExpertId(expert))
        return None if spec is None else spec.architecture


def version_of(catalog: Catalog, expert: str, expert_version: str) -> ExpertVersion | None:
    """The weights that gave a verdict; None where the catalog has others by now."""
    spec = catalog.get(ExpertId(expert))
    if spec is None or spec.version != expert_version:
        return None
    header = catalog.headers.get(spec.expert)
    said = header.metadata if header else {}
    return ExpertVersion(
        expert=expert,
        expert_version=expert_version,
        sha256=spec.sha256,
        architecture=spec.architecture,
        classes=spec.classes,
        bytes=spec.weights_bytes,
        dtype=said.get("dtype", "float32"),
        origin=said.get("origin", ""),
    )
