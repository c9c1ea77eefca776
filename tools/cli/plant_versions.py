"""`coserve plant push | pull | releases | follow | rollout`: signed releases of what a line has in force."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.units import count_text, size_text
from tools.terminal.console import AsJson, ConfigPath, console, fail, print_json, print_table
from tools.terminal.option_values import Commands, Note

if TYPE_CHECKING:
    from daemon.registry.hub_store import HubStore
    from daemon.registry.store import Source

_PLACE = "A folder or USB stick, or the hub's http://…"
Token = Annotated[
    Path | None,
    typer.Option("--token", metavar="FILE", help="The hub's token, or the line's key there.", show_default=False),
]
HubAddress = Annotated[str, typer.Option("--hub", "--from", metavar="URL", help="The hub, http://HOST:PORT.")]
Within = Annotated[float, typer.Option("--within", min=0, max=86400, help="Seconds that open boards may take.")]
_MAX_DAYS = 366 * 5
_COLUMNS = ("release", "problem", "signer", "contents", "bytes", "made_at", "expires_at", "made_by", "line", "note")


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
    from tools.experts.line import open_line
    from tools.registry.pack import push as push_release

    secret, valid_for_s, target = read_signing_key(key), days * 86400.0, source_of(to, token)
    manifest = push_release(
        open_line(config), target, secret, name, valid_for_s=valid_for_s, with_rules=rules, note=note
    )
    size_bytes = sum(manifest.files.values())
    if as_json:
        print_json({"release": manifest.release, "expires_at": manifest.expires_at.isoformat(), "bytes": size_bytes})
        return
    what = f"{manifest.release}: {manifest.contents}, {size_text(size_bytes)}"
    console.print(f"{what}; lines take it until {manifest.expires_at:%Y-%m-%d %H:%M} UTC", markup=False)


def pull(
    config: ConfigPath,
    source: Annotated[str, typer.Option("--from", metavar="FOLDER|HUB", help=_PLACE)],
    release: Annotated[
        str, typer.Option("--release", metavar="NAME[/N]", help="The release; without N the newest.")
    ] = "line",
    within: Within = 600.0,
    at_once: Annotated[
        bool, typer.Option("--now", help="Do not wait for open boards, which may then mix two releases.")
    ] = False,
    allow_older: Annotated[bool, typer.Option("--allow-older", help="Allow an older or an expired release.")] = False,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Put a release in force on a line: signature, signer, number and every file are checked before anything changes.

    New boards wait while the open ones finish, so that no board has verdicts of two releases. An interrupted pull has
    changed nothing and goes on where it stopped.

    Example: coserve plant pull line/coserve.yaml --from /media/stick --release mainboards
    """
    from daemon.registry.manifest import parse_release
    from tools.experts.line import open_line
    from tools.registry.pull import PullOptions
    from tools.registry.pull import pull as pull_release

    name, number = parse_release(release) if "/" in release else (release, None)
    options = PullOptions(None if at_once else within, allow_older)
    pulled = pull_release(open_line(config), source_of(source, token), name, number, options)
    if as_json:
        facts: dict[str, Any] = {"release": pulled.manifest.release, "signer": pulled.signer}
        facts |= {"fetched_bytes": pulled.fetched_bytes, "experts": list(pulled.changed)}
        print_json(facts | {"rules": pulled.rules_changed, "heard": pulled.heard})
        return
    what = f"{count_text(len(pulled.changed), 'expert')} changed" + (", rules changed" if pulled.rules_changed else "")
    when = "the daemon serves it" if pulled.heard else "no daemon runs: its next start serves it"
    size = size_text(pulled.fetched_bytes)
    console.print(f"{pulled.manifest.release}, signed by {pulled.signer}: {what}; {size} fetched; {when}", markup=False)
    if pulled.lost_comments:
        console.print("the catalog was written anew: its form allows no edit, so its comments are lost", markup=False)


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

    source = source_of(place, token)
    keys = {file: read_public_key(file) for file in signer} if signer else None
    rows = [_row(source, name, number, keys) for name in source.names() for number in source.numbers(name)]
    if as_json:
        print_json(rows)
    else:
        cells = [[_cell(name, row[name]) for name in _COLUMNS] for row in rows]
        columns = [name.replace("_", " ") for name in _COLUMNS]
        print_table(f"Releases of {place}", columns, cells, unbroken=("release",), more="--json has all")
    if any(row["problem"] for row in rows):
        raise SystemExit(1)


def _cell(name: str, value: Any) -> Any:
    """Return a fact as its cell in the table: sizes for people, days of times."""
    if name == "bytes":
        return size_text(value)
    return value[:10] if name.endswith("_at") and value else value


def _row(source: "Source", name: str, number: int, keys: dict[Path, Any] | None) -> dict[str, Any]:
    """Return the facts of a release, and with `keys` who signed it; the first thing that is wrong is its problem."""
    from daemon.registry.manifest import ReleaseError, decode, signer_of
    from daemon.registry.store import Store

    row: dict[str, Any] = dict.fromkeys(_COLUMNS) | {"release": f"{name}/{number}", "bytes": 0}
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


