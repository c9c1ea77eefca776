"""Commands that start the daemon, check its files, and talk to it over its control socket."""

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from daemon.units import count_text, size_text
from tools.terminal.console import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigOption,
    ConfigPath,
    console,
    fail,
    print_json,
    print_table,
)
from tools.terminal.option_values import Commands, Note

rules_app = typer.Typer(cls=Commands, no_args_is_help=True, help="Work with routing rules.")


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
    _must_exist(config)
    for number in (signal.SIGTERM, signal.SIGINT):  # until `serve` has its own: the imports take a second
        signal.signal(number, lambda *_: sys.exit(0))
    from daemon.serve import serve

    raise SystemExit(serve(config, record=trace.resolve() if trace else None, note=note))


def check(config: ConfigPath, as_json: AsJson = False) -> None:
    """Check configuration, rules, catalog and weights: every mistake with its file, line and column.

    Example: coserve check demo/coserve.yaml
    """
    _must_exist(config)
    from daemon.check import check_line

    problems, facts = check_line(config)
    if as_json:
        print_json({"ok": not problems, "problems": [str(p) for p in problems], **facts})
    else:
        for problem in problems:
            console.print(str(problem), markup=False)
        for warning in facts.get("warnings", ()):
            console.print(f"warning: {warning}", markup=False, style="yellow")
        if not problems:
            parts = [count_text(facts["boards"], "board type"), count_text(facts["experts"], "expert")]
            parts += [f"{size_text(facts['weights_bytes'])} of weights", f"rules {facts['rules_version']}"]
            parts += [count_text(facts["models"], "language model")] if facts["models"] else []
            console.print(f"{config}: No mistakes found: {', '.join(parts)}")
    raise SystemExit(1 if problems else 0)


@rules_app.command("check")
def rules_check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A rules file.", show_default=False)],
    catalog: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also check expert names and labels against this catalog.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a rules file: every mistake at once, with line, column, what was expected and the nearest right name.

    Example: coserve rules check routing_rules/examples/mainboard.yaml
    """
    _must_exist(file, "a rules file")
    if catalog is not None:
        _must_exist(catalog, "the catalog, for example experts/catalog.yaml")
    from daemon.line.line import check_rules

    problems = check_rules(file, catalog)
    if as_json:
        print_json({"ok": not problems, "problems": [str(p) for p in problems]})
    else:
        for problem in problems:
            console.print(str(problem), markup=False)
        if not problems:
            console.print(f"{file}: No mistakes found")
    raise SystemExit(1 if problems else 0)


def status(config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Show what the daemon is doing: state, backlog, rates, and each executor's memory.

    Example: coserve status --config demo/coserve.yaml
    """
    from tools.terminal.open_line import plant_time, settings_of

    answer = _ask(config, "status")
    if as_json:
        print_json(answer)
        return
    identity = f", line {answer['line']}, epoch {answer['epoch']}" if "epoch" in answer else ""  # not of older daemons
    console.print(
        f"CoServe {answer['version']}, {answer['state']}, up for {answer['uptime_s']:.0f} s, policy"
        f" {answer['policy']}, rules {answer['rules_version']}{identity}\n"
        f"accepted {answer['accepted']}, completed {answer['completed']}, backlog {answer['backlog']},"
        f" {answer['images_per_s']:.1f} images/s, {answer['expert_switches']} expert switches,"
        f" seq {'unknown' if answer['last_seq'] is None else answer['last_seq']}"
    )
    if answer["last_error"]:
        since = plant_time(settings_of(config).plant.clock(), answer.get("last_error_at"))
        since = f" (since {since})" if since else ""
        console.print(f"last error: {answer['last_error']}{since}", markup=False)
    for row in answer.get("alarms", ()):
        since = plant_time(settings_of(config).plant.clock(), row["since"])
        console.print(f"alarm {row['alarm']}: {row['text']} (since {since})", markup=False)
    rows = [
        (e["name"], e["device"], "out of service" if e.get("out_of_service") else f"{e['busy_share']:.0%}")
        for e in answer["executors"]
    ]
    print_table("Executors", ("executor", "device", "busy"), rows)
    pools = [
        (
            row["pool"],
            ", ".join(row["executors"]) or None,
            row["experts"],
            f"{size_text(row['used_bytes'])} of {size_text(row['budget_bytes'])}",
            row["queued"],
        )
        for row in answer.get("pools", ())
    ]
    if pools:  # an older daemon sends none
        print_table("Expert memory", ("pool", "used by", "experts resident", "memory", "queued"), pools)
    models = [
        (
            row["name"],
            row["device"],
            row["state"],
            f"{size_text(row.get('used_bytes', 0))} of {size_text(row['budget_bytes'])}",
            f"{size_text(row.get('text_used_bytes', 0))} of {size_text(row.get('text_budget_bytes', 0))}",
            row["requests"],
            row["last_error"],
        )
        for row in answer.get("models", ())
    ]
    if models:
        columns = ("model", "device", "state", "expert memory", "text memory", "requests", "last error")
        print_table("Language models", columns, models)
    _show_beside(answer)


