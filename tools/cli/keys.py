"""`coserve keys`: clients that may connect over the network. A running daemon reads the changed allow-list at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tools.terminal.console import DEFAULT_CONFIG, AsJson, ConfigOption, console, fail, print_json, print_table
from tools.terminal.option_values import Commands, Note

keys_app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Clients that may connect over the network: their keys, and the daemon's."
)

Name = Annotated[str, typer.Argument(help="The client's name, for example camera-3.", show_default=False)]


@keys_app.command()
def new(
    name: Annotated[str, typer.Argument(help="Names the files: NAME.key and NAME.key_secret.", show_default=False)],
    sign: Annotated[
        bool, typer.Option("--sign", help="For signing packages of `coserve export`: NAME.sign and NAME.sign_secret.")
    ] = False,
    server: Annotated[bool, typer.Option("--server", help="For the daemon itself, not for a client.")] = False,
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where to put them.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Make a key pair: a public .key, and a .key_secret that only its owner can read. Nothing is overwritten.

    Example: coserve keys new camera-3 --dir keys
    """
    from daemon.wire import keys

    with _exit_on_key_errors():
        if sign:
            from daemon.registry import signing

            public, secret = signing.make_signing_pair(folder, name)
            shown = signing.key_id(signing.read_public_key(public))
        else:
            public, secret = keys.make_key_pair(folder, name)
            shown = keys.fingerprint(keys.read_public_key(public))
    if as_json:
        print_json({"public": str(public), "secret": str(secret), "fingerprint": shown})
        return
    console.print(f"{public}: public, fingerprint {shown}\n{secret}: secret, mode 0600", markup=False)
    if sign:
        next_step = (
            f"Hand out {public.name}; sign with: coserve export … --sign {secret}, or plant push … --key {secret}"
        )
    elif server:
        next_step = f"Name the secret file as security.server_key in coserve.yaml; every client needs {public.name}."
    else:
        next_step = f"Move the secret file to the client, and let it in: coserve keys allow {public} {name}"
    console.print(next_step, markup=False)


@keys_app.command()
def allow(
    key: Annotated[
        str, typer.Argument(metavar="FILE|KEY", help="The client's .key file, or its public key.", show_default=False)
    ],
    name: Name,
    config: ConfigOption = DEFAULT_CONFIG,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Let a client in: add its public key to the folder of allowed clients, which a running daemon reads again.

    Example: coserve keys allow camera-3.key camera-3 --config demo/coserve.yaml
    """
    from daemon.wire.keys import allow as allow_key
    from daemon.wire.keys import checked_key, fingerprint, read_public_key, read_server_keys

    settings, folder = _allow_list_of(config)
    with _exit_on_key_errors():
        public = read_public_key(Path(key)) if Path(key).exists() or key.endswith(".key") else checked_key(key)
        server_key = settings.security.server_key
        if server_key and server_key.exists() and public == read_server_keys(server_key).public.decode():
            fail(f"{key} is the daemon's own key: name the .key file that `coserve keys new` made for {name}", status=1)
        allow_key(folder, name, public)
    _reload_keys(settings, note, as_json, f"{name} may come in, fingerprint {fingerprint(public)}")


@keys_app.command()
def revoke(name: Name, config: ConfigOption = DEFAULT_CONFIG, note: Note = None, as_json: AsJson = False) -> None:
    """Shut a client out: it leaves the allow-list, and a running daemon cuts its connections and hears it no more.

    The others' connections over the network are cut too, and come back within a second.

    Example: coserve keys revoke camera-3 --config demo/coserve.yaml
    """
    from daemon.wire.keys import revoke as revoke_key

    settings, folder = _allow_list_of(config)
    with _exit_on_key_errors():
        names = revoke_key(folder, name)
    sentence = f"{', '.join(names)} (one key): shut out" if names[1:] else f"{name} is shut out"
    _reload_keys(settings, note, as_json, sentence)


@keys_app.command("list")
def list_keys(config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """List the allowed clients, with fingerprints to compare by telephone, and the fingerprint of the daemon's own key.

    Example: coserve keys list --config demo/coserve.yaml
    """
    from daemon.wire.keys import KeyFileError, fingerprint, read_allow_list, read_server_keys

    settings, folder = _allow_list_of(config)
    with _exit_on_key_errors():
        allowed = read_allow_list(folder)
    try:
        server = fingerprint(read_server_keys(settings.security.server_key).public.decode())
    except KeyFileError as error:
        server = None
        allowed = type(allowed)(allowed.clients, (str(error), *allowed.problems))
    rows = sorted((name, fingerprint(key), key) for key, name in allowed.clients.items())
    if as_json:
        clients = [{"name": name, "fingerprint": shown, "public_key": key} for name, shown, key in rows]
        print_json({"clients": clients, "server": server, "problems": list(allowed.problems)})
        return
    if server:
        console.print(f"the daemon's own key: {server}", markup=False)
    print_table(f"Allowed in by {folder}", ("client", "fingerprint"), [row[:2] for row in rows])
    for problem in allowed.problems:
        console.print(f"to mend: {problem}", markup=False, style="yellow")


def _allow_list_of(config: Path) -> tuple[Any, Path]:
    from tools.terminal.open_line import settings_of

    settings = settings_of(config)
    if settings.security.allowed_clients is None:
        fail(
            f"{config}: names no security.allowed_clients and security.server_key: no client needs a key here", status=2
        )
    return settings, settings.security.allowed_clients


def _reload_keys(settings: Any, note: str | None, as_json: bool, sentence: str) -> None:
    """Have a running daemon read the keys again. The files are right already, also if it refuses."""
    from daemon.wire.control import ControlError, ask
    from experts.versions import current_user

    try:
        answer = ask(settings.endpoints.control, "keys", timeout_s=30.0, who=current_user(), note=note)
    except ControlError as error:
        if error.code != "no_daemon":
            fail(f"{sentence}, but not yet for the running daemon: {error}", status=1)
        answer = {"clients": None, "cut": False, "problems": []}
        sentence += "; no daemon is running, the next one knows it"
    if as_json:
        print_json(answer)
        return
    console.print(sentence, markup=False)
    for problem in answer["problems"]:
        console.print(problem, markup=False, style="yellow")


@contextmanager
def _exit_on_key_errors() -> Iterator[None]:
    from daemon.wire.keys import KeyFileError

    try:
        yield
    except KeyFileError as error:
        fail(str(error), status=1)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}: do this as the user who owns it", status=1)
