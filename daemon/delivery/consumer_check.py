"""Whether the consumers of a configuration could be run: packages, passwords, certificates. Nobody is called."""

from pathlib import Path

from daemon.config.addresses import CREDENTIALS
from daemon.config.settings import Config, at_their_lines
from daemon.consumers.credentials import credential_problems
from daemon.consumers.kinds import make_consumer
from daemon.consumers.settings import MqttSettings
from daemon.errors import MissingExtraError
from daemon.wire.sockets import is_open_host
from routing_rules.load import KeyPath

_UNSET = f"{CREDENTIALS} is not set here: systemd sets it for a unit with LoadCredential="


def consumer_problems(path: Path, config: Config) -> list[str]:
    """Every mistake of each consumer, with its line."""
    return at_their_lines(path, [found for name in config.consumers for found in _problems(config, name)])


def consumer_warnings(path: Path, config: Config) -> list[str]:
    """What works and should not be left so, with its line."""
    found: list[tuple[KeyPath, str]] = []
    for name, settings in config.consumers.items():
        if settings.password is not None and settings.tls is None and is_open_host(settings.host):
            found.append((("consumers", name, "password"), "crosses the network as it is: add `tls: {}`"))
    return at_their_lines(path, found)


def _problems(config: Config, name: str) -> list[tuple[KeyPath, str]]:
    settings = config.consumers[name]
    found: list[tuple[KeyPath, str]] = [(("consumers", name, *key), problem) for key, problem in _files(settings)]
    try:
        make_consumer(name, config.consumers[name], config.journal)
    except MissingExtraError as error:
        found.append((("consumers", name, "kind"), str(error)))
    return found


def _files(settings: MqttSettings) -> list[tuple[tuple[str, ...], str]]:
    unset = [(key, _UNSET) for key, file in settings.files().items() if CREDENTIALS in file.parts]
    return unset or credential_problems(settings)