def _show_beside(answer: Mapping[str, Any]) -> None:
    """Print the consumers and processes beside the line; an older daemon sends none."""
    consumers = [
        (row["name"], row["kind"], row["state"], row["behind"], row["position"], row["last_error"])
        for row in answer.get("consumers", ())
    ]
    if consumers:
        print_table("Consumers", ("consumer", "kind", "state", "behind", "position", "last error"), consumers)
    children = [
        (row["name"], row["state"], row["pid"], row["restarts"], row["last_end"]) for row in answer.get("children", ())
    ]
    if children:
        print_table("Processes beside the line", ("process", "state", "pid", "restarts", "last end"), children)


def residency(config: Path, *, as_json: bool) -> None:
    """Print each expert's residency, pin, demand and usage probability (`coserve experts`)."""
    answer = _ask(config, "experts")
    if as_json:
        print_json(answer["experts"])
        return
    rows = [
        (
            e["expert"],
            e["architecture"],
            f"{e['bytes'] / 1e6:,.1f}",
            f"{e['usage']:.3f}",
            _places(e),
            e["queued"],
            e["failed"],
        )
        for e in sorted(answer["experts"], key=lambda e: -e["usage"])
    ]
    print_table("Experts", ("expert", "architecture", "MB", "usage", "resident", "queued", "failed"), rows)


