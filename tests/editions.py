"""Editions for tests: without files, and the first one of a line's folder."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from daemon.config.settings import load_config
from daemon.line.line import load_rules_and_catalog
from daemon.line.making import Draft, make_edition
from daemon.line.served import Served
from daemon.line.serving import Serving
from experts.catalog import Catalog
from experts.editions.edition import Edition
from experts.spec import ExpertId, ExpertSpec
from routing_rules.routes import Routes


def a_served(routes: Routes, catalog: Mapping[ExpertId, ExpertSpec] | None = None, number: int = 1) -> Served:
    at = datetime(2026, 11, 28, tzinfo=UTC)
    edition = Edition(number=number, created_at=at, who="ines", why="reload", rules=routes.text, experts={})
    return Served(edition, routes, Catalog(catalog or {}, {}))


def a_serving(routes: Routes, catalog: Mapping[ExpertId, ExpertSpec] | None = None) -> Serving:
    return Serving(a_served(routes, catalog))


def next_edition(serving: Serving, routes: Routes, catalog: Mapping[ExpertId, ExpertSpec] | None = None) -> Served:
    """Put another edition in force, as if made now."""
    served = a_served(routes, catalog or serving.current.catalog, serving.current.number + 1)
    serving.put_in_force(served, 0.0)
    return served


class NoDaemon:
    """A line whose daemon does not run and whose database names no edition (daemon/line/making.py, `RunningLine`)."""

    def highest(self) -> int:
        return 0

    def digest(self, number: int) -> None: ...

    def check(self, served: Served) -> None: ...

    def adopt(self, number: int) -> None: ...


def files_in_force(path: Path) -> Edition:
    """Put the files of a line in force, as a first start or `coserve reload` does, without a wait for editors."""
    config = load_config(path, {})
    routes, catalog = load_rules_and_catalog(config)
    experts = {name: entry.moved_from(config.catalog.parent) for name, entry in catalog.entries.items()}
    return make_edition(
        config, "ines", lambda _: Draft(routes.text, experts, "reload", keeps_files=True), NoDaemon()
    ).edition
