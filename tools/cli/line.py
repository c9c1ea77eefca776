"""The daemon: start it, lend it a PC, check its files, talk to it over its control socket, let its clients in."""

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from daemon.config.settings import CLUSTER_ADDRESS, HOST_NAME
from daemon.units import count_text, size_text
from daemon.wire import keys
from daemon.wire.control import ControlError, ask
from experts.durable import read_only_mount
from experts.people import current_user
from tools.terminal.console import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigOption,
    ConfigPath,
    as_typed,
    console,
    end_with,
    fail,
    need_file,
    print_json,
    print_rows,
    print_table,
    say,
)
from tools.terminal.open_line import ask_daemon, must_be_its_configuration, plant_time, settings_of
from tools.terminal.option_values import Commands, Discard, Note, Now, parsed_size

#: Experts that `reload` names.
_LISTED = 5

rules_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Work with routing rules.")
keys_app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Clients that may connect over the network: their keys, and the daemon's."
)


def run(
    config: ConfigPath,
    note: Note = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Record the scheduler's calls and decisions, to simulate them."),
    ] = None,
) -> None:
    """Run the daemon in the foreground; prints one line when it is ready, and stops on SIGTERM or Ctrl-C.

    Example: coserve run /etc/coserve/coserve.yaml
    """
    need_file(config)
    for number in (signal.SIGTERM, signal.SIGINT):  # until `serve` has its own: the imports take a second
        signal.signal(number, lambda *_: sys.exit(0))
    from daemon.serve import serve

    raise SystemExit(serve(config, record=trace.resolve() if trace else None, note=note))


def check(config: ConfigPath, as_json: AsJson = False) -> None:
    """Check configuration, rules, catalog and weights: every mistake with its file, line and column.

    Example: coserve check demo/coserve.yaml
    """
    need_file(config)
    from daemon.check import check_line

    problems, facts = check_line(config)
    for warning in () if as_json else facts.get("warnings", ()):
        console.print(f"warning: {warning}", style="yellow")
    sound = ""
    if not problems:
        parts = [count_text(facts["boards"], "board type"), count_text(facts["experts"], "expert")]
        parts += [f"{size_text(facts['weights_bytes'])} of weights", f"rules {facts['rules_version']}"]
        parts += [count_text(facts["models"], "language model")] if facts["models"] else []
        sound = f": {', '.join(parts)}"
    end_with(config, problems, facts, sound, as_json=as_json)


@rules_app.command("check")
def rules_check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A rules file.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Check a rules file: every mistake at once, with line, column, what was expected and the nearest right name.

    Example: coserve rules check routing_rules/examples/mainboard.yaml
    """
    need_file(file, "name a rules file")
    from daemon.line.line import load_routes
    from routing_rules.compile import RulesError

    try:
        load_routes(file, None)
    except RulesError as error:
        end_with(file, error.problems, {}, as_json=as_json)
    end_with(file, (), {}, as_json=as_json)


def status(config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Show what the daemon is doing: state, backlog, rates, and each executor's memory.

    Example: coserve status --config demo/coserve.yaml
    """
    settings = settings_of(config)
    answer, plant = ask_daemon(settings, "status"), settings.plant.clock()
    if as_json:
        print_json(answer)
        return
    console.print(
        f"CoServe {answer['version']}, {answer['state']}, up for {answer['uptime_s']:.0f} s, policy"
        f" {answer['policy']}, edition {answer['edition']}, rules {answer['rules_version']}, line {answer['line']},"
        f" epoch {answer['epoch']}\n"
        f"accepted {answer['accepted']}, completed {answer['completed']}, backlog {answer['backlog']},"
        f" {answer['images_per_s']:.1f} images/s, {answer['expert_switches']} expert switches,"
        f" seq {'unknown' if answer['last_seq'] is None else answer['last_seq']}"
    )
    if answer["last_error"]:
        since = plant_time(plant, answer.get("last_error_at"))
        console.print(f"last error: {answer['last_error']}{f' (since {since})' if since else ''}")
    for name in ("clock", "files"):
        if name in answer:
            console.print(f"{name}: {answer[name]}")
    for row in answer.get("alarms", ()):
        console.print(f"alarm {row['alarm']}: {row['text']} (since {plant_time(plant, row['since'])})")
    for title, rows, columns in (
        ("Executors", "executors", (("executor", "name"), "device", ("busy", _busy))),
        ("Expert memory", "pools", _POOLS),
        ("Language models", "models", _MODELS),
        ("Consumers", "consumers", (("consumer", "name"), "kind", "state", "behind", "position", "last_error")),
        ("Processes beside the line", "children", (("process", "name"), "state", "pid", "restarts", "last_end")),
    ):
        if found := answer.get(rows):
            print_rows(title, found, columns)


