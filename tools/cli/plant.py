"""`coserve plant …`: the hub of many lines, and signed releases of what a line has in force."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.errors import ConfigError
from daemon.units import count_text, size_text
from tools.cli.setup import must_be_a_checkout
from tools.terminal.console import (
    AsJson,
    Column,
    ConfigPath,
    console,
    end_with,
    exit_on,
    fail,
    need_file,
    need_folder,
    print_rows,
    say,
)
from tools.terminal.open_line import settings_of
from tools.terminal.option_values import Commands, Discard, Note, Now

if TYPE_CHECKING:
    from daemon.registry.hub_store import Source

plant_app = typer.Typer(cls=Commands, no_args_is_help=True, help="One place for the results of many lines.")

_PLANT = "docs/plant.md has an example of a plant.yaml to begin with"
_PLACE = "A folder or USB stick, or the hub's http://…"
Token = Annotated[
    Path | None,
    typer.Option("--token", metavar="FILE", help="The hub's token, or the line's key there.", show_default=False),
]
_MAX_DAYS = 366 * 5
_FIELDS = ("release", "problem", "signer", "contents", "bytes", "made_at", "expires_at", "made_by", "line", "note")
PlantPath = Annotated[Path, typer.Argument(metavar="PLANT", help="The hub's plant.yaml.", show_default=False)]


@plant_app.command()
def run(plant: PlantPath) -> None:
    """Run the hub in the foreground: its database's schema and upkeep, pictures and pages; stops on SIGTERM or Ctrl-C.

    Example: coserve plant run /etc/coserve/plant.yaml
    """
    need_file(plant, _PLANT)
    from daemon.plant.hub import run_hub
    from daemon.plant.page.app import plant_pages

    with exit_on(ConfigError, status=2):
        run_hub(plant, plant_pages)


@plant_app.command()
def check(plant: PlantPath, as_json: AsJson = False) -> None:
    """Check plant.yaml, naming each mistake with its line, and its database. Status 1 if anything is wrong.

    Example: coserve plant check /etc/coserve/plant.yaml
    """
    need_file(plant, _PLANT)
    from daemon.plant.hub import check_hub

    facts = check_hub(plant)
    schema = count_text(facts["lines"], "line") if facts["schema"] else "no schema yet: coserve plant run makes it"
    end_with(plant, (), facts, f": PostgreSQL {facts['postgresql']}, {schema}", as_json=as_json)


@plant_app.command()
def accept(
    plant: PlantPath, line: Annotated[str, typer.Argument(metavar="LINE", help="The line's name.", show_default=False)]
) -> None:
    """Let another PC take over a line's name once, after its old PC was replaced. The hub keeps the line's results.

    Example: coserve plant accept /etc/coserve/plant.yaml line-3
    """
    need_file(plant, _PLANT)
    from daemon.plant.hub import accept_line

    accept_line(plant, line)
    console.print(f"{line}: the next PC that connects under this name is accepted")


@plant_app.command()
def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where the plant is made.")] = Path("demo-plant"),
    port: Annotated[int, typer.Option(help="The hub's port; the lines have the next three.")] = 9480,
) -> None:
    """Show a plant on this PC: three lines of rendered boards, their hub with PostgreSQL and pages, until Ctrl-C.

    Example: coserve plant demo --dir demo-plant
    """
    must_be_a_checkout()
    from tools.demo.plant import run_plant_demo
    from tools.query.formats import clean_up_on_signals

    clean_up_on_signals(signal.default_int_handler)
    run_plant_demo(folder, port)


@plant_app.command()
def push(
    config: ConfigPath,
    to: Annotated[str, typer.Option("--to", metavar="FOLDER|HUB", help=_PLACE)],
    key: Annotated[
        Path, typer.Option("--key", metavar="FILE", help="Your .sign_secret: coserve keys new NAME --sign.")
    ],
    name: Annotated[str, typer.Option("--name", help="The name of releases for lines that are alike.")] = "line",
    days: Annotated[int, typer.Option("--days", min=1, max=_MAX_DAYS, help="Days for which lines take it.")] = 90,
    rules: Annotated[bool, typer.Option("--rules/--no-rules", help="Include the line's rules.")] = True,
    token: Token = None,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Make a signed release of what a line has in force: experts, backbones, rules. The line itself does not change.

    Example: coserve plant push line/coserve.yaml --to /media/stick --key keys/anna.sign_secret
    """
    from daemon.registry.signing import read_signing_key
    from tools.registry.releases import push as push_release

    secret, valid_for_s, target = read_signing_key(key), days * 86400.0, _source_of(to, token)
    manifest = push_release(
        settings_of(config), target, secret, name, valid_for_s=valid_for_s, with_rules=rules, note=note
    )
    size_bytes, expires = sum(manifest.files.values()), manifest.expires_at
    what = f"{manifest.release}: {manifest.contents}, {size_text(size_bytes)}"
    facts = {"release": manifest.release, "expires_at": expires.isoformat(), "bytes": size_bytes}
    say(facts, f"{what}; lines take it until {expires:%Y-%m-%d %H:%M} UTC", as_json=as_json)


