"""`coserve bench fairness`: what a flood does to the acceptance of another publisher's images, each kind of flood."""

import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from tools.cli.console import AsJson, console, errors, fail, print_json, print_table

#: A flood begins, and fills what it can fill, before it is measured.
_SETTLE_S = 2.0
_KINDS = ("images", "large-images", "many-connections", "junk", "duplicates", "catch-ups", "new-names", "deaf")
#: What the issue of fairness is about: beyond it one publisher pays for another.
MOST = 3.0


@dataclass(frozen=True, slots=True)
class Pair:
    """One round of one kind: waits of the same publisher before and during the flood, in one daemon's life."""

    kind: str
    quiet_p50_ms: float
    quiet_p99_ms: float
    flooded_p50_ms: float
    flooded_p99_ms: float
    busy: int
    flood: dict[str, int]

    @property
    def ratio(self) -> float:
        return self.flooded_p99_ms / self.quiet_p99_ms


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("fairness")(bench_fairness)


def bench_fairness(
    seconds: Annotated[float, typer.Option(min=1.0, help="Of each measurement.")] = 10.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all kinds, interleaved; the median counts.")] = 3,
    rate: Annotated[float, typer.Option(min=1.0, help="Images a second of the publisher that is measured.")] = 50.0,
    kinds: Annotated[list[str] | None, typer.Option("--kind", help="Kinds of flood (repeat).")] = None,
    as_json: AsJson = False,
) -> None:
    """Acceptance of one steady publisher, quiet and beside floods: p99, and how many times longer it gets.

    Each pair is measured in one life of a real daemon. Floods are processes of the lowest priority, so that the
    processor's time that they need themselves is not counted as the daemon's doing.

    Example: coserve bench fairness --rounds 3
    """
    from tests.stress.hostile import KINDS

    chosen = kinds or list(_KINDS)
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown:
        fail(f"--kind {unknown[0]}: expected one of {', '.join(KINDS)}", status=2)
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="coserve-fairness-") as scratch:
        for number in range(rounds):
            for kind in chosen:
                pair = _measure(Path(scratch), kind, seconds, rate, len(pairs))
                pairs.append(pair)
                errors.print(
                    f"round {number + 1}  {kind:17} quiet p99 {pair.quiet_p99_ms:7.1f} ms"
                    f"  flooded {pair.flooded_p99_ms:7.1f} ms  × {pair.ratio:.1f}"
                )
    rows = [_row(kind, [pair for pair in pairs if pair.kind == kind]) for kind in chosen]
    if as_json:
        print_json({"machine": platform.platform(), "cores": os.cpu_count(), "most": MOST, "kinds": rows})
        return
    columns = ("flood", "quiet p50", "quiet p99", "flooded p50", "flooded p99", "ratio of p99", "busy")
    names = ("kind", "quiet_p50_ms", "quiet_p99_ms", "flooded_p50_ms", "flooded_p99_ms", "ratio", "busy")
    print_table(f"ms to acceptance, {rounds} rounds, medians", columns, [[row[name] for name in names] for row in rows])
    console.print(f"on {os.cpu_count()} cores; {rate:g} images a second; floods at the lowest priority")


def _row(kind: str, pairs: list[Pair]) -> dict[str, Any]:
    names = ("quiet_p50_ms", "quiet_p99_ms", "flooded_p50_ms", "flooded_p99_ms", "ratio")
    figures = {name: round(median(getattr(pair, name) for pair in pairs), 2) for name in names}
    return {
        "kind": kind,
        **figures,
        "busy": sum(pair.busy for pair in pairs),
        "pairs": [asdict(pair) for pair in pairs],
    }


def _measure(scratch: Path, kind: str, seconds: float, rate: float, number: int) -> Pair:
    from daemon.config.settings import load_config
    from tests.stress.hostile import Attack
    from tests.stress.line import make_jpegs, make_small_line
    from tests.stress.steady import SteadyPublisher
    from tools.setup.service import Service, files_in

    folder = scratch / "line"  # one folder after the other, for the experts are made once
    config = make_small_line(folder)
    run = scratch / f"run-{number}"
    run.mkdir()
    environ = files_in(run)
    endpoints = load_config(config, environ).endpoints
    with Service(config, scratch / f"daemon-{number}.log", environ) as service:
        steady = SteadyPublisher(endpoints.intake[0], "quiet", make_jpegs(8, 20_000), rate)
        steady.start()
        time.sleep(_SETTLE_S)
        steady.take_waits_s()
        time.sleep(seconds)
        quiet = steady.take_waits_s()
        busy = steady.tally.busy
        attack = Attack(kind, endpoints.intake[0], endpoints.results, seconds + 2 * _SETTLE_S, number)
        time.sleep(_SETTLE_S)
        steady.take_waits_s()
        time.sleep(seconds)
        flooded = steady.take_waits_s()
        busy = steady.tally.busy - busy
        flood = attack.finish()
        steady.stop(patience_s=30.0)
        if not flooded or steady.tally.rejected or steady.unanswered:
            fail(f"{kind}: the steady publisher starved: {steady.tally}; {service.tail()}", status=1)
        service.kill()  # the flood's images are of no interest
    return Pair(kind, *_p50_p99(quiet), *_p50_p99(flooded), busy, flood)


def _p50_p99(waits_s: list[float]) -> tuple[float, float]:
    from tests.stress.soak import percentile

    waits_ms = [wait_s * 1000 for wait_s in waits_s]
    return percentile(waits_ms, 0.5) or 0.0, percentile(waits_ms, 0.99) or 0.0