def _busy(executor: Mapping[str, Any]) -> str:
    return "out of service" if executor.get("out_of_service") else f"{executor['busy_share']:.0%}"


def _memory(row: Mapping[str, Any], of: str = "") -> str:
    return f"{size_text(row.get(f'{of}used_bytes', 0))} of {size_text(row.get(f'{of}budget_bytes', 0))}"


_POOLS = ("pool", ("used by", "executors"), ("experts resident", "experts"), ("memory", _memory), "queued")
_MODELS = (
    *(("model", "name"), "device", "state", ("expert memory", _memory)),
    *(("text memory", lambda model: _memory(model, "text_")), "requests", "last_error"),
)


def queues(config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """List the groups of queued requests, most demand first.

    Example: coserve queues --config demo/coserve.yaml --json
    """
    rows = ask_daemon(settings_of(config), "queues")["queues"]
    if rows or as_json:
        print_rows("Queues", rows, rows[0] if rows else (), as_json=as_json)
    else:
        console.print("Queues: none")


def reload(
    config: ConfigOption = DEFAULT_CONFIG,
    now: Now = False,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Put rules and catalog in force as the next edition; if they have mistakes, print these and change nothing.

    Boards that have begun are judged to their end by the edition in which they began, for ten minutes at least. What
    has changed in coserve.yaml is named: it needs a restart. Without a daemon it is in force from the next start on.

    Example: coserve reload --config demo/coserve.yaml
    """
    from tools.experts.line import NO_DAEMON, open_line

    line = open_line(config)
    must_be_its_configuration(config)
    if line.folder.may_write():
        made = line.reload(note, now=now)
        answer = made.adopted or {"edition": made.edition.number, "note": NO_DAEMON}
        is_new, lacking, before = made.is_new, made.lacking, made.before
    else:
        if line.ask("health") is None:
            root = line.folder.root
            remedy = read_only_mount(root) or f"reload as {root.owner()}, or see to the disk"
            fail(f"you cannot write in {root}, and no daemon runs: {remedy}", 1)
        answer = _change(config, "reload", note, timeout_s=60.0, **({"now": True} if now else {}))
        is_new, lacking, before = True, {}, None
    nothing = "" if is_new else ": nothing has changed"
    standing = f"is made ({answer['note']})" if is_new and "note" in answer else "is in force"
    say(answer, f"edition {answer['edition']} {standing}{nothing}", as_json=as_json)
    if as_json:
        return
    for change in answer.get("changed_experts", ()):
        name = f"{change['expert']} {change['version']} with settings {change['settings']}"
        console.print(f"{name if change['version'] else change['expert']}: {change['what']}")
    if note is not None and not is_new:
        console.print("rules and experts are as before: without a change the note is not kept")
    _say_what_lacks(answer.get("without_weights", ()), [*lacking.values()])
    if is_new and before is not None:
        console.print(f"the way back: {as_typed(f'rollback {before.number} --config {config}')}")
    if changed := answer.get("restart_for"):
        console.print(f"coserve.yaml has changed: restart the daemon for {', '.join(changed)}")
    for problem in answer.get("settings_problems", ()):
        console.print(f"coserve.yaml cannot be read any more, so the next start would fail: {problem}")


def _say_what_lacks(experts: Sequence[str], problems: Sequence[str]) -> None:
    """Name the experts that the daemon cannot load, and the weights files that the edition lacks."""
    if experts:
        names = ", ".join(experts[:_LISTED]) + (", …" if len(experts) > _LISTED else "")
        console.print(f"without usable weights ({len(experts)}): {names}; coserve check says why")
    for problem in problems[:_LISTED]:
        console.print(f"{problem}: images of its expert get `unknown`")


def rollback(
    number: Annotated[
        int | None, typer.Argument(metavar="[EDITION]", min=1, help="Its number; without it, list them.")
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    discard: Discard = False,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Bring back all of an earlier edition, rules and experts, as a new edition; without EDITION, list them.

    Exit status 1 where its weights are gone (then nothing has changed), or where a running daemon did not adopt it.

    Example: coserve rollback 7 --config demo/coserve.yaml
    """
    from tools.experts.change import list_editions, roll_back
    from tools.experts.line import NO_DAEMON, open_line

    line = open_line(config)
    if number is not None:
        made = roll_back(line, number, note, discard=discard)
        answer = {"edition": made.edition.number, "content_of": number, "heard": made.adopted is not None}
        standing = f"is made ({NO_DAEMON})" if made.adopted is None else "is in force"
        sentence = f"edition {made.edition.number} {standing}, with all that edition {number} held"
        say(answer, sentence, as_json=as_json)
        return
    plant = line.config.plant.clock()
    columns = (
        ("edition", "number"),
        ("since", lambda row: plant_time(plant, row["created_at"], "short")),
        *("who", "why", "note"),
        (
            "",
            lambda row: "in force" if row["is_in_force"] else None if row["has_weights"] else "its weights are deleted",
        ),
    )
    print_rows(f"Editions; times of {plant.timezone}", list_editions(line), columns, as_json=as_json)


def drain(
    config: ConfigOption = DEFAULT_CONFIG,
    off: Annotated[bool, typer.Option("--off", help="Take images again.")] = False,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Take no more images (publishers get `busy`) and finish the backlog; --off resumes.

    Example: coserve drain --config demo/coserve.yaml
    """
    answer = _change(config, "drain", note, **({"off": True} if off else {}))
    say(answer, "taking images again" if off else f"draining, backlog {answer.get('backlog')}", as_json=as_json)


Expert = Annotated[str, typer.Argument(help="The expert's id in the catalog.", show_default=False)]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="A device (cpu, cuda:0) or one pool of it (cpu/1); without it, the daemon picks."),
]


def pin(
    expert: Expert,
    config: ConfigOption = DEFAULT_CONFIG,
    device: DeviceName = None,
    off: Annotated[bool, typer.Option("--off", help="Let it be evicted again.")] = False,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Load an expert and keep it in memory, refused where it cannot fit; --off lets it be evicted again.

    Example: coserve pin yolo-solder --device cpu --config demo/coserve.yaml
    """
    answer = _change(config, "unpin" if off else "pin", note, expert=expert, device=device)
    say(answer, f"{_held(expert, answer)} is {'no longer pinned' if off else 'pinned'}", as_json=as_json)


def unload(
    expert: Expert,
    config: ConfigOption = DEFAULT_CONFIG,
    device: DeviceName = None,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Take an idle expert out of memory now.

    Example: coserve unload R0402 --config demo/coserve.yaml
    """
    answer = _change(config, "unload", note, expert=expert, device=device)
    say(answer, f"{_held(expert, answer)} is unloaded", as_json=as_json)


def _held(expert: str, answer: Mapping[str, Any]) -> str:
    """Name what memory holds for `expert`: a head's backbone, which the other heads need too."""
    return expert if answer["expert"] == expert else f"{answer['expert']}, the backbone of {expert} and others,"


def limits(
    config: ConfigOption = DEFAULT_CONFIG,
    memory: Annotated[
        list[str] | None,
        typer.Option("--memory", metavar="DEVICE=SIZE", help="Expert memory of a device, e.g. cpu=500MB."),
    ] = None,
    backlog_images: Annotated[int | None, typer.Option(min=1, help="Images accepted and not finished, in all.")] = None,
    source_images: Annotated[int | None, typer.Option(min=1, help="The same for one source.")] = None,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Change memory budgets and queue limits while the daemon runs (until it restarts); without options, print them.

    Example: coserve limits --memory cpu=500MB --config demo/coserve.yaml
    """
    fields: dict[str, Any] = {"backlog_images": backlog_images, "source_images": source_images}
    for device, _, size in (item.partition("=") for item in memory or ()):
        budgets = fields.setdefault("expert_memory", {})
        budgets[device] = parsed_size(f"--memory {device}={size}", size)
    answer = _change(config, "limits", note, **fields)
    if as_json:
        print_json(answer)
        return
    rows = [(f"expert_memory {device}", size_text(size)) for device, size in answer["expert_memory"].items()]
    rest = {key: value for key, value in answer.items() if key not in ("type", "expert_memory")}
    rows += [(key, size_text(n) if "bytes" in key else count_text(n, "image")) for key, n in rest.items()]
    print_table("Limits", ("limit", "value"), rows)


def _change(config: Path, kind: str, note: str | None, timeout_s: float = 5.0, **fields: Any) -> dict[str, Any]:
    """Ask for a change, in the name of the person who typed the command."""
    return ask_daemon(settings_of(config), kind, timeout_s, who=current_user(), note=note, **fields)


def worker(
    name: Annotated[str, typer.Option(metavar="NAME", help="This PC's name: `host` of its devices in coserve.yaml.")],
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Join the cluster whose head is there.")
    ] = None,
    head: Annotated[
        bool, typer.Option("--head", help="Start a new cluster as its head, on the line's own PC.")
    ] = False,
    port: Annotated[int, typer.Option(min=1024, max=65535, help="With --head: the port where others join.")] = 6379,
    ports: Annotated[int, typer.Option(min=1024, max=65435, help="The first of 100 ports for this PC.")] = 20000,
    token: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The cluster's secret; without it anyone may join.")
    ] = None,
    cache: Annotated[Path, typer.Option(metavar="DIR", help="Where experts are kept.")] = Path(
        "~/.cache/coserve/worker"
    ),
    cache_size: Annotated[str, typer.Option(metavar="SIZE", help="The most disk space that they may take.")] = "20GB",
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Ray's sockets and logs; a short path.")] = Path(
        "/tmp/coserve-cluster"  # noqa: S108  the unit names another
    ),
) -> None:
    """Lend this PC's devices to a line on another PC: join its cluster, and stay until SIGTERM or Ctrl-C.

    Example: coserve worker --name pc2 --address 10.0.0.1:6379 --token /etc/coserve/ray_token
    """
    from daemon.cluster.joining import WorkerSettings, join_command

    if head == (address is not None):
        fail("expected either --head or --address HOST:PORT", status=2)
    if address is not None and not re.fullmatch(CLUSTER_ADDRESS, address):
        fail(f"--address: expected HOST:PORT, not {address!r}", status=2)
    if not re.fullmatch(HOST_NAME, name):
        fail(f"--name: expected a `host` of coserve.yaml (letters, digits, '.', '_', '-'), not {name!r}", status=2)
    cache_bytes = parsed_size("--cache-size", cache_size)
    settings = WorkerSettings(
        name, address, port, ports, token and token.absolute(), cache.expanduser().absolute(), cache_bytes,
        folder.absolute(),
    )  # fmt: skip
    command, environment = join_command(settings)
    if token is None:
        warning = "no --token: anyone who reaches this PC's ports can run programs here (docs/plant.md)"
        console.print(warning, style="yellow")
    os.execve(command[0], command, environment)  # noqa: S606  Ray's own command replaces this one, and ends on SIGTERM


ClientName = Annotated[str, typer.Argument(help="The client's name, for example camera-3.", show_default=False)]


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
    if sign:
        from daemon.registry import signing

        public, secret = signing.make_signing_pair(folder, name)
        shown = signing.key_id(signing.read_public_key(public))
        step = f"Hand out {public.name}; sign with: coserve export … --sign {secret}, or plant push … --key {secret}"
    else:
        public, secret = keys.make_key_pair(folder, name)
        shown = keys.fingerprint(keys.read_public_key(public))
        step = f"Move the secret file to the client, and let it in: coserve keys allow {public} {name}"
    if server and not sign:
        step = f"Name the secret file as security.server_key in coserve.yaml; every client needs {public.name}."
    text = f"{public}: public, fingerprint {shown}\n{secret}: secret, mode 0600\n{step}"
    say({"public": str(public), "secret": str(secret), "fingerprint": shown}, text, as_json=as_json)


@keys_app.command()
def allow(
    key: Annotated[
        str, typer.Argument(metavar="FILE|KEY", help="The client's .key file, or its public key.", show_default=False)
    ],
    name: ClientName,
    config: ConfigOption = DEFAULT_CONFIG,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Let a client in: add its public key to the folder of allowed clients, which a running daemon reads again.

    Example: coserve keys allow camera-3.key camera-3 --config demo/coserve.yaml
    """
    settings, folder = _allow_list_of(config)
    public = keys.read_public_key(Path(key)) if Path(key).exists() or key.endswith(".key") else keys.checked_key(key)
    server_key = settings.security.server_key
    if server_key and server_key.exists() and public == keys.read_server_keys(server_key).public.decode():
        fail(f"{key} is the daemon's own key: name the .key file that `coserve keys new` made for {name}", status=1)
    keys.allow(folder, name, public)
    _reload_keys(settings, note, as_json, f"{name} may come in, fingerprint {keys.fingerprint(public)}")


@keys_app.command()
def revoke(name: ClientName, config: ConfigOption = DEFAULT_CONFIG, note: Note = None, as_json: AsJson = False) -> None:
    """Shut a client out: remove it from the allow-list; a running daemon cuts its connections and refuses new ones.

    The others' connections over the network are cut too, and come back within a second.

    Example: coserve keys revoke camera-3 --config demo/coserve.yaml
    """
    settings, folder = _allow_list_of(config)
    names = keys.revoke(folder, name)
    sentence = f"{', '.join(names)} (one key): shut out" if names[1:] else f"{name} is shut out"
    _reload_keys(settings, note, as_json, sentence)


@keys_app.command("list")
def list_keys(config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """List the allowed clients, with fingerprints to compare by telephone, and the fingerprint of the daemon's own key.

    Example: coserve keys list --config demo/coserve.yaml
    """
    settings, folder = _allow_list_of(config)
    allowed, problems = keys.read_allow_list(folder), list[str]()
    server = None
    try:
        server = keys.fingerprint(keys.read_server_keys(settings.security.server_key).public.decode())
    except keys.KeyFileError as error:
        problems.append(str(error))
    problems += allowed.problems
    rows = sorted((name, keys.fingerprint(key), key) for key, name in allowed.clients.items())
    if as_json:
        clients = [{"name": name, "fingerprint": shown, "public_key": key} for name, shown, key in rows]
        print_json({"clients": clients, "server": server, "problems": problems})
        return
    if server:
        console.print(f"the daemon's own key: {server}")
    print_table(f"Clients allowed by {folder}", ("client", "fingerprint"), [row[:2] for row in rows])
    for problem in problems:
        console.print(f"to fix: {problem}", style="yellow")


def _allow_list_of(config: Path) -> tuple[Any, Path]:
    settings = settings_of(config)
    if settings.security.allowed_clients is None:
        none = "names no security.allowed_clients and security.server_key: no client needs a key here"
        fail(f"{config}: {none}", status=2)
    return settings, settings.security.allowed_clients


def _reload_keys(settings: Any, note: str | None, as_json: bool, sentence: str) -> None:
    """Have a running daemon read the keys again; the files are already changed, even if it refuses."""
    try:
        answer = ask(settings.endpoints.control, "keys", timeout_s=30.0, who=current_user(), note=note)
    except ControlError as error:
        if error.code != "no_daemon":
            fail(f"{sentence}, but not yet for the running daemon: {error}", status=1)
        answer = {"clients": None, "cut": False, "problems": []}
        sentence += "; no daemon is running, the next one knows it"
    say(answer, sentence, as_json=as_json)
    for problem in () if as_json else answer["problems"]:
        console.print(problem, style="yellow")
