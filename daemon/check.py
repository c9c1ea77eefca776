"""`coserve check`: every mistake in a whole line, from its settings to its weights, with file and line."""

import re
from pathlib import Path
from typing import Any

from daemon.cluster.joining import cluster_problems
from daemon.config.plant_time import zone_of_this_pc
from daemon.config.settings import Config, Model, at_their_keys, at_their_lines, at_their_paths, sound_config
from daemon.delivery.deliveries import consumer_problems, consumer_warnings
from daemon.errors import ConfigError, MissingExtraError
from daemon.line.devices import complete, device_problems, profile_warnings
from daemon.line.line import (
    NO_EXPERTS,
    capacity_problems,
    curve_keys,
    load_catalog,
    load_routes,
    served_by,
    settings_problems,
    weights_folders,
)
from daemon.line.profile import this_machine
from daemon.storage.claims import claim_problems
from daemon.storage.disk_space import storage_problems
from daemon.wire.endpoints import check_allowed_clients
from experts.catalog import Catalog
from experts.editions.folder import EditionFolder
from experts.errors import WeightsError
from experts.moe.errors import ModelError
from experts.weights import verify_sha256
from routing_rules.compile import RulesError
from routing_rules.load import KeyPath, read_yaml

_NO_ZONE = "{}: no plant.timezone: days, and times that people type, are UTC; for this PC's: plant: {{timezone: {}}}"
_PLACE = re.compile(r"(.+?):(\d+):(\d+): ")


def check_line(path: Path, *, reads_weights: bool = True) -> tuple[list[str], dict[str, Any]]:
    """Return every mistake in a line and its facts; `reads_weights` compares each weights file with its sha256."""
    try:
        config, mistakes, touched = sound_config(path)
    except ConfigError as error:
        return list(error.problems), {}
    if config is None:
        return list(map(str, mistakes)), {}
    config, measured, found = complete(path, config, this_machine())
    problems = [*map(str, mistakes), *at_their_paths(path, config, found)]
    problems += [*at_their_keys(path, _missing(config)), *at_their_keys(path, settings_problems(config, touched))]
    of_machine = [] if "devices" in touched else device_problems(config, _gpu_count(config))
    is_capacity_known = not (of_machine or found or {"devices", "policy", "models"} & touched)
    problems += at_their_keys(path, [*of_machine, *(in_storage := storage_problems(config))])
    problems += at_their_keys(path, [] if "cluster" in touched else cluster_problems(config))
    claims = [] if in_storage else at_their_keys(path, claim_problems(path, config))
    problems += at_their_keys(path, check_allowed_clients(curve_keys(config.security)))
    folders = () if "security" in touched else weights_folders(config)
    catalog, mistakes, unusable = load_catalog(config.catalog, folders)
    problems += at_their_paths(path, config, [*mistakes, *unusable])
    problems += _edition_problems(config)
    try:
        routes = load_routes(config.rules, catalog or None)
    except RulesError as error:
        return [*_in_order([*problems, *at_their_paths(path, config, error.problems)]), *claims], {}
    if catalog is None:
        return [*_in_order(problems), *claims], {}
    problems += _weights_problems(config.catalog, catalog) if reads_weights else []
    problems += model_problems(path, config)
    problems += consumer_problems(path, config)
    if is_capacity_known and not any("policy: " in problem for problem in problems):
        problems += at_their_keys(path, capacity_problems(config, routes, catalog))
    facts: dict[str, Any] = {
        "boards": len(routes.recipes),
        "experts": catalog.judges,
        "weights_bytes": sum(spec.weights_bytes for spec in catalog.values()),
        "models": len(config.models),
        "rules_version": routes.version,
        "warnings": [
            *([] if catalog else [NO_EXPERTS]),
            *consumer_warnings(path, config),
            *profile_warnings(path, config, measured, catalog),
            *_unguarded(config, catalog),
            *routes.warnings,
        ],
    }
    if config.plant.timezone is None and not problems:
        facts["warnings"].append(_NO_ZONE.format(path, zone_of_this_pc() or "Europe/Berlin"))
    return [*_in_order(problems), *claims], facts


