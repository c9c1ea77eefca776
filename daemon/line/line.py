"""A configuration with its rules, catalog and weights, read and checked together.

Start, reload and checks all go through here, so that the checks accept exactly what the daemon accepts.
"""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from daemon.config.settings import CREDENTIALS, Config, Security, at_their_paths, load_config
from daemon.errors import ConfigError
from daemon.host.folders import folder_problem
from daemon.line.devices import Measurements, complete, device_problems, memory_problems, profile_warnings
from daemon.line.profile import this_machine
from daemon.line.served import Served, compile_stored, labels_of
from daemon.line.shared_devices import images_config, sharing_problems
from daemon.policy.presets import UnknownPolicyError, preset
from daemon.wire.endpoints import CurveKeys, check_endpoints, check_http
from experts.catalog import Catalog, CatalogFile, resolve
from experts.editions.edition import EditionError
from experts.editions.folder import EditionFolder
from experts.spec import ExpertId
from routing_rules.compile import RulesError, compile_rules
from routing_rules.load import Problem, read_yaml, read_yaml_text, validate
from routing_rules.routes import Routes

NO_EXPERTS = (
    "the catalog has no experts: every image is `unknown` (no_expert), and its picture is kept to train with:"
    " coserve dataset export --format folders"
)
#: A file that was changed more recently may be half-written by an editor or a copy.
QUIET_S = 0.3
_WRITTEN_WITHIN_S = 5.0
#: Experts without weights that the log names.
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Line:
    """A line whose parts fit together: the rules name only experts that the catalog has, with labels they have.

    Rules and experts are those of the edition in force; before the first one, those of the files that people edit.
    """

    config: Config
    routes: Routes
    catalog: Catalog
    measured: Measurements
    warnings: Sequence[str] = ()
    served: Served | None = None


def load_line(
    path: Path, environ: Mapping[str, str] = os.environ, *, record: Path | None = None, with_profiles: bool = True
) -> Line:
    """Read `path` and all it names; ConfigError lists every mistake in all of the files.

    `record` overrides the setting. A command that measures a profile reads the line without the profiles it names: they
    may be missing or of another machine, and a person did not set what they recommend.
    """
    config = load_config(path, environ)
    if record is not None:
        config = config.model_copy(update={"record": record})
    measured, problems = Measurements(), list[Problem | str]()
    if with_profiles:
        config, measured, problems = complete(path, config, this_machine())
    try:
        served = served_by(config)
        routes, catalog = (served.routes, served.catalog) if served else load_rules_and_catalog(config)
    except ConfigError as error:
        raise ConfigError(at_their_paths(path, config, [*problems, *error.problems])) from None
    if problems:
        raise ConfigError(at_their_paths(path, config, problems))
    return Line(config, routes, catalog, measured, profile_warnings(path, config, measured, catalog), served)


def served_by(config: Config) -> Served | None:
    """Return the edition in force; None before the first one. Raises ConfigError."""
    folder = EditionFolder(config.catalog)
    try:
        folder.require_own(config.journal)
        edition = folder.in_force()
    except EditionError as error:
        raise ConfigError([str(error)]) from None
    except OSError as error:
        raise ConfigError([f"{error.filename}: {error.strerror}"]) from None
    return None if edition is None else compile_stored(edition, folder)


def load_rules_and_catalog(config: Config, *, quiet_s: float = 0.0) -> tuple[Routes, Catalog]:
    """Read again what `reload` reads. A missing or damaged weights file is not a mistake: that expert alone fails.

    Nor is an empty catalog: the line then collects pictures to train experts with, and judges none. Files that changed
    within `quiet_s`, or while they are read, may be half-written or not belong together: they are read again.
    ConfigError has the mistakes, or says that the files keep changing.
    """
    files = (config.rules, config.catalog)
    until_s = time.monotonic() + _WRITTEN_WITHIN_S
    while time.monotonic() < until_s:
        before = states(files)
        # A clock that was set back makes a file look new, which costs the same short wait.
        if any(time.time() - written_s < quiet_s for _, _, written_s in before):
            time.sleep(quiet_s)
        catalog, problems, _ = load_catalog(config.catalog, weights_folders(config))
        routes = None
        try:
            routes = load_routes(config.rules, catalog or None)
        except RulesError as error:
            problems += error.problems
        if states(files) != before:
            continue
        if routes is None or catalog is None or problems:
            raise ConfigError(problems)
        return routes, catalog
    raise ConfigError([f"{files[0]} or {files[1]} is still being written: reload again when that has ended"])


