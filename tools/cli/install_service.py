"""`coserve install-service` and `uninstall-service`: the daemon as a service of systemd, put there and taken away."""

import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from experts.durable import replace_durably
from tools.terminal.console import console, fail

if TYPE_CHECKING:
    from daemon.config.settings import Config
    from tools.setup.service_files import Places

#: sd_booted(3)
_SYSTEMD_RUNS = Path("/run/systemd/system")
_SECRET_MODE = 0o700

Prefix = Annotated[
    Path | None,
    typer.Option("--prefix", metavar="DIR", help="Everything lies under DIR, for a trial or an image; run nothing."),
]


def install_service(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="The line's coserve.yaml, used where it lies; without it /etc/coserve/coserve.yaml, made if missing.",
            show_default=False,
        ),
    ] = None,
    prefix: Prefix = None,
) -> None:
    """Install the daemon as a service of systemd: unit, user, folders. What you have changed is kept.

    Example: coserve install-service /etc/coserve/coserve.yaml
    """
    from daemon.config.settings import load_config
    from daemon.errors import ConfigError
    from tools.setup.service_files import Places, hidden, unreadable_secrets, written_folders

    places = Places((prefix or Path("/")).resolve())
    path = (config or places.config).resolve()
    if config is not None and not path.is_file() and path != places.config:
        fail(f"no file {config}: name the line's coserve.yaml, or none to begin with {places.config}", status=2)
    runs = prefix is None and _SYSTEMD_RUNS.is_dir()
    work = _Installation()
    try:
        _begin_config(work, path, places)
        settings = load_config(path, {})
        _refuse_hidden([] if prefix else hidden(settings, path))
        _write_files(work, settings, path, places)
        if runs:
            _call("systemd-sysusers", str(places.sysusers))
            _call("systemd-tmpfiles", "--create", str(places.tmpfiles))
            _call("systemctl", "daemon-reload")
        for folder in written_folders(settings):
            if not folder.is_relative_to("/run"):
                work.owned(folder, is_service_here=runs)
        if runs:
            for secret in unreadable_secrets(settings, pwd.getpwnam("coserve").pw_uid):
                console.print(f"to do      chown coserve:coserve {secret}", markup=False, style="yellow")
    except ConfigError as error:
        fail(str(error), status=2)
    except OSError as error:
        _refused(error)
    _say_next(path, settings.catalog.is_file(), runs=runs, prefix=prefix)


def uninstall_service(prefix: Prefix = None) -> None:
    """Stop the service and take away what install-service put there; configuration, results and images stay.

    Example: coserve uninstall-service
    """
    from tools.setup.service_files import NAME, Places, shipped, started_config

    places = Places((prefix or Path("/")).resolve())
    if not places.unit.exists():
        fail(f"no service is installed: there is no {places.unit}", status=1)
    work = _Installation()
    runs = prefix is None and _SYSTEMD_RUNS.is_dir()
    line = started_config(places.unit.read_text(encoding="utf-8"))
    try:
        if runs:
            _call("systemctl", "disable", "--now", NAME)
        work.remove(places.unit)
        for name in ("nvidia.conf", "network.conf"):
            work.remove(places.drop_ins / name, only=shipped(f"coserve.service.d/{name}"))
        if places.drop_ins.is_dir() and not any(places.drop_ins.iterdir()):
            places.drop_ins.rmdir()
        work.remove(places.sysusers)
        work.remove(places.tmpfiles)
        if runs:
            _call("systemctl", "daemon-reload")
    except OSError as error:
        _refused(error)
    for path in _left_behind(line):
        work.say("left", path)
    if runs:
        console.print("The user coserve stays, for it owns these files.")


def _begin_config(work: "_Installation", path: Path, places: "Places") -> None:
    from tools.setup.service_files import default_config, default_rules

    if path.exists():
        work.say("kept", path)
        return
    work.write(path, default_config(places))
    work.write(path.with_name("rules.yaml"), default_rules(), keep=True)


def _write_files(work: "_Installation", settings: "Config", path: Path, places: "Places") -> None:
    from tools.setup.service_files import credentials, drop_ins, shipped, unit

    work.write(places.sysusers, shipped("coserve.sysusers"))
    work.write(places.tmpfiles, shipped("coserve.tmpfiles"))
    work.write(places.unit, unit(settings, path, places))
    for name, is_needed in drop_ins(settings).items():
        text = shipped(f"coserve.service.d/{name}")
        if is_needed:
            work.write(places.drop_ins / name, text, keep=name == "network.conf")
        else:
            work.remove(places.drop_ins / name, only=text)
    if credentials(settings):
        work.folder(places.keys, _SECRET_MODE)


