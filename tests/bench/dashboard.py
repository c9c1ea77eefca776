"""`coserve bench dashboard`: images per second with pages open against none, interleaved runs of real daemons."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.units import size_text
from tests.ports import free_port
from tools.bench.line import RunFigures, run_line
from tools.terminal.console import AsJson, console, errors, fail, print_json, print_table

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
    """Runs with and without pages in turn, each round beginning with the other one; medians and ratios."""
    from tools.terminal.progress import Bars

    runs: dict[str, list[RunFigures]] = {"without": [], "with": []}
    heard: list[tuple[int, int]] = []
    with Bars(console=errors) as bar:
        task = bar.add_task("runs", total=2 * rounds)
        for number in range(rounds):
            for name in ("without", "with") if number % 2 else ("with", "without"):
                bar.update(task, description=name)
                runs[name].append(_run(config, images, readers if name == "with" else 0, heard))
                bar.advance(task)
    rates = {name: [run.images_per_s for run in some] for name, some in runs.items()}
    ratios = [shown / bare for shown, bare in zip(rates["with"], rates["without"], strict=True)]
    return {
        "images": len(images),
        "readers": readers,
        **{name: round(median(some), 2) for name, some in rates.items()},
        "ratio": round(median(ratios), 4),
        "ratios": [round(one, 3) for one in ratios],
        "switches": {name: int(median(run.expert_switches for run in some)) for name, some in runs.items()},
        "events": sum(events for events, _ in heard),
        "event_bytes": sum(size for _, size in heard),
        "runs": {name: [asdict(run) for run in some] for name, some in runs.items()},
    }


def _run(config: Path, images: "list[CameraImage]", readers: int, heard: list[tuple[int, int]]) -> RunFigures:
    if not readers:
        return run_line(config, images, "without", {})
    url = f"http://127.0.0.1:{free_port()}"

    @contextmanager
    def pages() -> Iterator[None]:
        with open_pages(url, readers) as reading:
            yield
        heard.append(reading.heard)

    return run_line(config, images, "with", {"COSERVE_ENDPOINTS_HTTP": url}, pages)


class Reading:
    """What the readers' process has heard when it ended: events of all pages, and their bytes."""

    heard: tuple[int, int] = (0, 0)


@contextmanager
def open_pages(url: str, readers: int) -> Iterator[Reading]:
    """Real HTTP streams of so many Line pages, from before the first image until after the last."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.page_readers", url, str(readers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    reading = Reading()
    try:
        if process.stdout.readline() != "listening\n":
            process.wait(_OPEN_S)
            fail(f"{readers} pages of {url} could not be opened: is the extra dashboard installed?", status=1)
        yield reading
        process.stdin.close()
        events, size = process.stdout.read().split()
        reading.heard = int(events), int(size)
        process.wait(_OPEN_S)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
