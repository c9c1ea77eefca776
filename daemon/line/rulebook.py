"""The rules in force, and the older ones that open board attempts still need.

Written by the control thread at reload, read by the writer and the drive; each access is one dict or attribute
operation, so readers see the old book or the new one, never half of each.
"""

from routing_rules.routes import Routes


class Rulebook:
    """Routes by rules version; `current` routes new board attempts."""

    def __init__(self, current: Routes) -> None:
        self._by_version: dict[str, Routes] = {current.version: current}
        self._current = current

    @property
    def current(self) -> Routes:
        return self._current

    @property
    def is_alone(self) -> bool:
        """Whether no other rules than the current are known."""
        return len(self._by_version) == 1

    def get(self, version: str) -> Routes | None:
        """The routes of an attempt opened under `version`, or None where they cannot be compiled any more."""
        return self._by_version.get(version)

    def keep(self, routes: Routes) -> None:
        """Remember older routes for the attempts that are still open under them."""
        self._by_version.setdefault(routes.version, routes)

    def replace(self, routes: Routes) -> None:
        """Put `routes` in force for attempts that open from now on."""
        self._by_version[routes.version] = routes
        self._current = routes
