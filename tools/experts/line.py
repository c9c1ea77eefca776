"""The line that a command about experts works on: its files without its daemon, and its daemon where one runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from daemon.config.settings import Config, load_config
from daemon.errors import ConfigError
from daemon.line.devices import complete, memory_problems
from daemon.line.line import load_routes, weights_folders
from daemon.line.profile import this_machine
from daemon.line.shared_devices import images_config
from daemon.storage.database.connections import StoreError, open_for_reading, shown
from daemon.wire.control import ControlError, ask
from experts.catalog import Catalog, CatalogEntry, CatalogFile, resolve
from experts.versions import Expert, Versions, VersionsError
from routing_rules.compile import RulesError
from routing_rules.routes import Routes
from tools.cli.console import fail

_ASK_S = 3.0


@dataclass(frozen=True, slots=True)
class ExpertsLine:
    """A configuration and the experts it names."""

    path: Path
    config: Config
    versions: Versions

    def experts(self) -> dict[str, Expert]:
        """All of them; leaves with status 2 where the catalog cannot be read."""
        try:
            return self.versions.read()
        except VersionsError as error:
            fail(str(error), status=2)

    def catalog(self, entries: Mapping[str, CatalogEntry], *, elsewhere: bool = False) -> tuple[Catalog, list[str]]:
        """Specs of `entries` as the daemon would have them, and what is wrong with them.

        With `elsewhere` a weights file may lie outside the line's folders, as a candidate does.
        """
        file = CatalogFile(experts=dict(entries))
        folders = () if elsewhere else weights_folders(self.config)
        catalog, problems = resolve(file, self.versions.folder, folders)
        return catalog, [f"{self.versions.catalog}: {where[1]}: {message}" for where, message in problems]

    def routes(self, catalog: Catalog) -> Routes | None:
        """The rules against `catalog`; None where they have mistakes."""
        try:
            return load_routes(self.config.rules, catalog)
        except RulesError:
            return None

    def problems(self, entries: Mapping[str, CatalogEntry], *, elsewhere: bool = False) -> list[str]:
        """Why a daemon would not take a catalog of `entries`: labels that the rules miss, memory that is too small.

        A weights file that cannot be used is no such reason: that expert alone fails.
        """
        catalog, _ = self.catalog(entries, elsewhere=elsewhere)
        try:
            routes = load_routes(self.config.rules, catalog)
        except RulesError as error:
            return [str(problem) for problem in error.problems]
        return memory_problems(images_config(self.config), routes.experts(), catalog)

    def ask(self, kind: str, timeout_s: float = _ASK_S) -> dict[str, Any] | None:
        """The daemon's answer; None where none runs. Raises ControlError where it refuses."""
        try:
            return ask(self.config.endpoints.control, kind, timeout_s=timeout_s)
        except ControlError as error:
            if error.code == "no_daemon":
                return None
            raise

    def served(self) -> dict[str, dict[str, Any]]:
        """What the daemon says of each expert; nothing where it does not run or may not be asked."""
        try:
            answer = self.ask("experts")
        except ControlError:
            return {}
        return {row["expert"]: row for row in (answer or {}).get("experts", ())}

    def in_database(self, question: Any, *arguments: Any) -> Any:
        """`question(connection, *arguments)`; None where the line has no database yet."""
        try:
            engine = open_for_reading(self.config.database)
        except StoreError:
            return None
        try:
            with engine.connect() as connection:
                return question(connection, *arguments)
        except SQLAlchemyError as error:
            fail(f"cannot read {shown(self.config.database)} ({error.__class__.__name__})", status=1)
        finally:
            engine.dispose()


def open_line(path: Path) -> ExpertsLine:
    """The line of a coserve.yaml; leaves with status 2 and every mistake where it cannot be read."""
    if not path.is_file():
        fail(f"no file {path}: name the line's coserve.yaml, or make a small line with `coserve demo`", status=2)
    try:
        config, _, problems = complete(path, load_config(path), this_machine())
    except ConfigError as error:
        fail(str(error), status=2)
    if problems:
        fail("\n".join(map(str, problems)), status=2)
    return ExpertsLine(path, config, Versions(config.catalog))
