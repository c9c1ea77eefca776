"""The files that people edit, beside the edition in force: what they hold is not in force before a reload."""

from collections.abc import Sequence
from typing import Any

import structlog

from daemon.config.settings import Config
from daemon.errors import ConfigError
from daemon.line.line import load_rules_and_catalog, states
from daemon.line.serving import Serving
from experts.editions.edition import EditionError
from experts.editions.folder import EditionFolder


class WorkingFiles:
    """`problem` says in a sentence why what lies in the folder is not what the line judges by; None if it is."""

    def __init__(self, config: Config, serving: Serving) -> None:
        self._config, self._serving = config, serving
        self._folder = EditionFolder(config.catalog)
        self._seen: Sequence[Any] = ()
        self.problem: str | None = None

    def poll(self) -> None:
        files = (self._config.rules, self._config.catalog, self._folder.pointer, self._folder.mark)
        seen = (*states(files), self._serving.current.number)
        if seen == self._seen:
            return
        try:
            problem = self._compare()
        except (EditionError, OSError) as error:
            problem = str(error)
        if problem is not None and problem != self.problem:
            structlog.get_logger("line").warning("files_not_in_force", problem=problem)
        self._seen, self.problem = seen, problem

    def _compare(self) -> str | None:
        in_force, pointer = self._serving.current.edition, self._folder.current()
        if pointer != in_force.number:
            where = f"edition {pointer} is in force in {self._folder.folder}"
            return f"{where}, but the line judges by edition {in_force.number}: coserve reload"
        if self._folder.is_rewriting:
            files = f"{self._config.rules} and {self._config.catalog}"
            return f"{files} are from before edition {pointer}: the next coserve reload, promote or pull writes them"
        edited = self._folder.stale_files(in_force, self._config.rules)
        if not edited:
            return None
        try:
            load_rules_and_catalog(self._config)
        except ConfigError as error:
            return f"{error.problems[0]}; edition {pointer} stays in force: mend the file, then coserve reload"
        return f"{' and '.join(map(str, edited))}: edited, not in force: coserve reload"
