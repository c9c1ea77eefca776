"""`coserve bench line`: the demo line under each policy, real daemon and real sockets, interleaved runs, the ratio."""

import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from tools.cli.console import AsJson, console, errors, fail, print_json, print_table
from tools.cli.option_values import must_be_policies

if TYPE_CHECKING:
    from coserve_client import CameraImage

_SEED = 11


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run. `images_per_s` counts from the first image sent to the last verdict durable."""

    policy: str
    images: int
    images_per_s: float
    expert_switches: int
    unknown: int


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("line")(bench_line)


def bench_line(
    folder: Annotated[Path, typer.Option("--dir", help="The demo's folder (made if it is not there).")] = Path("demo"),
    boards: Annotated[int, typer.Option(min=1, help="Boards published in each run.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each policy, interleaved; the median counts.")] = 3,
    policies: Annotated[list[str] | None, typer.Option("--policy", help="Policies to compare (repeat).")] = None,
    as_json: AsJson = False,
) -> None:
    """Images per second of the demo line under each policy, real daemons and cameras, in one command.

    Example: coserve bench line --dir demo
    """
    chosen = policies or ["samba", "coserve-plus"]
    must_be_policies(chosen)
    bench_policies(folder, boards=boards, rounds=rounds, policies=chosen, as_json=as_json)


def bench_policies(folder: Path, *, boards: int, rounds: int, policies: list[str], as_json: bool) -> None:
    """Run every policy `rounds` times, interleaved, and print medians and the ratio to the first policy."""
    from tools.camera.rendered import rendered_images
    from tools.cli.progress import Bars
    from tools.demo.prepare import prepare

    prepare(folder)
    images = list(rendered_images(boards, _SEED, "B", lot=None))
    figures: dict[str, list[RunFigures]] = {policy: [] for policy in policies}
    with Bars(console=errors) as bar:
        task = bar.add_task("runs", total=rounds * len(policies))
        for _ in range(rounds):
            for policy in policies:
                bar.update(task, description=policy)
                figures[policy].append(run_line(folder / "coserve.yaml", images, policy, {"COSERVE_POLICY": policy}))
                bar.advance(task)
    base = median(run.images_per_s for run in figures[policies[0]])
    rows = [
        {
            "policy": policy,
            "images_per_s": round(median(run.images_per_s for run in runs), 2),
            "expert_switches": int(median(run.expert_switches for run in runs)),
            "ratio": round(median(run.images_per_s for run in runs) / base, 2),
            "runs": [asdict(run) for run in runs],
        }
        for policy, runs in figures.items()
    ]
    if as_json:
        print_json({"machine": platform.platform(), "cores": os.cpu_count(), "images": len(images), "policies": rows})
        return
    columns = ("policy", "images/s (median)", "expert switches (median)", f"ratio to {policies[0]}")
    table = [(row["policy"], row["images_per_s"], row["expert_switches"], row["ratio"]) for row in rows]
    print_table(f"{len(images)} images of {boards} boards, in board order, {rounds} rounds", columns, table)
    console.print(f"on {os.cpu_count()} cores, trained experts of {folder}")


def run_line(
    config: Path,
    images: "Sequence[CameraImage]",
    name: str,
    environ: Mapping[str, str],
    beside: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> RunFigures:
    """One fresh database, one daemon, all images as fast as they are taken; `beside` goes on meanwhile."""
    from coserve_client import Publisher, publish_images
    from daemon.config.settings import load_config
    from daemon.wire.control import ask
    from tools.setup.service import Service, ServiceError, files_in, sockets_in

    with tempfile.TemporaryDirectory(prefix="coserve-bench-") as scratch:
        settings = {**files_in(scratch), **sockets_in(scratch), "COSERVE_ENDPOINTS_HTTP": "null", **environ}
        endpoints = load_config(config, settings).endpoints
        try:
            with Service(config, Path(scratch) / "daemon.log", settings) as service, beside():
                began_s = time.monotonic()
                with Publisher(endpoints.intake[0], "bench") as publisher:
                    account = publish_images(publisher, images)
                while (status := ask(endpoints.control, "status"))["backlog"] > 0:
                    time.sleep(0.05)
                took_s = time.monotonic() - began_s
                if not account.complete:
                    fail(f"{name}: {account.as_dict()}; see the log:\n{service.tail()}", status=1)
        except ServiceError as error:
            fail(f"{name}: {error}", status=1)
        return RunFigures(name, len(images), len(images) / took_s, status["expert_switches"], _unknown(scratch))


def _unknown(scratch: str) -> int:
    from sqlalchemy import text

    from daemon.storage.database.connections import open_for_reading

    engine = open_for_reading(f"sqlite:///{scratch}/inspection.db")
    try:
        with engine.connect() as connection:
            return connection.execute(text("SELECT count(*) FROM inspections WHERE verdict = 'unknown'")).scalar() or 0
    finally:
        engine.dispose()