class _Installation:
    """Changes files and folders, and prints each change."""

    def say(self, did: str, path: Path) -> None:
        console.print(f"{did:<10} {path}", markup=False)

    def write(self, path: Path, text: str, *, keep: bool = False) -> None:
        """Write `text` whole or not at all; with `keep` what is there already stays."""
        present = path.read_text(encoding="utf-8") if path.exists() else None
        if present == text:
            self.say("unchanged", path)
            return
        if keep and present is not None:
            self.say("kept", path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(path, text, mode=0o644)
        self.say("wrote", path)

    def remove(self, path: Path, *, only: str | None = None) -> None:
        """Remove `path` if it is there; with `only`, not where a person has changed it."""
        if not path.exists():
            return
        if only is not None and path.read_text(encoding="utf-8") != only:
            self.say("kept", path)
            return
        path.unlink()
        self.say("removed", path)

    def folder(self, path: Path, mode: int) -> None:
        """Make a folder with its mode."""
        if not path.is_dir():
            path.mkdir(parents=True)
            path.chmod(mode)
            self.say("made", path)

    def owned(self, path: Path, *, is_service_here: bool) -> None:
        """A folder for the service to write to: made for its user, or named where another owns it."""
        from daemon.host.folders import make_folder

        is_new = not path.is_dir()
        make_folder(path)
        if is_new:
            self.say("made", path)
        if not is_service_here:
            return
        user = pwd.getpwnam("coserve")
        if is_new:
            os.chown(path, user.pw_uid, user.pw_gid)
        elif path.stat().st_uid != user.pw_uid:
            console.print(f"to do      chown -R coserve:coserve {path}", markup=False, style="yellow")


def _refuse_hidden(paths: list[Path]) -> None:
    if paths:
        fail(
            f"the service could not see {paths[0]}: homes and temporary folders are hidden from it."
            " Move the line to /etc/coserve and /var/lib/coserve, or to /srv, and install CoServe under /opt",
            status=2,
        )


def _refused(error: OSError) -> NoReturn:
    rights = "; run it with sudo, or try it with --prefix DIR" if isinstance(error, PermissionError) else ""
    fail(f"{error.filename}: {error.strerror}{rights}", status=2)


def _call(*words: str) -> None:
    """Run one of systemd's own tools; its output is shown."""
    tool = shutil.which(words[0])
    if tool is None:
        fail(f"there is no {words[0]} here, although systemd runs: is it in PATH?", status=2)
    done = subprocess.run([tool, *words[1:]], check=False)  # noqa: S603 - fixed words
    if done.returncode:
        fail(f"{' '.join(words)} ended with status {done.returncode}", status=2)
    console.print(f"ran        {' '.join(words)}", markup=False)


def _left_behind(line: Path | None) -> list[Path]:
    """Return the folders and files of the line that stay, as far as its configuration can still be read."""
    from daemon.config.settings import load_config
    from daemon.errors import ConfigError
    from tools.setup.service_files import written_folders

    if line is None or not line.is_file():
        return []
    try:
        settings = load_config(line, {})
    except ConfigError:
        return [line]
    folders = [folder for folder in written_folders(settings) if folder.is_dir()]
    return [line, *(folder for folder in folders if not folder.is_relative_to("/run"))]


def _say_next(path: Path, has_experts: bool, *, runs: bool, prefix: Path | None) -> None:
    console.print("\nNext:", markup=False)
    if not has_experts:
        console.print("  put rules and experts where the configuration names them (coserve import, train, restore)")
    console.print(f"  coserve check {path}", markup=False)
    if prefix is not None:
        console.print("  what lies under the prefix runs as its unit says; systemd was not called")
    elif runs:
        console.print("  systemctl enable --now coserve\n  systemctl status coserve\n  journalctl -u coserve -f")
        console.print("  usermod -aG coserve NAME                  lets a person ask and talk to the line")
        console.print("  usermod -aG coserve,coserve-experts NAME  lets a person change its experts too")
    else:
        console.print("  systemd does not run here: the service starts where this system is booted with it")
