"""`coserve bench online`: real images as a line sends them, at shares of the rate of `coserve`: latency, misses."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tests.bench.options import DeviceNames, JsonFile, chosen_devices
from tests.bench.tables import print_rows
from tools.terminal.console import console, errors, fail

if TYPE_CHECKING:
    from tests.bench.live.expert_files import Disk
    from tests.bench.live.image_trace import Arrivals, ImageOrder
    from tests.bench.live.sides import LiveOptions, LiveSetup, SideInput, SideResult

#: First come, first served; the paper; ours.
POLICIES = ("samba", "coserve", "coserve-plus")
#: The images of each kind of arrivals: single images by usage, whole boards in placement order.
_ORDERS: "dict[Arrivals, ImageOrder]" = {"poisson": "skewed", "bursty": "board"}
Rows = list[dict[str, Any]]
#: A run ends so long after its last image.
_LIMIT_S = 60.0


def bench_online(
    load: Annotated[
        list[float] | None, typer.Option(min=0.01, help="A share of coserve's saturated throughput; repeat. [.9]")
    ] = None,
    deadline_s: Annotated[float, typer.Option(min=0.1, help="Seconds from an image's arrival to its verdict.")] = 20.0,
    device: DeviceNames = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="The experts' folder; a cache folder.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Images of each run.")] = 600,
    json_file: JsonFile = None,
) -> None:
    """Latency, deadline misses and unknown verdicts of FCFS, coserve and coserve-plus, Poisson and board by board.

    On this machine, with real images and experts and a paced disk. Status 1 where a run failed. Simulated:
    `coserve bench ablation`.

    Example: coserve bench online --load .9
    """
    from tests.bench.live.expert_files import ExpertRecipe
    from tests.bench.live.sides import LiveOptions, default_folder

    options = LiveOptions(
        folder or default_folder(), ExpertRecipe(), requests, limit_s=_LIMIT_S, devices=chosen_devices(device)
    )
    title, rows = _measured(options, load or [0.9], deadline_s)
    print_rows(title, rows)
    console.print(
        "latencies (from arrival to verdict) and waits are of runs without deadlines; unknown (no verdict in time) of"
        " runs with them"
    )
    if json_file is not None:
        json_file.write_text(json.dumps({"title": title, "rows": rows}, indent=2) + "\n", encoding="utf-8")


def _measured(options: "LiveOptions", shares: Sequence[float], deadline_s: float) -> tuple[str, Rows]:
    from tests.bench.live.sides import prepare
    from tests.bench.processes import RunError
    from tools.terminal.console import Bars

    with tempfile.TemporaryDirectory(prefix="coserve-bench-") as scratch, Bars(console=errors) as bar:
        task = bar.add_task("preparing", total=len(_ORDERS) * (1 + len(shares) * len(POLICIES) * 2))
        try:
            setup = prepare(options, Path(scratch), lambda step: bar.update(task, description=step))

            def run(work: "SideInput") -> "SideResult":
                deadline = "" if work.deadline_s is None else ", deadlines"
                bar.update(task, description=f"{work.trace.order}, {work.side}{deadline}")
                result = setup.run(work)
                bar.advance(task)
                return result

            saturated, rows = live_rows(setup, shares, deadline_s, run)
        except RunError as error:
            fail(str(error), status=1)
    rates = ", ".join(f"{arrivals} {rate:.2f}" for arrivals, rate in saturated.items())
    return f"live, paced disk: coserve saturated (images/s): {rates}; deadline {deadline_s:g} s", rows


def live_rows(
    setup: "LiveSetup",
    shares: Sequence[float],
    deadline_s: float,
    run: "Callable[[SideInput], SideResult]",
    disk: "Disk" = "paced",
    kinds: "Sequence[Arrivals]" = tuple(_ORDERS),
    policies: Sequence[str] = POLICIES,
) -> "tuple[dict[Arrivals, float], Rows]":
    """Return coserve's saturated throughput by kind of arrivals, and rows: each of a run without deadlines and one
    with. In the rows `finished` is the share of images that ended.
    """
    rows: Rows = []
    saturated: dict[Arrivals, float] = {}
    for arrivals in kinds:
        waiting = setup.trace(_ORDERS[arrivals])
        saturated[arrivals] = run(setup.side_input("coserve", waiting, disk)).images_per_s
        for share in shares:
            trace = waiting.arriving(share * saturated[arrivals], arrivals)
            limit_s = trace.images[-1].arrives_s + setup.options.limit_s
            for policy in policies:
                side = "samba-slots" if policy == "samba" else policy
                work = replace(setup.side_input(side, trace, disk), limit_s=limit_s, enough_images=None)
                free, limited = run(work), run(replace(work, deadline_s=deadline_s))
                rows.append(
                    {"policy": policy, "arrivals": arrivals, "load": share} | _row(free, limited, len(trace.images))
                )
    return saturated, rows


def _row(free: "SideResult", limited: "SideResult", images: int) -> dict[str, Any]:
    import numpy as np

    p50_s, p95_s, p99_s = (round(float(each), 2) for each in np.quantile(free.latencies_s or [0.0], (0.5, 0.95, 0.99)))
    return {
        "images_per_s": round(free.images_per_s, 2),
        "p50_s": p50_s,
        "p95_s": p95_s,
        "p99_s": p99_s,
        "longest_wait_s": round(max(free.waits_s, default=0.0), 2),
        "finished": round(free.images / images, 3),
        "unknown_share": round((limited.unknown + images - limited.images) / images, 4),
        "loads": free.loads,
    }
