"""The files of the systemd service: their places, and the values that `install-service` takes from a configuration."""

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template

from daemon.config.addresses import CREDENTIALS
from daemon.config.settings import Config
from daemon.storage.database.connections import sqlite_path
from daemon.wire.sockets import is_open, is_open_host

NAME = "coserve"
#: A stop takes this much beyond `stop.within`: answers to publishers, the last writes, the last messages, a margin.
_STOP_MARGIN_S = 13
#: Folders that the unit itself lets the service write to.
_GRANTED = (Path("/var/lib/coserve"), Path("/run/coserve"), Path("/var/log/coserve"))
#: Folders that the sandbox hides (ProtectHome=, PrivateTmp=).
_HIDDEN = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))  # noqa: S108 - named, not used


class Places:
    """Paths of the installed files under `root`: the machine's own folders, or below a prefix."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unit = root / "etc/systemd/system/coserve.service"
        self.drop_ins = self.unit.with_name("coserve.service.d")
        self.sysusers = root / "etc/sysusers.d/coserve.conf"
        self.tmpfiles = root / "etc/tmpfiles.d/coserve.conf"
        self.config = root / "etc/coserve/coserve.yaml"
        self.keys = root / "etc/coserve/keys"
        self.state = root / "var/lib/coserve"
        self.runtime = root / "run/coserve"


def shipped(name: str) -> str:
    """Return the text of a file of `systemd/`, in a checkout or in the environment's `share/`."""
    return (_shipped_folder() / name).read_text(encoding="utf-8")


def _shipped_folder() -> Path:
    checkout = Path(__file__).resolve().parents[2] / "systemd"
    return checkout if (checkout / "coserve.service").is_file() else Path(sys.prefix) / "share" / NAME / "systemd"


def command() -> list[str]:
    """Return the command that starts this installation."""
    script = Path(sys.executable).parent / NAME
    return [str(script)] if script.is_file() else [sys.executable, "-m", "tools"]


def default_config(places: Places) -> str:
    """Return the configuration of a machine that has none yet."""
    text = Path(__file__).with_name("service.yaml").read_text(encoding="utf-8")
    return Template(text).substitute(config=places.config, runtime=places.runtime, state=places.state)


def default_rules() -> str:
    """Rules to begin with."""
    example = Path("routing_rules/examples/minimal.yaml")
    text = (Path(__file__).parents[2] / example).read_text(encoding="utf-8")
    return text.replace(str(example), "rules.yaml")


def unit(config: Config, path: Path, places: Places) -> str:
    """`coserve.service` for the line of `config`, which is read from `path`."""
    writable = written_folders(config)
    weights = dict.fromkeys([config.catalog.parent, *(model.checkpoint for model in config.models.values())])
    outside = [folder for folder in writable if not any(folder.is_relative_to(place) for place in _GRANTED)]
    text = _fill(
        shipped("coserve.service"),
        {
            "Documentation": f"file:{_shipped_folder().parent / 'docs' / 'service.md'}",
            "ExecStart": _quoted([*command(), "run", str(path)]).replace("$", "$$"),
            "TimeoutStopSec": f"{int(config.stop.within) + _STOP_MARGIN_S}s",
            "ReadWritePaths": _quoted(map(str, outside)),
            "ReadOnlyPaths": _quoted(f"-{folder}" for folder in weights if folder not in writable),
        },
    )
    loads = "".join(f"LoadCredential={name}:{places.keys / name}\n" for name in credentials(config))
    return text.replace("\n# Resources.", f"{loads}\n# Resources.", 1)


def drop_ins(config: Config) -> dict[str, bool]:
    """Return the drop-ins that ship with CoServe, True for those that this line needs."""
    endpoints = config.endpoints
    reachable = [*endpoints.intake, endpoints.results]
    is_http_open = endpoints.http is not None and is_open(endpoints.http.replace("http://", "tcp://", 1))
    return {
        "nvidia.conf": any(name.startswith("cuda") for name in config.devices),
        "network.conf": is_http_open or any(map(is_open, reachable)) or _needs_others(config),
    }


def _needs_others(config: Config) -> bool:
    """Return True if the line talks to a server on another machine, such as a broker or a hub."""
    servers = [server for consumer in config.consumers.values() for server in consumer.servers()]
    return any(map(is_open_host, (host for host, _ in servers)))


def secrets(config: Config) -> dict[str, Path]:
    """Return the secret files on this disk by configuration key; systemd's credentials lie elsewhere."""
    files = _key_files(config, only_secrets=True)
    return {key: file for key, file in files.items() if CREDENTIALS not in str(file)}


def _key_files(config: Config, *, only_secrets: bool = False) -> dict[str, Path]:
    """Return the files of keys, tokens and certificates by configuration key, systemd's own credentials among them."""
    own = {"security.server_key": config.security.server_key, "security.http_token": config.security.http_token}
    return {key: file for key, file in own.items() if file is not None} | {
        f"consumers.{name}.{'.'.join(key)}": file
        for name, consumer in config.consumers.items()
        for key, file in consumer.files().items()
        if key in consumer.secret_files or not only_secrets
    }


def credentials(config: Config) -> list[str]:
    """Return the names of the secrets that the configuration expects of `LoadCredential=`."""
    return list(dict.fromkeys(path.name for path in _key_files(config).values() if CREDENTIALS in str(path)))


def unreadable_secrets(config: Config, uid: int) -> list[Path]:
    """Return secrets that lie in files of another user than `uid`, which the daemon could not read."""
    return [path for path in secrets(config).values() if path.is_file() and path.stat().st_uid != uid]


def written_folders(config: Config) -> list[Path]:
    """Return the folders that the daemon writes to, none inside another."""
    database = sqlite_path(config.database)
    endpoints = config.endpoints
    addresses = (*endpoints.intake, endpoints.control)
    sockets = [Path(address[6:]) for address in addresses if address.startswith("ipc://")]
    folders = {config.journal, config.quarantine, config.images, *(socket.parent for socket in sockets)}
    folders |= {file.parent for file in (database, config.record) if file is not None}
    folders |= {config.positions} if config.consumers else set()
    return sorted(folder for folder in folders if not folders & set(folder.parents))


def hidden(config: Config, path: Path) -> list[Path]:
    """Return the paths of the line that the sandbox hides from the service."""
    python = Path(sys.executable)
    needed = [path, python, python.resolve(), config.rules, config.catalog, *written_folders(config)]
    return [path for path in needed if any(path.is_relative_to(place) for place in _HIDDEN)]


def started_config(unit_text: str) -> Path | None:
    """The configuration that a unit starts its daemon with."""
    start = re.search(r"^ExecStart=(.+)$", unit_text, flags=re.MULTILINE)
    return Path(exec_words(start[1])[-1]) if start else None


def exec_words(exec_start: str) -> list[str]:
    """The words of an `ExecStart=` as `unit` writes it."""
    return [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(exec_start)]


def _fill(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        line = re.compile(rf"^{key}=.*$", flags=re.MULTILINE)
        assert len(line.findall(text)) == 1, f"the unit needs exactly one line {key}="
        text = line.sub(lambda _, key=key, value=value: f"{key}={value}", text)
    return text


def _quoted(words: Iterable[str]) -> str:
    """Words as systemd.syntax(7) and its specifiers want them."""
    doubled = (word.replace("%", "%%") for word in words)
    return " ".join(
        word if re.fullmatch(r"[\w/.:=@+,%$-]+", word) else '"' + word.replace("\\", r"\\").replace('"', r"\"") + '"'
        for word in doubled
    )
