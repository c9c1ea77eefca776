"""Everything a configuration names, read and checked together: rules, catalog, weights.

The daemon's start, its reload, `coserve check` and `coserve rules check` all go through here, so that what the
check accepts is what the daemon accepts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daemon.config import Config, load_config
from daemon.errors import ConfigError
from experts.catalog import Catalog, CatalogFile, resolve
from experts.weights import verify_sha256
from routing_rules.compile import ExpertLabels, RulesError, compile_rules
from routing_rules.load import Problem, read_yaml, read_yaml_text, validate
from routing_rules.routes import Routes


@dataclass(frozen=True, slots=True)
class Line:
    """A line whose parts fit together: the rules name only experts that the catalog has, with labels they have."""

    config: Config
    routes: Routes
    catalog: Catalog


def load_line(path: Path, environ: Mapping[str, str] | None = None) -> Line:
    """Read `path` and all it names; ConfigError lists every mistake in all of the files."""
    config = load_config(path) if environ is None else load_config(path, environ)
    routes, catalog = load_rules_and_catalog(config)
    return Line(config, routes, catalog)


def load_rules_and_catalog(config: Config) -> tuple[Routes, Catalog]:
    """What `reload` reads again. A missing or damaged weight file is no mistake here: that expert alone fails."""
    problems: list[Problem] = []
    catalog, found = load_catalog(config.catalog)
    problems += found
    try:
        routes = load_routes(config.rules, catalog)
    except RulesError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems or catalog is None:
        raise ConfigError(problems)
    return routes, catalog


def load_routes(path: Path, catalog: Catalog | None) -> Routes:
    """Compile `path`, against the catalog's experts and labels where there is one; RulesError lists every mistake."""
    return compile_rules(read_yaml(path), str(path), labels_of(catalog))


def compile_kept_rules(text: str, catalog: Catalog) -> Routes | None:
    """Rules that an open attempt was started under, or None where today's catalog no longer carries them."""
    try:
        return compile_rules(read_yaml_text(text, "kept rules"), "kept rules", labels_of(catalog))
    except RulesError:
        return None


def load_catalog(path: Path) -> tuple[Catalog | None, list[Problem]]:
    """The catalog of `path`, or None and what is wrong with it."""
    document = read_yaml(path)
    file, problems = validate(CatalogFile, document)
    if file is None or problems:
        return None, problems
    catalog, mistakes = resolve(file, path.parent)
    found = [Problem(document.name, *document.where(where), message) for where, message in mistakes]
    return catalog, found


def labels_of(catalog: Catalog | None) -> Mapping[str, ExpertLabels] | None:
    """What the rules are checked against: each expert's task and classes."""
    if catalog is None:
        return None
    return {spec.expert: ExpertLabels(spec.task, spec.classes) for spec in catalog.values()}


def check_rules(rules: Path, catalog_path: Path | None) -> list[Problem]:
    """Every mistake in a rules file, and in the catalog it is checked against."""
    catalog, problems = load_catalog(catalog_path) if catalog_path else (None, [])
    try:
        load_routes(rules, catalog)
    except RulesError as error:
        problems += error.problems
    return problems


def check_line(path: Path) -> tuple[list[Problem | str], dict[str, Any]]:
    """Every mistake in a whole line, weight files included (each is read and its sha256 compared)."""
    try:
        line = load_line(path)
    except ConfigError as error:
        return list(error.problems), {}
    problems: list[Problem | str] = []
    document = read_yaml(line.config.catalog)
    for spec in line.catalog.values():
        message = verify_sha256(spec)
        if message:
            problems.append(Problem(document.name, *document.where(("experts", spec.expert, "file")), message))
    facts = {
        "boards": len(line.routes.recipes),
        "experts": len(line.catalog),
        "weights_bytes": sum(spec.weights_bytes for spec in line.catalog.values()),
        "rules_version": line.routes.version,
    }
    return problems, facts