def follow(
    config: ConfigPath,
    hub: HubAddress,
    token: Annotated[Path, typer.Option("--token", metavar="FILE", help="The line's key, as in the hub's plant.yaml.")],
    every: Annotated[
        float, typer.Option("--every", min=0.2, max=3600, help="Seconds from one report to the next.")
    ] = 10.0,
    within: Within = 600.0,
) -> None:
    """Take the releases that roll-outs at the hub want this line to have, until SIGTERM or Ctrl-C.

    Each is checked as by `pull`. While the hub does not answer, the line keeps what it has.

    Example: coserve plant follow line/coserve.yaml --hub http://hub:9480 --token keys/line-1.key
    """
    from tools.experts.line import open_line
    from tools.registry.follow import Follower
    from tools.registry.follow import follow as follow_hub

    def say(sentence: str) -> None:
        console.print(sentence, markup=False)

    say(f"{open_line(config).config.line} follows {hub} and asks it every {every:g} s")
    follow_hub(Follower(config, _hub_of(hub, token), within, say), every, say)


def start(
    release: Annotated[str, typer.Argument(metavar="NAME/N", help="A release at the hub.", show_default=False)],
    hub: HubAddress,
    canary: Annotated[str, typer.Option("--canary", metavar="LINE", help="The line that takes it first, alone.")],
    images: Annotated[int, typer.Option("--images", min=1, max=20_000, help="Images that each line must judge first.")],
    escapes: Annotated[
        float | None, typer.Option(min=0, max=1, help="Largest share of reviewed passes that people may have failed.")
    ] = None,
    false_calls: Annotated[
        float | None, typer.Option(min=0, max=1, help="Largest share of reviewed fails that people may have passed.")
    ] = None,
    fail_change: Annotated[
        float | None,
        typer.Option(
            "--fail-change", min=0, max=1, help="How far the share that does not pass may leave its old interval."
        ),
    ] = None,
    p95_ratio: Annotated[
        float | None,
        typer.Option(
            "--p95-ratio", min=0.1, max=1000, help="95th percentile of latency: at most this many times the old one."
        ),
    ] = None,
    agreement: Annotated[
        float | None, typer.Option("--agreement", min=0, max=1, help="Share of answers as of the versions before.")
    ] = None,
    token: Token = None,
) -> None:
    """Roll a release out: to the canary, then to the others in steps; all lines go back if a condition fails.

    Example: coserve plant rollout start line/7 --hub http://hub:9480 --canary line-1 --images 500 --p95-ratio 1.5
    """
    from daemon.registry.manifest import parse_release
    from experts.versions import current_user

    name, number = parse_release(release)
    asked = {"images": images, "escapes": escapes, "false_calls": false_calls, "fail_change": fail_change}
    asked |= {"p95_ratio": p95_ratio, "agreement": agreement}
    asked |= {"by": current_user(), "name": name, "number": number, "canary": canary}
    answer = _hub_of(hub, token).ask_json("POST", "/rollouts", asked)
    steps = ", then ".join(" and ".join(step) for step in answer["steps"])
    console.print(f"{release} is rolled out to {steps}: coserve plant rollout status", markup=False)


def status(hub: HubAddress, token: Token = None, as_json: AsJson = False) -> None:
    """Show roll-outs, the newest first: how far they are, what they wait for or why they went back; and each line.

    Example: coserve plant rollout status --hub http://hub:9480
    """
    facts = _hub_of(hub, token).ask_json("GET", "/rollouts")
    if as_json:
        print_json(facts)
        return
    rows = [
        (
            *(f"{row['name']}/{row['number']}", row["state"], f"{row['step'] + 1} of {len(row['plan']['steps'])}"),
            *(row["direction"], row["waits"] or row["reason"], row["started_at"][:19]),
        )
        for row in facts["rollouts"]
    ]
    print_table("Roll-outs", ("release", "state", "step", "goes", "why", "started"), rows, unbroken=("release",))
    lines = [
        (row["line"], f"{row['name']}/{row['number']}", row["since"][:19], row["problem"] or row["waits"])
        for row in facts["lines"]
    ]
    print_table("Lines", ("line", "has", "since", "problem"), sorted(lines), unbroken=("line", "has"))


def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The releases' name.", show_default=False)],
    hub: HubAddress,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="End it, though lines that do not answer may keep the release.")
    ] = False,
    token: Token = None,
) -> None:
    """Stop the roll-out of NAME: every line goes back to what it had.

    Example: coserve plant rollout stop line --hub http://hub:9480
    """
    from urllib.parse import quote, urlencode

    from experts.versions import current_user

    query = urlencode({"by": current_user(), "give_up": str(give_up).lower()})
    _hub_of(hub, token).ask_json("POST", f"/rollouts/{quote(name, safe='')}/stop?{query}")
    console.print(f"the roll-out of {name} is " + ("given up" if give_up else "stopped: lines go back"), markup=False)


def source_of(place: str, token: Path | None) -> "Source":
    """Return the releases of a folder or of a hub."""
    from daemon.registry.store import Store

    if place.startswith(("http://", "https://")):
        return _hub_of(place, token)
    if not Path(place).is_dir():
        fail(f"no folder {place}: mount the stick, or make the folder first", status=2)
    return Store(Path(place))


def _hub_of(url: str, token: Path | None) -> "HubStore":
    from daemon.registry.hub_store import HubStore

    try:
        return HubStore(url, token.read_text(encoding="ascii").strip() if token else None)
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--token {token}: {getattr(error, 'strerror', None) or error}", status=2)


def add_to(group: typer.Typer) -> None:
    """Add the commands to the group `coserve plant`."""
    for command in (push, pull, releases, follow):
        group.command()(command)
    rollout = typer.Typer(cls=Commands, no_args_is_help=True, help="Roll-outs of releases: start, status, stop.")
    for command in (start, status, stop):
        rollout.command()(command)
    group.add_typer(rollout, name="rollout")
