"""A line for commands about experts: its files, which need no daemon, its database, and its daemon if one runs."""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from daemon.config.settings import Config
from daemon.errors import ConfigError
from daemon.line.devices import complete, memory_problems
from daemon.line.line import load_routes, weights_folders
from daemon.line.making import Draft, Made, make_edition, working_files
from daemon.line.profile import this_machine
from daemon.line.served import Served, labels_of
from daemon.line.shared_devices import images_config
from daemon.storage.database.connections import sqlite_path
from daemon.wire.control import ControlError, ask
from experts.catalog import Catalog, CatalogEntry, CatalogFile, resolve
from experts.editions.edition import Edition, EditionError
from experts.editions.folder import EditionFolder
from experts.editions.history import Expert, experts_of
from experts.people import current_user
from experts.spec import ExpertId, ExpertSpec
from routing_rules.compile import RulesError, compile_rules
from routing_rules.load import read_yaml_text
from routing_rules.routes import Routes
from tools.terminal.console import exit_on, fail
from tools.terminal.open_line import reading, settings_of

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from daemon.storage.database.reader import ResultsReader

NO_DAEMON = "no daemon runs: the next start puts it in force"
_ASK_S = 3.0
#: Characters of a refusal that the daemon notes.
_MAX_REASON = 4000
#: Weights may have to reach other PCs first.
_ADOPT_S = 60.0
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ExpertsLine:
    path: Path
    config: Config

    @property
    def folder(self) -> EditionFolder:
        return EditionFolder(self.config.catalog)

    def experts(self) -> dict[str, Expert]:
        """Exit with status 2 if editions or candidates cannot be read."""
        with exit_on(EditionError, status=2):
            return experts_of(self.folder)

    def expert(self, name: str) -> Expert:
        """Raises EditionError if it is neither in force nor a candidate."""
        experts = self.experts()
        if name not in experts:
            raise EditionError(f"there is no expert {name}; there are {', '.join(experts) or 'none'}")
        return experts[name]

    def spec(self, name: str) -> ExpertSpec:
        """Return the version in force as the daemon has it. Raises EditionError."""
        entry = self.expert(name).in_force
        if entry is None:
            raise EditionError(f"{name} has no version in force: coserve experts promote")
        catalog, problems = self.catalog({name: entry})
        if problems:
            raise EditionError(problems[0])
        return catalog[ExpertId(name)]

    def catalog(self, entries: Mapping[str, CatalogEntry], *, elsewhere: bool = False) -> tuple[Catalog, list[str]]:
        """Return specs of `entries` as the daemon would have them, and problems.

        With `elsewhere` a weights file may lie outside the line's folders, as a candidate's does.
        """
        file = CatalogFile(experts=dict(entries))
        folders = () if elsewhere else weights_folders(self.config)
        catalog, problems = resolve(file, self.config.catalog.parent, folders)
        return catalog, [f"{self.config.catalog}: {where[1]}: {message}" for where, message in problems]

    def edition(self) -> Edition:
        """Return the edition in force. Raises EditionError."""
        edition = self.folder.in_force()
        if edition is None:
            raise EditionError("no edition is in force yet: coserve reload makes one of the rules and the catalog")
        return edition

    def routes(self, catalog: Catalog, rules: Path | None = None) -> Routes:
        """Compile `rules`, without them those in force, against a catalog. Raises RulesError, EditionError."""
        edition = self.folder.in_force() if rules is None else None
        if edition is None:
            return load_routes(rules or self.config.rules, catalog)
        document = read_yaml_text(edition.rules, f"edition {edition.number}, rules", refuse_hidden=True)
        return compile_rules(document, document.name, labels_of(catalog or None))

    def in_force(self) -> tuple[Catalog, Routes | None]:
        """Return the specs in force, and the rules compiled against them; None if they have mistakes."""
        catalog, _ = self.catalog(entries_in_force(self.experts()))
        try:
            return catalog, self.routes(catalog)
        except RulesError:
            return catalog, None

    def problems(self, entries: Mapping[str, CatalogEntry], *, elsewhere: bool = False) -> list[str]:
        """Return why a daemon would refuse `entries` with the rules in force: missing labels, too little memory.

        An unusable weights file is no reason: that expert alone fails.
        """
        catalog, _ = self.catalog(entries, elsewhere=elsewhere)
        try:
            routes = self.routes(catalog)
        except RulesError as error:
            return [str(problem) for problem in error.problems]
        return memory_problems(images_config(self.config), routes.experts, catalog)

    def new_problems(self, entries: Mapping[str, CatalogEntry]) -> list[str]:
        """Return the problems that `entries`, which lie elsewhere, would add to the line's."""
        present = entries_in_force(self.experts())
        known = self.problems(present)
        problems = self.problems({**present, **entries}, elsewhere=True)
        return [problem for problem in problems if problem not in known]

    def make_edition(self, build: Callable[[Edition | None], Draft], **options: bool) -> Made:
        """Put in force what `build` makes of the edition in force, in the name of the person who typed the command."""
        return make_edition(self.config, current_user(), build, self, **options)

    def reload(self, note: str | None, *, now: bool = False) -> Made:
        """Put in force what people edit; a running daemon notes a refusal in its log and in `changes`."""
        try:
            return self.make_edition(lambda _: working_files(self.config, note, now=now))
        except (ConfigError, EditionError) as error:
            with suppress(ControlError):
                self.ask("reload_refused", who=current_user(), note=note, reason=str(error)[:_MAX_REASON])
            raise

    # The line as the maker of an edition sees it (daemon/line/making.py)

    def highest(self) -> int | None:
        """Return the highest edition that a row names, 0 without a database; None if this user may not read it."""
        return self._read(lambda reader: reader.highest_edition(), without=0)

    def digest(self, number: int) -> str | None:
        return self._read(lambda reader: reader.edition_digest(number), without=None)

    def _read(self, read: "Callable[[ResultsReader], _Answer]", without: _Answer) -> _Answer | None:
        """Return what the database says, `without` if there is none; None if this user may not read it."""
        from sqlalchemy.exc import SQLAlchemyError

        from daemon.storage.database.reader import ResultsReader

        try:
            if not sqlite_path(self.config.database).exists():
                return without
            with closing(ResultsReader(self.config.database)) as reader:
                return read(reader)
        except (SQLAlchemyError, OSError):
            return None

    def check(self, served: Served) -> None:
        try:
            self.ask("adopt", _ADOPT_S, edition=served.number, only_check=True)
        except ControlError as error:
            if error.code in ("bad_rules", "bad_edition"):
                raise ConfigError(error.reason.splitlines()) from None
            if error.code != "not_allowed":  # who may write here, but not ask the daemon, leaves the check to it
                raise EditionError(
                    f"the daemon did not check edition {served.number} ({error.reason}): nothing has changed"
                ) from None

    def adopt(self, number: int) -> dict[str, Any] | None:
        try:
            return self.ask("adopt", _ADOPT_S, edition=number)
        except ControlError as error:
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

    def named_editions(self) -> tuple[set[int], set[int]]:
        """Return the editions that stored boards name, and those of attempts that are still open."""
        from sqlalchemy import select

        from daemon.storage.database.schema import boards

        query = select(boards.c.edition).distinct()
        is_open = query.where(boards.c.completed_at.is_(None))
        found = self.in_database(lambda rows: (set(rows.scalars(query)), set(rows.scalars(is_open))))
        return found or (set[int](), set[int]())

    def record_versions(self) -> None:
        """Have a running daemon record what was done to versions in `changes`; otherwise its next start does."""
        with suppress(ControlError):
            self.ask("versions")

    def in_database(self, question: "Callable[[Connection], _Answer]") -> _Answer | None:
        if not sqlite_path(self.config.database).exists():
            return None
        with reading(self.config) as engine, engine.connect() as connection:
            return question(connection)


def entries_in_force(experts: Mapping[str, Expert]) -> dict[str, CatalogEntry]:
    return {name: expert.in_force for name, expert in experts.items() if expert.in_force is not None}


def put_first_in_force(line: ExpertsLine) -> None:
    """Make the first edition of the working files, so that a version can replace another. Raises ConfigError."""
    if line.folder.current() is None:
        line.make_edition(lambda _: working_files(line.config, None))


def open_line(path: Path) -> ExpertsLine:
    """Exit with status 2 and every mistake if the coserve.yaml cannot be read."""
    config, _, problems = complete(path, settings_of(path), this_machine())
    if problems:
        fail("\n".join(map(str, problems)), status=2)
    return ExpertsLine(path, config)
