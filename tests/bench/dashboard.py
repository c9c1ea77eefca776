"""`coserve bench dashboard`: images per second with pages open against none, interleaved runs of real daemons."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.units import size_text
from tests.bench.line import RunFigures, run_line
from tests.bench.rounds import ratios, run_in_turn
from tests.ports import free_port
from tools.terminal.console import AsJson, console, fail, print_json, print_table

if TYPE_CHECKING:
    from coserve_client import CameraImage

_SEED = 12
_OPEN_S = 60.0
#: What is promised: so much of the rate without pages.
PROMISED = 0.95


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("dashboard")(bench_dashboard)


def bench_dashboard(
    folder: Annotated[Path, typer.Option("--dir", help="The demo's folder (made if it is not there).")] = Path("demo"),
    readers: Annotated[int, typer.Option(min=1, max=64, help="Pages that listen.")] = 20,
    boards: Annotated[int, typer.Option(min=1, help="Boards published in each run.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="Runs with and without pages, interleaved.")] = 6,
    as_json: AsJson = False,
) -> None:
    """Images per second of the demo line while pages listen to it, and without a dashboard. Status 1 below 0.95.

    Without: no `endpoints.http` at all. With: the dashboard, and pages whose event streams are read to the end, in a
    process of low priority, for browsers are on other machines.

    Example: coserve bench dashboard --dir demo
    """
    from tools.camera.rendered import rendered_images
    from tools.demo.prepare import prepare

    prepare(folder)
    images = list(rendered_images(boards, _SEED, "D", lot=None))
    figures = compare(folder / "coserve.yaml", images, readers=readers, rounds=rounds)
    if as_json:
        print_json({"machine": platform.platform(), "cores": os.cpu_count(), "date": time.strftime("%F"), **figures})
    else:
        rows = [(name, figures[name], figures["switches"][name]) for name in ("without", "with")]
        title = f"{len(images)} images of {boards} boards, {rounds} rounds"
        print_table(title, ("pages", "images/s (median)", "expert switches (median)"), rows)
        console.print(
            f"ratio {figures['ratio']:.3f} (median of the rounds; {', '.join(map(str, figures['ratios']))});"
            f" {readers} pages heard {figures['events']} events, {size_text(figures['event_bytes'])};"
            f" on {os.cpu_count()} cores, trained experts of {folder}"
        )
    raise SystemExit(0 if figures["ratio"] >= PROMISED else 1)


def compare(config: Path, images: "list[CameraImage]", *, readers: int, rounds: int) -> dict[str, Any]:
    """Run the line with and without pages in turn; return medians and ratios."""
    events: list[tuple[int, int]] = []

    def with_pages() -> RunFigures:
        url = f"http://127.0.0.1:{free_port()}"
        return run_line(
            config, images, "with", {"COSERVE_ENDPOINTS_HTTP": url}, lambda: open_pages(url, readers, events)
        )

    runs = run_in_turn({"without": lambda: run_line(config, images, "without", {}), "with": with_pages}, rounds)
    rates, ratios = rates_and_ratios(runs, "without")
    return {
        "images": len(images),
        "readers": readers,
        **rates,
        "ratio": round(median(ratios["with"]), 4),
        "ratios": [round(ratio, 3) for ratio in ratios["with"]],
        "switches": {name: int(median(run.expert_switches for run in own)) for name, own in runs.items()},
        "events": sum(count for count, _ in events),
        "event_bytes": sum(size_bytes for _, size_bytes in events),
        "runs": {name: [asdict(run) for run in own] for name, own in runs.items()},
    }


def rates_and_ratios(
    runs: Mapping[str, Sequence[RunFigures]], base: str
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the median images per second of each kind, and the ratios of each round to the base, the base left out."""
    rates = {name: [run.images_per_s for run in own] for name, own in runs.items()}
    to_base = {name: ratios(own, rates[base]) for name, own in rates.items() if name != base}
    return {name: round(median(own), 2) for name, own in rates.items()}, to_base


@contextmanager
def open_pages(url: str, readers: int, events: list[tuple[int, int]]) -> Iterator[None]:
    """Read real HTTP streams of so many Line pages meanwhile; append the number of their events, and their bytes."""
    command = [sys.executable, "-m", "tests.bench.page_readers", url, str(readers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "listening\n":
                process.wait(_OPEN_S)
                fail(f"{readers} pages of {url} could not be opened: look at coserve status", status=1)
            yield
            process.stdin.close()
            count, size_bytes = process.stdout.read().split()
            events.append((int(count), int(size_bytes)))
            process.wait(_OPEN_S)
        finally:
            process.kill()
