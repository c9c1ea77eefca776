"""Check that the consumers of a configuration can run: packages, passwords, certificates. Nothing is connected."""

from pathlib import Path

from daemon.config.addresses import CREDENTIALS
from daemon.config.settings import Config, at_their_lines
from daemon.consumers.kinds import make_consumer
from daemon.errors import MissingExtraError
from routing_rules.load import KeyPath

_UNSET = f"{CREDENTIALS} is not set here: systemd sets it for a unit with LoadCredential="


def consumer_problems(path: Path, config: Config) -> list[str]:
    """Return every mistake of each consumer, with its line."""
    return at_their_lines(path, [problem for name in config.consumers for problem in _problems(config, name)])


def consumer_warnings(path: Path, config: Config) -> list[str]:
    """Return settings that work and are unsafe, with their line."""
    consumers = config.consumers.items()
    warnings = [(("consumers", name, *key), text) for name, one in consumers for key, text in one.warnings()]
    return at_their_lines(path, warnings)


def _problems(config: Config, name: str) -> list[tuple[KeyPath, str]]:
    settings = config.consumers[name]
    unset = [(key, _UNSET) for key, file in settings.files().items() if CREDENTIALS in file.parts]
    problems: list[tuple[KeyPath, str]] = [
        (("consumers", name, *key), problem) for key, problem in unset or settings.file_problems()
    ]
    try:
        make_consumer(name, settings, config.journal)
    except MissingExtraError as error:
        problems.append((("consumers", name, "kind"), str(error)))
    return problems
