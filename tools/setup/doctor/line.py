"""The line: its configuration, its daemon, its database, what it needs of the packages, its service."""

import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import zmq
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from daemon.config.settings import Config
from daemon.errors import ConfigError, install_with
from daemon.line.line import load_catalog, load_rules_and_catalog, settings_problems, weights_folders
from daemon.storage.claims import claim_problems
from daemon.storage.database.connections import StoreError, open_for_reading
from daemon.storage.database.schema import inspections
from daemon.storage.database.upkeep import quick_check
from daemon.storage.disk_space import storage_problems
from daemon.units import size_text, wall_seconds
from tools.setup.doctor.context import DoctorContext, Finding, database_of, ok, warn, wrong
from tools.setup.service_files import NAME, exec_words
from tools.terminal.console import as_typed

_SHOWN = 5
_LOOK_S = 3.0
_CALL_S = 5.0
_LARGE_LOG_BYTES = 10**9
_SYSTEMD_RUNS = Path("/run/systemd/system")


def configuration(context: DoctorContext) -> Iterator[Finding]:
    """Find mistakes in coserve.yaml, rules and catalog, and weights that cannot be used; `coserve check` reads them."""
    if context.path is None:
        yield warn(
            "configuration", "no line is named and none is here", f"{as_typed('init')}, or name its coserve.yaml"
        )
        return
    mistakes = list(context.mistakes)
    if context.config is not None:
        mistakes += settings_problems(context.config)
        mistakes += storage_problems(context.config) or claim_problems(context.path, context.config)
        try:
            load_rules_and_catalog(context.config)
            _, _, unusable = load_catalog(context.config.catalog, weights_folders(context.config))
            mistakes += map(str, unusable)
        except ConfigError as error:
            mistakes += map(str, error.problems)
    for problem in mistakes[:_SHOWN]:
        yield wrong("configuration", problem, _remedy(problem, context.path))
    if len(mistakes) > _SHOWN:
        more = f"and {len(mistakes) - _SHOWN} mistakes more"
        yield wrong("configuration", more, f"{as_typed(f'check {context.path}')} names all")
    if not mistakes:
        yield ok("configuration", f"{context.path}: coserve.yaml, rules, catalog and weights files fit together")


def _remedy(problem: str, path: Path) -> str:
    if "no expert `" in problem:
        return f"train or import it (coserve train, coserve import), then: {as_typed(f'check {path}')}"
    return f"correct it, then: {as_typed(f'check {path}')}"


def daemon(context: DoctorContext) -> Iterator[Finding]:
    """Check that the line runs, and report its own state."""
    if context.config is None:
        return
    status = context.status
    if status is None:
        if context.daemon_pid is not None and context.silent == "no_answer":
            so = f"process {context.daemon_pid} has the line and does not answer"
            yield wrong("daemon", so, "look at its log; systemctl restart coserve")
        else:
            yield ok("daemon", "the line does not run at the moment")
        return
    so = f"the line is {status['state']}, backlog {status['backlog']}"
    if status["state"] == "degraded":
        yield wrong("daemon", f"{so}; last error: {status['last_error']}", "correct that; the line then goes on")
    else:
        yield ok("daemon", so)
    for child in status.get("children", ()):
        if child["state"] != "running" or child["restarts"] > 2:
            so = f"{child['name']} is {child['state']} after {child['restarts']} restarts: {child['last_end']}"
            yield warn("daemon", so, "its log says why: journalctl -u coserve")
    for consumer in status.get("consumers", ()):
        if consumer.get("last_error"):
            so = f"consumer {consumer['name']} is {consumer['state']}: {consumer['last_error']}"
            yield warn("daemon", so, "nothing is lost: it goes on where it stopped when that is mended")


def database(context: DoctorContext) -> Iterator[Finding]:
    """A few seconds' look for damage, and how large its log has grown."""
    path = database_of(context.config) if context.config else None
    if context.config is None or path is None:
        return
    if not path.exists():
        yield ok("database", f"{path} is not there yet: the first start makes it")
        return
    try:
        damage, is_whole = quick_check(context.config.database, _LOOK_S)
    except StoreError as error:
        damage, is_whole = [str(error)], True
    if damage:
        remedy = "stop the line, coserve db check, and restore the last backup: docs/upgrading.md"
        yield wrong("database", f"{path} is damaged: {damage[0]}", remedy)
        return
    summary = "no damage" if is_whole else f"no damage in what {_LOOK_S:.0f} s can see (coserve db check sees all)"
    yield ok("database", f"{path}, {size_text(path.stat().st_size)}: {summary}")
    log = path.with_name(path.name + "-wal")
    if log.exists() and log.stat().st_size > _LARGE_LOG_BYTES:
        so = f"its log {log} has grown to {size_text(log.stat().st_size)}"
        yield warn("database", so, "a program keeps a read transaction open: end it")


