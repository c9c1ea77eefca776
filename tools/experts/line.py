"""A line for commands about experts: its files, which need no daemon, its database, and its daemon if one runs."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from daemon.config.settings import Config
from daemon.errors import ConfigError
from daemon.line.devices import complete, memory_problems
from daemon.line.line import load_routes, weights_folders
from daemon.line.profile import this_machine
from daemon.line.served import Served
from daemon.line.shared_devices import images_config
from daemon.storage.database.connections import sqlite_path
from daemon.wire.control import ControlError, ask
from experts.catalog import Catalog, CatalogEntry, CatalogFile, resolve
from experts.editions.edition import EditionError
from experts.versions import Expert, Versions, VersionsError
from routing_rules.compile import RulesError
from routing_rules.routes import Routes
from tools.terminal.console import exit_on, fail
from tools.terminal.open_line import reading, settings_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

_ASK_S = 3.0
#: Weights may have to reach other PCs first.
_ADOPT_S = 60.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ExpertsLine:
    path: Path
    config: Config
    versions: Versions

    def experts(self) -> dict[str, Expert]:
        """Exit with status 2 if the catalog cannot be read."""
        with exit_on(VersionsError, status=2):
            return self.versions.read()

    def expert(self, name: str) -> Expert:
        """Exit with status 1 if the catalog does not have it."""
        experts = self.experts()
        if name not in experts:
            fail(f"there is no expert {name}; there are {', '.join(experts)}", status=1)
        return experts[name]

    def catalog(self, entries: Mapping[str, CatalogEntry], *, elsewhere: bool = False) -> tuple[Catalog, list[str]]:
        """Return specs of `entries` as the daemon would have them, and problems.

        With `elsewhere` a weights file may lie outside the line's folders, as a candidate's does.
        """
        file = CatalogFile(experts=dict(entries))
        folders = () if elsewhere else weights_folders(self.config)
        catalog, problems = resolve(file, self.versions.folder, folders)
        return catalog, [f"{self.versions.catalog}: {where[1]}: {message}" for where, message in problems]

    def in_force(self) -> tuple[Catalog, Routes | None]:
        """Return the specs in force, and the rules compiled against them; None if they have mistakes."""
        catalog, _ = self.catalog(entries_in_force(self.experts()))
        try:
            return catalog, load_routes(self.config.rules, catalog)
        except RulesError:
            return catalog, None

    def problems(
        self, entries: Mapping[str, CatalogEntry], *, elsewhere: bool = False, rules: Path | None = None
    ) -> list[str]:
        """Return why a daemon would refuse a catalog of `entries`: missing labels, too little memory.

        `rules` replace the line's. An unusable weights file is no reason: that expert alone fails.
        """
        catalog, _ = self.catalog(entries, elsewhere=elsewhere)
        try:
            routes = load_routes(rules or self.config.rules, catalog)
        except RulesError as error:
            return [str(problem) for problem in error.problems]
        return memory_problems(images_config(self.config), routes.experts, catalog)

    def new_problems(self, entries: Mapping[str, CatalogEntry], rules: Path | None = None) -> list[str]:
        """Return the problems that `entries`, which lie elsewhere, would add to the line's."""
        present = entries_in_force(self.experts())
        known = self.problems(present)
        problems = self.problems({**present, **entries}, elsewhere=True, rules=rules)
        return [problem for problem in problems if problem not in known]

    # The line as the maker of an edition sees it (daemon/line/making.py)

    def highest(self) -> int | None:
        """Return the highest edition that a row names, 0 without a database; None if this user may not read it."""
        from sqlalchemy import func, select
        from sqlalchemy.exc import SQLAlchemyError

        from daemon.storage.database.schema import editions

        try:
            query = select(func.max(editions.c.edition))
            return self.in_database(lambda connection: connection.execute(query).scalar()) or 0
        except SQLAlchemyError:
            return None

    def digest(self, number: int) -> str | None:
        from sqlalchemy import select
        from sqlalchemy.exc import SQLAlchemyError

        from daemon.storage.database.schema import editions

        with suppress(SQLAlchemyError):
            query = select(editions.c.sha256).where(editions.c.edition == number)
            return self.in_database(lambda connection: connection.execute(query).scalar())
        return None

    def check(self, served: Served) -> None:
        self._ask_about(served.number, only_check=True)

    def adopt(self, number: int) -> dict[str, Any] | None:
        return self._ask_about(number)

    def _ask_about(self, number: int, **fields: bool) -> dict[str, Any] | None:
        try:
            return self.ask("adopt", _ADOPT_S, edition=number, **fields)
        except ControlError as error:
            if error.code in ("bad_rules", "bad_edition"):
                raise ConfigError(error.reason.splitlines()) from None
            raise EditionError(
                f"edition {number} is in force in the folder, but the daemon does not judge by it yet ({error.reason}):"
                " coserve reload"
            ) from None

    def ask(self, kind: str, timeout_s: float = _ASK_S, **fields: Any) -> dict[str, Any] | None:
        """Return the daemon's answer, None if none runs. Raises ControlError if it refuses."""
        try:
            return ask(self.config.endpoints.control, kind, timeout_s=timeout_s, **fields)
        except ControlError as error:
            if error.code == "no_daemon":
                return None
            raise

    def record_versions(self) -> None:
        """Have a running daemon record changes of versions in `changes`; otherwise its next start does."""
        with suppress(ControlError):
            self.ask("versions")

    def in_database(self, question: "Callable[[Connection], _Answer]") -> _Answer | None:
        if not sqlite_path(self.config.database).exists():
            return None
        with reading(self.config) as engine, engine.connect() as connection:
            return question(connection)


def entries_in_force(experts: Mapping[str, Expert]) -> dict[str, CatalogEntry]:
    return {name: expert.in_force for name, expert in experts.items() if expert.in_force is not None}


def open_line(path: Path) -> ExpertsLine:
    """Exit with status 2 and every mistake if the coserve.yaml cannot be read."""
    config, _, problems = complete(path, settings_of(path), this_machine())
    if problems:
        fail("\n".join(map(str, problems)), status=2)
    return ExpertsLine(path, config, Versions(config.catalog))
