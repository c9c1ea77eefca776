"""Editions for tests that need no files."""

from collections.abc import Mapping
from datetime import UTC, datetime

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
