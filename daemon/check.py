"""`coserve check`: every mistake in a whole line, from its settings to its weights, with file and line."""

from pathlib import Path
from typing import Any

from daemon.config.settings import at_their_keys, sound_config
from daemon.delivery.deliveries import consumer_problems, consumer_warnings
from daemon.errors import ConfigError
from daemon.language.model_check import model_problems
from daemon.line.devices import complete, profile_warnings
from daemon.line.line import (
    capacity_problems,
    curve_keys,
    load_catalog,
    load_routes,
    settings_problems,
    weights_folders,
)
from daemon.line.profile import this_machine
from daemon.storage.disk_space import claim_problems, storage_problems
from daemon.wire.endpoints import check_allowed_clients
from experts.catalog import Catalog
from experts.errors import WeightsError
from experts.weights import verify_sha256
from routing_rules.compile import RulesError
from routing_rules.load import read_yaml


def check_line(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Return every mistake in a line, weights files included (each is read and its sha256 compared), and its facts."""
    try:
        config, mistakes, touched = sound_config(path)
    except ConfigError as error:
        return list(error.problems), {}
    if config is None:
        return list(map(str, mistakes)), {}
    config, measured, found = complete(path, config, this_machine())
    problems = [*map(str, mistakes), *map(str, found), *at_their_keys(path, settings_problems(config, touched))]
    are_settings_sound = not problems
    problems += at_their_keys(path, storage_problems(config) or claim_problems(path, config))
    problems += at_their_keys(path, check_allowed_clients(curve_keys(config.security)))
    folders = () if "security" in touched else weights_folders(config)
    catalog, mistakes, unusable = load_catalog(config.catalog, folders)
    problems += [str(problem) for problem in (*mistakes, *unusable)]
    try:
        routes = load_routes(config.rules, catalog)
    except RulesError as error:
        return [*problems, *map(str, error.problems)], {}
    if catalog is None:
        return problems, {}
    problems += _weights_problems(config.catalog, catalog)
    problems += model_problems(path, config)
    problems += consumer_problems(path, config)
    if are_settings_sound:
        problems += [f"{path}: {problem}" for problem in capacity_problems(config, routes, catalog)]
    facts = {
        "boards": len(routes.recipes),
        "experts": len(catalog),
        "weights_bytes": sum(spec.weights_bytes for spec in catalog.values()),
        "models": len(config.models),
        "rules_version": routes.version,
        "warnings": [*consumer_warnings(path, config), *profile_warnings(path, config, measured, catalog)],
    }
    return problems, facts


def _weights_problems(path: Path, catalog: Catalog) -> list[str]:
    document = read_yaml(path)
    problems: list[str] = []
    for expert in catalog.headers:
        try:
            verify_sha256(catalog[expert])
        except WeightsError as error:
            problems.append(str(document.problem(("experts", expert, "sha256"), str(error))))
    return problems
