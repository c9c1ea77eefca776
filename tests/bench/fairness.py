"""`coserve bench fairness`: the acceptance of one publisher's images beside floods of others, each kind of flood."""

import itertools
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from tests.bench.rounds import run_in_turn
from tools.terminal.console import AsJson, console, errors, fail, print_json, print_table
from tools.terminal.option_values import must_be_one_of

#: A flood begins, and fills every queue that it can, before it is measured.
_SETTLE_S = 2.0
_KINDS = ("images", "large-images", "many-connections", "junk", "duplicates", "catch-ups", "new-names", "deaf")
#: The ratio that was asked for: beyond it one publisher pays for another.
MAX_RATIO = 3.0


@dataclass(frozen=True, slots=True)
class FloodPair:
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
    from tests.stress.line import make_small_line

    chosen = kinds or list(_KINDS)
    for kind in chosen:
        must_be_one_of("--kind", kind, KINDS)
    numbers = itertools.count()
    with tempfile.TemporaryDirectory(prefix="coserve-fairness-") as scratch:
        config = make_small_line(Path(scratch) / "line")

        def run(kind: str) -> FloodPair:
            seed = next(numbers)
            pair = _measure(config, Path(scratch) / f"run-{seed}", kind, seconds, rate, seed)
            errors.print(
                f"{kind:17} quiet p99 {pair.quiet_p99_ms:7.1f} ms  flooded {pair.flooded_p99_ms:7.1f} ms"
                f"  × {pair.ratio:.1f}"
            )
            return pair

        pairs = run_in_turn({kind: partial(run, kind) for kind in chosen}, rounds)
    rows = [_row(kind, own) for kind, own in pairs.items()]
    if as_json:
        print_json({"machine": platform.platform(), "cores": os.cpu_count(), "most": MAX_RATIO, "kinds": rows})
        return
    columns = ("flood", "quiet p50", "quiet p99", "flooded p50", "flooded p99", "ratio of p99", "busy")
    print_table(f"ms to acceptance, {rounds} rounds, medians", columns, [list(row.values())[:-1] for row in rows])
    console.print(f"on {os.cpu_count()} cores; {rate:g} images a second; floods at the lowest priority")


def _row(kind: str, pairs: list[FloodPair]) -> dict[str, Any]:
    names = ("quiet_p50_ms", "quiet_p99_ms", "flooded_p50_ms", "flooded_p99_ms", "ratio")
    return {
        "kind": kind,
        **{name: round(median(getattr(pair, name) for pair in pairs), 2) for name in names},
        "busy": sum(pair.busy for pair in pairs),
        "pairs": [asdict(pair) for pair in pairs],
    }


def _measure(config: Path, run: Path, kind: str, seconds: float, rate: float, seed: int) -> FloodPair:
    from daemon.config.settings import load_config
    from tests.bench.line import files_in
    from tests.stress.hostile import Attack
    from tests.stress.line import make_jpegs
    from tests.stress.steady import SteadyPublisher, quantile_ms
    from tools.setup.service import Service

    run.mkdir()
    environ = files_in(run)
    endpoints = load_config(config, environ).endpoints
    with Service(config, run / "daemon.log", environ) as service:
        steady = SteadyPublisher(endpoints.intake[0], "quiet", make_jpegs(8, 20_000), rate)

        def waits_s() -> list[float]:
            time.sleep(_SETTLE_S)
            steady.take_waits_s()
            time.sleep(seconds)
            return steady.take_waits_s()

        steady.start()
        quiet = waits_s()
        busy_before = steady.tally.busy
        attack = Attack(kind, endpoints.intake[0], endpoints.results, seconds + 2 * _SETTLE_S, seed)
        flooded = waits_s()
        busy = steady.tally.busy - busy_before
        flood = attack.finish()
        steady.stop(patience_s=30.0)
        if not quiet or not flooded or steady.tally.rejected or steady.unanswered:
            fail(f"{kind}: the steady publisher starved: {steady.tally}; {service.tail()}", status=1)
        service.kill()  # the flood's images are of no interest
    waits_ms = {
        f"{name}_p{percent}_ms": quantile_ms(waits, percent / 100) or 0.0
        for name, waits in (("quiet", quiet), ("flooded", flooded))
        for percent in (50, 99)
    }
    return FloodPair(kind, **waits_ms, busy=busy, flood=flood)