@plant_app.command()
def pull(
    config: ConfigPath,
    source: Annotated[str, typer.Option("--from", metavar="FOLDER|HUB", help=_PLACE)],
    release: Annotated[
        str, typer.Option("--release", metavar="NAME[/N]", help="The release; without N the newest.")
    ] = "line",
    newest: Annotated[
        bool, typer.Option("--newest", help="The newest by a signer of the line, unless it has had it: for a timer.")
    ] = False,
    now: Now = False,
    allow_older: Annotated[bool, typer.Option("--allow-older", help="Allow an older or an expired release.")] = False,
    discard: Discard = False,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Put a release in force on a line: signature, signer, number and every file are checked before anything changes.

    It makes an edition: the one in force, with the release's experts and rules. Boards that have begun are judged to
    their end by the edition in which they began. An interrupted pull has changed nothing and goes on where it stopped.

    Example: coserve plant pull line/coserve.yaml --from /media/stick --release mainboards
    """
    from daemon.registry.manifest import parse_release
    from tools.experts.line import open_line
    from tools.registry.releases import PullOptions
    from tools.registry.releases import pull as pull_release

    name, number = parse_release(release) if "/" in release else (release, None)
    if newest and (number is not None or allow_older):
        fail("--newest goes with neither a number nor --allow-older", status=2)
    options = PullOptions(number, newest, now, allow_older, discard)
    place = _source_of(source, token)
    pulled = pull_release(open_line(config), place, name, options)
    if isinstance(pulled, str):
        had = f"this line has had {pulled}: {place} has nothing newer by a signer of this line"
        say({"release": pulled}, had, as_json=as_json)
        return
    number, signer, is_heard = pulled.made.edition.number, pulled.release.signer, pulled.made.adopted is not None
    facts = {"release": pulled.manifest.release, "signer": signer, "fetched_bytes": pulled.fetched_bytes}
    facts |= {"experts": pulled.changed, "rules": pulled.rules_changed, "edition": number, "heard": is_heard}
    what = f"{count_text(len(pulled.changed), 'expert')} changed" + (", rules changed" if pulled.rules_changed else "")
    when = "the daemon judges by it" if is_heard else "no daemon runs: its next start does"
    edition = f"{size_text(pulled.fetched_bytes)} fetched; edition {number} is in force; {when}"
    say(facts, f"{pulled.manifest.release}, signed by {signer}: {what}; {edition}", as_json=as_json)


@plant_app.command()
def releases(
    place: Annotated[str, typer.Argument(metavar="FOLDER|HUB", help=_PLACE)],
    signer: Annotated[
        list[Path] | None, typer.Option("--signer", metavar="FILE", help="A key (.sign) to accept; may be repeated.")
    ] = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """List the releases of a folder, a USB stick or a hub; `--signer` checks signatures and a folder's files.

    Status 1 if anything is wrong. A line's pull checks all of it again.

    Example: coserve plant releases /media/stick --signer keys/anna.sign
    """
    from daemon.registry.signing import read_public_key

    source = _source_of(place, token)
    keys = {file: read_public_key(file) for file in signer} if signer else None
    rows = [_row(source, name, number, keys) for name in source.names() for number in source.numbers(name)]
    columns: list[Column] = ["release", "problem", "signer", "contents", ("bytes", lambda row: size_text(row["bytes"]))]
    columns += [("made at", lambda row: (row["made_at"] or "")[:10] or None)]
    columns += [("expires at", lambda row: (row["expires_at"] or "")[:10] or None), "made_by", "line", "note"]
    print_rows(f"Releases of {place}", rows, columns, as_json=as_json, unbroken=("release",), more="--json has all")
    if any(row["problem"] for row in rows):
        raise SystemExit(1)


def _row(source: "Source", name: str, number: int, keys: dict[Path, Any] | None) -> dict[str, Any]:
    """Return the facts of a release, and with `keys` its signer; the first thing wrong is its problem."""
    from daemon.registry.manifest import ReleaseError, decode, signer_of
    from daemon.registry.store import Store

    row: dict[str, Any] = dict.fromkeys(_FIELDS) | {"release": f"{name}/{number}", "bytes": 0}
    try:
        signed = source.manifest(name, number)
        row["signer"] = signer_of(signed, keys, row["release"]).name if keys is not None else None
        manifest = decode(signed.data, row["release"])
        row |= {"made_at": manifest.made_at.isoformat(), "made_by": manifest.made_by, "line": manifest.line}
        row |= {"expires_at": manifest.expires_at.isoformat(), "contents": manifest.contents}
        row |= {"bytes": sum(manifest.files.values()), "note": manifest.note}
        if keys is not None and isinstance(source, Store):
            for sha256, size_bytes in manifest.files.items():
                source.checked(sha256, size_bytes)
    except ReleaseError as error:
        row["problem"] = str(error)
    return row


def _source_of(place: str, token: Path | None) -> "Source":
    from daemon.registry.hub_store import HubStore
    from daemon.registry.store import Store

    if place.startswith(("http://", "https://")):
        try:
            return HubStore(place, token.read_text(encoding="ascii").strip() if token else None)
        except (OSError, UnicodeDecodeError) as error:
            fail(f"--token {token}: {getattr(error, 'strerror', None) or error}", status=2)
    need_folder(Path(place), "mount the stick, or make the folder first")
    return Store(Path(place))