def queues(config: ConfigOption = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """List the groups of queued requests, most demand first.

    Example: coserve queues --config demo/coserve.yaml --json
    """
    answer = _ask(config, "queues")
    _list("Queues", answer["queues"], as_json)


def reload(config: ConfigOption = DEFAULT_CONFIG, note: Note = None, as_json: AsJson = False) -> None:
    """Read rules and catalog again; with a mistake in them the old ones stay in force and the mistake is printed.

    What has changed in coserve.yaml is named: it needs a restart.

    Example: coserve reload --config demo/coserve.yaml
    """
    from tools.terminal.open_line import must_be_its_configuration

    before = _ask(config, "status")["rules_version"]
    must_be_its_configuration(config)
    answer = _change(config, "reload", note, timeout_s=60.0)
    _say(answer, as_json, f"rules {answer.get('rules_version')} are in force")
    if as_json:
        return
    for change in answer.get("changed_experts", ()):
        name = f"{change['expert']} {change['version']} with settings {change['settings']}"
        console.print(f"{name if change['version'] else change['expert']}: {change['what']}", markup=False)
    if note is not None and before == answer.get("rules_version") and not answer.get("changed_experts"):
        console.print("rules and experts are as before: without a change the note is not kept")
    if experts := answer.get("without_weights"):
        names = ", ".join(experts[:5]) + (", …" if len(experts) > 5 else "")
        console.print(f"without usable weights ({len(experts)}): {names}; coserve check says why", markup=False)
    if changed := answer.get("restart_for"):
        console.print(f"coserve.yaml has changed: restart the daemon for {', '.join(changed)}", markup=False)
    for problem in answer.get("settings_problems", ()):
        console.print(f"coserve.yaml cannot be read any more, so the next start would fail: {problem}", markup=False)


def drain(
    config: ConfigOption = DEFAULT_CONFIG,
    off: Annotated[bool, typer.Option("--off", help="Take images again.")] = False,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Take no more images (publishers hear busy) and finish the backlog; --off resumes.

    Example: coserve drain --config demo/coserve.yaml
    """
    answer = _change(config, "drain", note, **({"off": True} if off else {}))
    _say(answer, as_json, "taking images again" if off else f"draining, backlog {answer.get('backlog')}")


Expert = Annotated[str, typer.Argument(help="The expert's id in the catalog.", show_default=False)]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="A device (cpu, cuda:0) or one pool of it (cpu/1); without it, the daemon picks."),
]


def pin(
    expert: Expert,
    config: ConfigOption = DEFAULT_CONFIG,
    device: DeviceName = None,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Load an expert and keep it in memory; refused where it cannot fit.

    Example: coserve pin yolo-solder --device cpu --config demo/coserve.yaml
    """
    _say(_change(config, "pin", note, expert=expert, device=device), as_json, f"{expert} is pinned")


def unpin(
    expert: Expert,
    config: ConfigOption = DEFAULT_CONFIG,
    device: DeviceName = None,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Let a pinned expert be evicted again.

    Example: coserve unpin yolo-solder --config demo/coserve.yaml
    """
    _say(_change(config, "unpin", note, expert=expert, device=device), as_json, f"{expert} is no longer pinned")


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
    _say(_change(config, "unload", note, expert=expert, device=device), as_json, f"{expert} is unloaded")


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
    from daemon.units import parse_bytes

    fields: dict[str, Any] = {"backlog_images": backlog_images, "source_images": source_images}
    budgets: dict[str, int] = {}
    for item in memory or []:
        device, _, size = item.partition("=")
        try:
            budgets[device] = parse_bytes(size)
        except ValueError as error:
            fail(f"--memory {item}: {error}", status=2)
    if budgets:
        fields["expert_memory"] = budgets
    answer = _change(config, "limits", note, **fields)
    if as_json:
        print_json(answer)
    else:
        now = {f"expert_memory {device}": size_text(size) for device, size in answer["expert_memory"].items()}
        now |= {key: _limit_text(key, value) for key, value in answer.items() if key not in ("type", "expert_memory")}
        _list("Limits", [{"limit": k, "value": v} for k, v in now.items()], as_json=False)


def _limit_text(name: str, value: int) -> str:
    return size_text(value) if "bytes" in name else count_text(value, "image")


def _places(expert: dict[str, Any]) -> str:
    """Return the devices that hold an expert, and mark pins and loads."""
    pinned = [f"{device} (pinned)" if device in expert["pinned"] else device for device in expert["resident"]]
    return ", ".join([*pinned, *(f"{device} (loading)" for device in expert["loading"])]) or "–"


def _ask(config: Path, kind: str, timeout_s: float = 5.0, **fields: Any) -> dict[str, Any]:
    from tools.terminal.open_line import ask_daemon, settings_of

    return ask_daemon(settings_of(config), kind, timeout_s, **fields)


def _change(config: Path, kind: str, note: str | None, timeout_s: float = 5.0, **fields: Any) -> dict[str, Any]:
    """Ask for a change, in the name of the person who typed the command."""
    from experts.versions import current_user

    return _ask(config, kind, timeout_s, who=current_user(), note=note, **fields)


def _must_exist(path: Path, what: str = "the line's coserve.yaml, or make a small line with `coserve demo`") -> None:
    if not path.is_file():
        fail(f"no file {path}: name {what}", status=2)


def _say(answer: dict[str, Any], as_json: bool, sentence: str) -> None:
    if as_json:
        print_json(answer)
    else:
        console.print(sentence, markup=False)


def _list(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
    elif not rows:
        console.print(f"{title}: none")
    else:
        cells = [[", ".join(map(str, v)) if isinstance(v, list) else v for v in row.values()] for row in rows]
        print_table(title, list(rows[0]), cells)
