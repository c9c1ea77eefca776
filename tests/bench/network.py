"""`coserve bench network`: one line on 1 to 16 PCs, simulated: images/s, waiting, and bytes over the network.

Each PC is the paper's 12 GB GPU with its CPU (tests/bench/scenarios); read ratios, not seconds.
"""

import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tests.bench.paper import SCENARIOS
from tests.bench.tables import print_narrow
from tools.terminal.console import console, fail
from tools.terminal.option_values import JsonFile

if TYPE_CHECKING:
    from tools.simulate.report import Row
    from tools.simulate.world import Task

_EXPERTS, _SEED = 1000, 1
#: Images that the line takes at once, whatever the number of PCs; others wait at the camera.
_BACKLOG = 4000


@dataclass(frozen=True, slots=True)
class Run:
    """One simulated line. `times_one`: images/s of it over those of one PC, where that was simulated too."""

    pcs: int
    gbit_per_s: float
    expert_mb: int
    times_one: float | None
    bound: str
    us_per_image: float
    row: "Row"


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("network")(bench_network)


def bench_network(
    images: Annotated[int, typer.Option(min=100, help="Images of each run.")] = 20_000,
    pcs: Annotated[str, typer.Option(help="Numbers of PCs, with commas.")] = "1,2,4,8,16",
    gbit: Annotated[str, typer.Option(help="Speeds of the line's uplink, Gb/s, with commas.")] = "10,1",
    expert_mb: Annotated[str, typer.Option(help="Sizes of an expert, MB, with commas.")] = "8,178",
    image_kb: Annotated[int, typer.Option(min=1, help="Size of an image, KB.")] = 300,
    cold: Annotated[bool, typer.Option(help="Other PCs have no expert on their disks that is not in memory.")] = False,
    empty: Annotated[bool, typer.Option(help="As --cold, and no expert is in any memory.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Simulate one line on several PCs: 1,000 experts, images in random order, all of them waiting at the camera.

    Experts of 8 MB fit the memory of each PC, so that images are independent; those of 178 MB fit that of ten PCs.
    Deterministic but for the processor time per image, which is that of drive, policy and simulation together.

    Example: coserve bench network --pcs 1,8 --gbit 10
    """
    try:
        counts, speeds, sizes = _numbers(pcs, int), _numbers(gbit, float), _numbers(expert_mb, int)
    except ValueError:
        fail("--pcs, --gbit and --expert-mb: expected numbers above 0 with commas between them: 1,8", status=2)
    runs: list[Run] = []
    for size_mb in sizes:
        of_size = list(
            _runs(a_task(images, size_mb), size_mb, counts, speeds, image_kb * 1000, cold=cold or empty, empty=empty)
        )
        runs += of_size
        print_narrow(
            f"{images:,} images of {image_kb} KB, {_EXPERTS:,} experts of {size_mb} MB",
            ("PCs", "Gb/s", "images/s", "× one", "p95 s", "net GB", "bound", "loads", "µs"),
            [_cells(run) for run in of_size],
        )
    console.print("20,000 images are enough: 50,000 changed the images/s of 8 PCs (experts of 8 MB, 10 Gb/s) by .7 %")
    console.print(
        "bound: share of the physical bound, and what binds; µs: processor time per image, simulation included"
    )
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n", encoding="utf-8")


def a_task(images: int, expert_mb: int) -> "Task":
    """Return a task of independent images; the most used of its experts has 1.9 % of them."""
    from daemon.policy.request import ExpertFacts
    from experts.spec import ArchitectureId, ExpertId
    from tools.simulate.world import Image, Task

    shares = [1 / (number + 5) ** 0.8 for number in range(_EXPERTS)]
    experts = tuple(
        ExpertFacts(ExpertId(f"c{number:03}"), ArchitectureId("resnet101"), expert_mb * 1_000_000, share / sum(shares))
        for number, share in enumerate(shares)
    )
    drawn = random.Random(_SEED).choices(experts, shares, k=images)
    return Task("independent", experts, tuple(Image(0.0, (facts.expert,)) for facts in drawn))


def _runs(
    task: "Task",
    size_mb: int,
    counts: Sequence[int],
    speeds: Sequence[float],
    image_bytes: int,
    *,
    cold: bool,
    empty: bool,
) -> Iterable[Run]:
    from tools.simulate.bound import task_bound
    from tools.simulate.engine import Simulation
    from tools.simulate.files import DeviceFile
    from tools.simulate.report import row_of
    from tools.simulate.world import machine_of

    pc: dict[str, Any] = json.loads((SCENARIOS / "device-numa.json").read_text(encoding="utf-8"))
    one_s = None
    for count in counts:
        for speed in speeds if count > 1 else speeds[:1]:
            network = {"gbit_per_s": speed, "latency_ms": 0.2, "image_bytes": image_bytes, "prefetched": not cold}
            machine = machine_of(
                DeviceFile.model_validate(pc | {"pcs": count, "network": network}), task, "coserve-plus"
            )
            bound = task_bound(machine, task)
            began_s = time.process_time()
            simulation = Simulation(machine, task, "coserve-plus", prefilled=not empty, backlog=_BACKLOG)
            row = row_of(simulation.run(), bound.seconds)
            each_us = (time.process_time() - began_s) / len(task.images) * 1e6
            one_s = row.images_per_s if count == 1 else one_s
            times_one = round(row.images_per_s / one_s, 2) if one_s else None
            yield Run(count, speed, size_mb, times_one, bound.cause, round(each_us), row)


def _cells(run: Run) -> list[str]:
    row = run.row
    return [
        str(run.pcs),
        f"{run.gbit_per_s:g}" if run.pcs > 1 else "–",
        f"{row.images_per_s:.1f}",
        "–" if run.times_one is None else f"{run.times_one:.2f}",
        f"{row.p95_wait_s:.1f}",
        f"{row.network_bytes / 1e9:.1f}",
        f"{row.share_of_bound:.0%} {run.bound}",
        str(row.loads),
        f"{run.us_per_image:.0f}",
    ]


def _numbers(text: str, kind: type[Any]) -> list[Any]:
    """Return the numbers of an option. Raises ValueError if one is none, or not above 0."""
    numbers = [kind(each) for each in text.split(",")]
    if min(numbers) <= 0:
        raise ValueError(text)
    return numbers