def _unguarded(config: Config, catalog: Catalog) -> list[str]:
    """Name the experts that have no limits for the guard `picture_quality`."""
    if not config.guards.picture_quality:
        return []
    names = [spec.name for spec in catalog.values() if spec.classes and spec.pictures is None]
    what = "may pass a picture that is dark or shows nothing, as limits of light and focus were never measured"
    remedy = "train again, or import again with --images FOLDER, pictures of good and bad parts"
    return [f"{', '.join(names)}: {what}: {remedy}"] if names else []


def _missing(config: Config) -> list[str]:
    """Return the named files that only some commands read, if they are not there."""
    named = (("security.weights", config.security.weights), ("plant.signers", config.plant.signers))
    return [f"{key}: there is no {file}" for key, files in named for file in files if not file.exists()]


def _in_order(problems: list[str]) -> list[str]:
    files: dict[str, int] = {}

    def place(problem: str) -> tuple[int, int, int]:
        match = _PLACE.match(problem)
        file, line, column = match.groups() if match else ("", "0", "0")
        return files.setdefault(file, len(files)), int(line), int(column)

    return sorted(problems, key=place)


def _gpu_count(config: Config) -> int:
    """Ask torch, which takes seconds, only if the line names a GPU."""
    if all(name == "cpu" or device.host is not None for name, device in config.devices.items()):
        return 0
    from daemon.dispatch.torch_devices import TorchDevices  # noqa: PLC0415  torch

    return TorchDevices(config.devices).gpu_count()


def _edition_problems(config: Config) -> list[str]:
    """Return why a start could not run the edition in force, or what it would run without."""
    try:
        served = served_by(config)
    except ConfigError as error:
        return list(map(str, error.problems))
    lacking = [name for name in served.catalog if name not in served.catalog.headers] if served else []
    where = EditionFolder(config.catalog).weights.folder
    remedy = "coserve reload takes in what the catalog names, coserve experts put {0} FOLDER the same weights once more"
    return [f"{where}: those of {name} are missing or damaged: {remedy.format(name)}" for name in lacking]


def _weights_problems(path: Path, catalog: Catalog) -> list[str]:
    document = read_yaml(path)
    problems: list[str] = []
    for expert in catalog.headers:
        try:
            verify_sha256(catalog[expert])
        except WeightsError as error:
            problems.append(str(document.problem(("experts", expert, "sha256"), str(error))))
    return problems


def model_problems(path: Path, config: Config) -> list[str]:
    problems: list[tuple[KeyPath, str]] = []
    for name, model in config.models.items():
        try:
            _require_servable(model)
        except ModuleNotFoundError as missing:
            problem = str(MissingExtraError(missing.name, "a language model", "moe"))
        except (ModelError, TypeError) as error:  # TypeError: an option that the mode does not have
            problem = str(error)
        else:
            continue
        problems.append((("models", name, "checkpoint"), problem))
    return at_their_lines(path, problems)


def _require_servable(model: Model) -> None:
    """Raise ModelError for the first mistake without reading weights. Imports torch, which takes seconds."""
    from experts.moe.model.keys_values import bytes_per_token, text_tokens  # noqa: PLC0415
    from experts.moe.model.mode import Mode  # noqa: PLC0415
    from experts.moe.model.runtime import open_store, read_model  # noqa: PLC0415
    from experts.moe.model.text import TextCodec  # noqa: PLC0415
    from experts.moe.modes import open_mode  # noqa: PLC0415

    folder = model.checkpoint
    network, arch, checkpoint = read_model(folder)
    mode = open_mode(model.mode, folder, model.options)
    mode.require_budget(model.memory, arch, folder)
    # Only the general minimum: a mode that cannot shrink so far keeps its memory while serving.
    min_bytes = Mode.min_slots(mode, arch) * arch.expert_bytes
    if model.least_bytes < min_bytes:
        message = f"least_memory (a quarter of memory where it is not set): a budget of {model.least_bytes} bytes is"
        raise ModelError(folder, f"{message} too small; give at least {min_bytes} bytes")
    mode.close()
    open_store(arch, checkpoint, model.storage).close()
    TextCodec.open(folder)
    token_bytes = bytes_per_token(network.config, arch.dtype)
    text_tokens(folder, token_bytes, model.text_bytes, arch.context_tokens, model.max_new_tokens)
