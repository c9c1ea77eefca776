"""The systemd service: fill in its files from a configuration, install and remove them."""

import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template

from daemon.config.settings import CREDENTIALS, Config, load_config
from daemon.errors import ConfigError
from daemon.host.folders import make_folder
from daemon.storage.database.connections import sqlite_path
from daemon.wire.sockets import is_open, is_open_host
from experts.durable import replace_durably
from experts.editions.folder import EditionFolder
from tools.terminal.console import CommandError, console

NAME = "coserve"
#: sd_booted(3)
_SYSTEMD_RUNS = Path("/run/systemd/system")
_SECRET_MODE = 0o700
#: Time beyond that for batches and backlog, for last answers, writes and messages, with a margin.
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
    script = Path(sys.executable).parent / NAME
    return [str(script)] if script.is_file() else [sys.executable, "-m", "tools"]


def default_config(places: Places) -> str:
    text = Path(__file__).with_name("service.yaml").read_text(encoding="utf-8")
    return Template(text).substitute(config=places.config, runtime=places.runtime, state=places.state)


def default_rules() -> str:
    example = Path("routing_rules/examples/minimal.yaml")
    return (Path(__file__).parents[2] / example).read_text(encoding="utf-8").replace(str(example), "rules.yaml")


def unit(config: Config, path: Path, places: Places) -> str:
    """Return `coserve.service` for the line of `config`, which is read from `path`."""
    writable = written_folders(config)
    weights = dict.fromkeys([config.catalog.parent, *(model.checkpoint for model in config.models.values())])
    outside = [folder for folder in writable if not any(folder.is_relative_to(place) for place in _GRANTED)]
    text = _fill(
        shipped("coserve.service"),
        {
            "Documentation": f"file:{_shipped_folder().parent / 'docs' / 'service.md'}",
            "ExecStart": _quoted([*command(), "run", str(path)]).replace("$", "$$"),
            "TimeoutStopSec": f"{int(config.stop.longest_s) + _STOP_MARGIN_S}s",
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
    servers = [server for consumer in config.consumers.values() for server in consumer.servers()]
    is_http_open = endpoints.http is not None and is_open(endpoints.http.replace("http://", "tcp://", 1))
    return {
        "nvidia.conf": any(name.startswith("cuda") for name in config.devices),
        "network.conf": is_http_open or any(map(is_open, reachable)) or any(is_open_host(host) for host, _ in servers),
    }


def secrets(config: Config) -> dict[str, Path]:
    """Return the secret files on this disk by configuration key; systemd's credentials lie elsewhere."""
    files = _key_files(config, only_secrets=True)
    return {key: file for key, file in files.items() if CREDENTIALS not in str(file)}


def _key_files(config: Config, *, only_secrets: bool = False) -> dict[str, Path]:
    """Return the files of keys, tokens and certificates by configuration key, systemd's own credentials included."""
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
    """Return secrets in files of another user than `uid`, which the daemon could not read."""
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
    start = re.search(r"^ExecStart=(.+)$", unit_text, flags=re.MULTILINE)
    return Path(exec_words(start[1])[-1]) if start else None


def exec_words(exec_start: str) -> list[str]:
    """Split an `ExecStart=` that `unit` wrote into its words."""
    return [word.replace("$$", "$").replace("%%", "%") for word in shlex.split(exec_start)]


def _fill(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        line = re.compile(rf"^{key}=.*$", flags=re.MULTILINE)
        assert len(line.findall(text)) == 1, f"the unit needs exactly one line {key}="
        text = line.sub(lambda _, key=key, value=value: f"{key}={value}", text)
    return text


def _quoted(words: Iterable[str]) -> str:
    """Quote words for a unit file: systemd.syntax(7), `%` doubled."""
    doubled = (word.replace("%", "%%") for word in words)
    return " ".join(
        word if re.fullmatch(r"[\w/.:=@+,%$-]+", word) else '"' + word.replace("\\", r"\\").replace('"', r"\"") + '"'
        for word in doubled
    )


def install(path: Path, places: Places, *, is_trial: bool) -> None:
    """Install the service of the line at `path`, write a first configuration if it is missing, and print each change.

    A trial goes under a prefix and does not call systemd. Raises ConfigError, OSError, CommandError.
    """
    runs = not is_trial and _SYSTEMD_RUNS.is_dir()
    if path.exists():
        _say("kept", path)
    else:
        _write(path, default_config(places))
        _write(path.with_name("rules.yaml"), default_rules(), keep=True)
    config = load_config(path, {})
    if not is_trial and (unseen := hidden(config, path)):
        raise CommandError(
            f"the service could not see {unseen[0]}: homes and temporary folders are hidden from it."
            " Move the line to /etc/coserve and /var/lib/coserve, or to /srv, and install CoServe under /opt",
            status=2,
        )
    _write(places.sysusers, shipped("coserve.sysusers"))
    _write(places.tmpfiles, shipped("coserve.tmpfiles"))
    _write(places.unit, unit(config, path, places))
    for name, is_needed in drop_ins(config).items():
        text = shipped(f"coserve.service.d/{name}")
        if is_needed:
            _write(places.drop_ins / name, text, keep=name == "network.conf")
        else:
            _remove(places.drop_ins / name, only=text)
    if credentials(config) and not places.keys.is_dir():
        places.keys.mkdir(parents=True)
        places.keys.chmod(_SECRET_MODE)
        _say("made", places.keys)
    if runs:
        _call("systemd-sysusers", str(places.sysusers))
        _call("systemd-tmpfiles", "--create", str(places.tmpfiles))
        _call("systemctl", "daemon-reload")
    user = pwd.getpwnam(NAME) if runs else None
    for folder in written_folders(config):
        if not folder.is_relative_to("/run"):
            _own(folder, user)
    for secret in unreadable_secrets(config, user.pw_uid) if user else ():
        _leave_to_person(f"chown coserve:coserve {secret}")
    _say_next(path, config, runs=runs, is_trial=is_trial)


def uninstall(places: Places, *, is_trial: bool) -> None:
    """Stop the service and remove what `install` wrote, unless a person changed it. Raises OSError, CommandError."""
    runs = not is_trial and _SYSTEMD_RUNS.is_dir()
    line = started_config(places.unit.read_text(encoding="utf-8"))
    if runs:
        _call("systemctl", "disable", "--now", NAME)
    _remove(places.unit)
    for name in ("nvidia.conf", "network.conf"):
        _remove(places.drop_ins / name, only=shipped(f"coserve.service.d/{name}"))
    if places.drop_ins.is_dir() and not any(places.drop_ins.iterdir()):
        places.drop_ins.rmdir()
    _remove(places.sysusers)
    _remove(places.tmpfiles)
    if runs:
        _call("systemctl", "daemon-reload")
    for path in _left_behind(line):
        _say("left", path)
    if runs:
        console.print("The user coserve stays: it owns these files.")


def _say(did: str, path: Path) -> None:
    console.print(f"{did:<10} {path}")


def _leave_to_person(command: str) -> None:
    console.print(f"to do      {command}", style="yellow")


def _write(path: Path, text: str, *, keep: bool = False) -> None:
    """Write `text` whole or not at all; with `keep`, leave an existing file as it is."""
    present = path.read_text(encoding="utf-8") if path.exists() else None
    if present == text or (keep and present is not None):
        _say("unchanged" if present == text else "kept", path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, text, mode=0o644)
    _say("wrote", path)


def _remove(path: Path, *, only: str | None = None) -> None:
    """Remove `path` if it exists; with `only`, unless its text differs: a person has changed it."""
    if not path.exists():
        return
    is_changed = only is not None and path.read_text(encoding="utf-8") != only
    if not is_changed:
        path.unlink()
    _say("kept" if is_changed else "removed", path)


def _own(folder: Path, user: pwd.struct_passwd | None) -> None:
    """Make a folder that the service's user owns, or print how to change the owner of an existing one."""
    is_new = not folder.is_dir()
    make_folder(folder)
    if is_new:
        _say("made", folder)
        if user:
            os.chown(folder, user.pw_uid, user.pw_gid)
    elif user and folder.stat().st_uid != user.pw_uid:
        _leave_to_person(f"chown -R coserve:coserve {folder}")


def _call(*words: str) -> None:
    tool = shutil.which(words[0])
    if tool is None:
        raise CommandError(f"there is no {words[0]} here, although systemd runs: is it in PATH?", status=2)
    done = subprocess.run([tool, *words[1:]], check=False)  # noqa: S603 - fixed words
    if done.returncode:
        raise CommandError(f"{' '.join(words)} ended with status {done.returncode}", status=2)
    console.print(f"ran        {' '.join(words)}")


def _left_behind(line: Path | None) -> list[Path]:
    """Return the line's files and folders that stay; its configuration alone if that cannot be read."""
    if line is None or not line.is_file():
        return []
    try:
        folders = [folder for folder in written_folders(load_config(line, {})) if folder.is_dir()]
    except ConfigError:
        folders = []
    return [line, *(folder for folder in folders if not folder.is_relative_to("/run"))]


def _say_next(path: Path, config: Config, *, runs: bool, is_trial: bool) -> None:
    console.print("\nNext:")
    if not config.catalog.is_file():
        console.print("  put rules and experts where the configuration names them (coserve import, train, restore)")
    console.print(f"  coserve check {path}")
    if not EditionFolder(config.catalog).pointer.is_file():  # the service may not make it
        console.print(f"  coserve reload --config {path}  puts rules and experts in force as edition 1")
    if is_trial:
        console.print("  this was a trial under a prefix: systemd was not called")
    elif runs:
        console.print("  systemctl enable --now coserve\n  systemctl status coserve\n  journalctl -u coserve -f")
        console.print("  usermod -aG coserve NAME                  lets a person ask and talk to the line")
        console.print("  usermod -aG coserve,coserve-experts NAME  lets a person change its experts too")
    else:
        console.print("  systemd does not run here: the service starts where this system is booted with it")
