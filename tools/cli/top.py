"""`coserve top`: the running line at a glance, drawn again every second: executors, memory, queues."""

import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from daemon.units import size_text
from tools.terminal.console import DEFAULT_CONFIG, AsJson, ConfigOption, console, print_json

#: Groups of waiting images that are shown; the rest is a number.
_GROUPS = 15


def top(
    config: ConfigOption = DEFAULT_CONFIG,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, as when the output is not a terminal.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what each executor does, what its memory holds and what waits, as it changes; Ctrl-C ends it.

    Example: coserve top --config demo/coserve.yaml
    """
    from tools.terminal.open_line import ask_daemon, settings_of

    settings = settings_of(config)

    def look() -> dict[str, Any]:
        queues = ask_daemon(settings, "queues")
        return ask_daemon(settings, "status") | {key: queues[key] for key in ("queues", "running")}

    if as_json:
        print_json(look())
        return
    if once or not console.is_terminal:
        console.print(draw(look()))
        return
    try:
        with Live(draw(look()), console=console, screen=True, auto_refresh=False) as screen:
            while True:
                time.sleep(interval_s)
                screen.update(draw(look()), refresh=True)
    except KeyboardInterrupt:
        return


def draw(look: dict[str, Any]) -> RenderableType:
    """One look at the line, for a terminal of 80 columns or more."""
    parts: list[RenderableType] = [_headline(look)]
    if look["last_error"]:
        parts.append(Text(f"last error: {look['last_error']}", style="red", overflow="ellipsis", no_wrap=True))
    parts += [Text(f"alarm {row['alarm']}: {row['text']}", style="yellow") for row in look.get("alarms", ())]
    parts.append(_executors(look))
    if "pools" in look:  # an older daemon sends none
        parts.append(_memory(look))
    return Group(*parts, _queues(look))


def _headline(look: dict[str, Any]) -> Text:
    return Text(
        f"CoServe {look['state']} for {look['uptime_s']:.0f} s, policy {look['policy']}:"
        f" {look['images_per_s']:.1f} images/s,"
        f" backlog {look['backlog']}, {look['completed']} done, {look['expert_switches']} switches"
    )


def _executors(look: dict[str, Any]) -> Table:
    table = Table("executor", "runs", "busy")
    running = {row["executor"]: row["expert"] for row in look["running"]}
    for row in look["executors"]:
        runs = "out of service" if row.get("out_of_service") else running.get(row["name"], "–")
        table.add_row(row["name"], runs, f"{row['busy_share']:.0%}")
    return table


def _memory(look: dict[str, Any]) -> Table:
    """Return one row for each pool; several executors may share it."""
    table = Table("expert memory", "used by", "experts", "full", "waits for them")
    for row in look["pools"]:
        share = row["used_bytes"] / row["budget_bytes"] if row["budget_bytes"] else 0.0
        table.add_row(
            row["pool"],
            ", ".join(row["executors"]) or "–",
            str(row["experts"]),
            f"{_bar(share)} {size_text(row['used_bytes'])} of {size_text(row['budget_bytes'])}",
            str(row["queued"]),
        )
    return table


def _queues(look: dict[str, Any]) -> Table:
    table = Table("expert", "queued", "resident in", "loading into")
    for row in look["queues"][:_GROUPS]:
        table.add_row(
            row["expert"], str(row["queued"]), ", ".join(row["resident"]) or "–", ", ".join(row["loading"]) or "–"
        )
    rest = look["queues"][_GROUPS:]
    if rest:
        table.add_row(f"{len(rest)} more", str(sum(row["queued"] for row in rest)), "", "")
    return table


def _bar(share: float, width: int = 10) -> str:
    filled = min(width, round(share * width))
    return "█" * filled + "░" * (width - filled)