def states(files: Sequence[Path]) -> list[tuple[int, int, float]]:
    states: list[tuple[int, int, float]] = []
    for file in files:
        try:
            state = file.stat()
        except OSError:
            states.append((0, 0, 0.0))
        else:
            states.append((state.st_ino, state.st_size, state.st_mtime_ns / 1e9))
    return states


def load_routes(path: Path, catalog: Catalog | None) -> Routes:
    """Compile `path`, against the catalog's experts and labels if any; RulesError lists every mistake."""
    return compile_rules(read_yaml(path), str(path), labels_of(catalog))


def compile_kept_rules(text: str, catalog: Catalog) -> Routes | None:
    try:
        return compile_rules(read_yaml_text(text, "kept rules"), "kept rules", labels_of(catalog))
    except RulesError:
        return None


def weights_folders(config: Config) -> tuple[Path, ...]:
    return (config.catalog.parent, *config.security.weights)


def load_catalog(path: Path, folders: Sequence[Path] = ()) -> tuple[Catalog | None, list[Problem], list[Problem]]:
    """Return the catalog of `path`, its mistakes, and the weights files that cannot be used.

    With `folders`, a weights file that lies in none of them is a mistake.
    """
    document = read_yaml(path)
    file, problems = validate(CatalogFile, document)
    if file is None:
        return None, problems, []
    catalog, mistakes = resolve(file, path.parent, folders)
    by_cause: dict[bool, list[Problem]] = {True: [], False: []}
    for where, message in mistakes:
        by_cause[where[-1] == "file"].append(document.problem(where, message))
    return catalog, by_cause[False], by_cause[True]


def warn_of_weights(catalog: Catalog) -> dict[ExpertId, str]:
    """Return why experts have no usable weights. Log the first reason, or that the line has no experts."""
    log = structlog.get_logger("line")
    if not catalog:
        log.warning("no_experts", advice=NO_EXPERTS)
    unusable = {expert: catalog.unusable.get(expert, "") for expert in catalog if expert not in catalog.headers}
    for expert, problem in list(unusable.items())[:_NAMED]:
        log.warning("weights_unusable", expert=expert, problem=problem, so="its images get `unknown`", of=len(unusable))
    return unusable


def start_problems(line: Line, gpu_count: int) -> list[str]:
    problems = device_problems(line.config, gpu_count)
    if problem := folder_problem(line.config.images):  # made with its first picture, when it is late to say so
        problems.append(f"images: {problem}")
    return problems or capacity_problems(line.config, line.routes, line.catalog)


def settings_problems(config: Config, touched: Collection[str] = ()) -> list[str]:
    """Return mistakes beyond a configuration's form: an unknown policy, endpoints that may not be bound.

    `touched` sections lost a mistaken part: checks that such a part may decide are left out.
    """
    problems: list[str] = []
    try:
        preset(config.policy)
    except UnknownPolicyError as error:
        problems.append(f"policy: {str(error).removeprefix('policy ')}")
    if "security" in touched:
        return problems
    secrets = {"server_key": config.security.server_key, "http_token": config.security.http_token}
    unset = [name for name, file in secrets.items() if file is not None and CREDENTIALS in file.parts]
    if unset:
        remedy = "systemd sets it for a unit with LoadCredential=; for a check by hand, set CREDENTIALS_DIRECTORY"
        return [*problems, *(f"security.{name}: {CREDENTIALS} is not set here: {remedy}" for name in unset)]
    endpoints, curve = config.endpoints, curve_keys(config.security)
    problems += check_endpoints(endpoints.intake, endpoints.results, endpoints.control, curve, endpoints.http)
    return problems + check_http(endpoints.http, config.security.http_token)


def curve_keys(security: Security) -> CurveKeys | None:
    if security.server_key is None or security.allowed_clients is None:
        return None
    return CurveKeys(security.server_key, security.allowed_clients)


def capacity_problems(config: Config, routes: Routes, catalog: Catalog) -> list[str]:
    try:
        return sharing_problems(config) or memory_problems(images_config(config), routes.experts, catalog)
    except UnknownPolicyError as error:
        return [f"policy: {str(error).removeprefix('policy ')}"]