def newest_image_s(config: Config) -> float | None:
    """Return when the newest image was accepted, in seconds since the epoch; None if unknown."""
    try:
        engine = open_for_reading(config.database)
    except (StoreError, ImportError, SQLAlchemyError):
        return None
    newest = select(inspections.c.accepted_at).order_by(inspections.c.inspection_id.desc()).limit(1)
    try:
        with engine.connect() as connection:
            newest_at = connection.execute(newest).scalar()
    except SQLAlchemyError:
        return None
    finally:
        engine.dispose()
    return None if newest_at is None else wall_seconds(newest_at)


def packages(context: DoctorContext) -> Iterator[Finding]:
    """Check the packages that this line needs beside the core."""
    config = context.config
    needed: dict[str, tuple[str, str]] = {}
    for consumer in config.consumers.values() if config is not None else ():
        if consumer.extra is not None:
            needed[consumer.extra[0]] = consumer.extra[1:]
    if config is not None and config.database.startswith("postgresql"):
        needed["postgresql"] = ("psycopg", "`database` names PostgreSQL")
    if config is not None and config.models:
        needed["moe"] = ("transformers", "a language model is configured")
    lacking = {extra: why for extra, (package, why) in needed.items() if find_spec(package) is None}
    for extra, why in lacking.items():
        yield warn("packages", f"the extra {extra} is not installed: {why}", install_with(extra))
    if not lacking:
        state = f"extras that this line needs are here: {', '.join(needed)}" if needed else "this line needs no extra"
        yield ok(
            "packages", state if config is not None else "what a line needs beside the core: name its coserve.yaml"
        )
    if config is not None and config.security.server_key is not None and not zmq.has("curve"):
        yield wrong(
            "packages", "this build of ZeroMQ has no CURVE", "install pyzmq from its wheel: it brings libsodium"
        )
    else:
        curve = "with" if zmq.has("curve") else "without"
        yield ok("packages", f"ZeroMQ {zmq.zmq_version()} {curve} CURVE")


def service(context: DoctorContext) -> Iterator[Finding]:
    """The unit of systemd: there, enabled, up; and what it would start."""
    unit = context.places.unit
    if not unit.is_file():
        yield ok("service", "not installed as a service (coserve install-service)")
        return
    start_lines = [line for line in unit.read_text(encoding="utf-8").splitlines() if line.startswith("ExecStart=")]
    program = Path(exec_words(start_lines[0].removeprefix("ExecStart="))[0]) if start_lines else None
    if program is None or not program.exists():
        so = f"{unit} starts {program}, which is not there" if program else f"{unit} has no ExecStart="
        yield wrong("service", so, "coserve install-service writes the unit again")
        return
    if not _SYSTEMD_RUNS.is_dir():
        yield ok("service", f"{unit} is installed; systemd does not run here")
        return
    yield from _unit_state()


def _unit_state() -> Iterator[Finding]:
    words = ["systemctl", "show", NAME, "--property=ActiveState,SubState,UnitFileState,NRestarts,Result"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_CALL_S, check=True)  # noqa: S603 - fixed
    except (OSError, subprocess.SubprocessError) as error:
        yield warn("service", f"systemd does not say how the service is: {error}", "systemctl status coserve")
        return
    state = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    so = f"the service is {state.get('ActiveState')} ({state.get('SubState')}), {state.get('UnitFileState')}"
    if state.get("ActiveState") == "failed":
        yield wrong("service", f"{so}: {state.get('Result')}", "journalctl -u coserve -n 50")
    elif int(state.get("NRestarts") or 0) > 2:
        yield warn("service", f"{so}, started again {state['NRestarts']} times", "journalctl -u coserve -n 50")
    elif state.get("UnitFileState") != "enabled":
        yield warn("service", so, "systemctl enable --now coserve, so that it comes up with the PC")
    else:
        yield ok("service", so)
