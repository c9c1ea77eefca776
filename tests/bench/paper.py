"""`coserve bench paper`: CoServe's devices and tasks (§5.1) simulated under every policy.

The constants of tests/bench/scenarios were fitted by hand so that totals come near the paper's, whose text gives ratios
and totals but not every constant: ratios between policies mean something, seconds do not.
"""

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.policy.presets import PRESETS
from tests.bench.options import JsonFile
from tests.bench.tables import print_rows
from tools.simulate.world import Loading
from tools.terminal.console import console
from tools.terminal.option_values import must_be_one_of

if TYPE_CHECKING:
    from tools.simulate.files import DeviceFile
    from tools.simulate.world import Task

SCENARIOS = Path(__file__).parent / "scenarios"
DEVICES = {"numa": "12 GB GPU, SATA disk", "uma": "24 GB unified memory, NVMe"}
TASKS = ("A1", "A2", "B1", "B2")
#: Task A1 in the order of a board's placement list, which is not one of the paper's tasks.
BOARD = "A1-board"
WORLDS: dict[Loading, str] = {"ordinary": "as the paper loads", "slots": "slots"}


def bench_paper(
    tasks: Annotated[str, typer.Option(help="Of A1, A2, B1, B2 and A1-board, with commas.")] = "A1,A1-board,A2,B1,B2",
    json_file: JsonFile = None,
) -> None:
    """Simulate the paper's tasks on its devices under all eight policies, with loads as in the paper and into slots.

    Print images/s, loads and the share of the bound. Deterministic; a few minutes.

    Example: coserve bench paper --tasks A1,A1-board
    """
    figures: dict[str, Any] = {"rows": []}
    for name in tasks.split(","):
        must_be_one_of("--tasks", name, (*TASKS, BOARD))
        for device, described in DEVICES.items():
            rows = {(policy, each): simulated(device, name, each, policy) for policy in PRESETS for each in WORLDS}
            print_rows(
                f"{name} on {described}: images/s · loads · share of the bound",
                [
                    {"policy": policy} | {WORLDS[each]: _cell(rows[policy, each]) for each in WORLDS}
                    for policy in PRESETS
                ],
            )
            figures["rows"] += [
                {"device": device, "task": name, "loading": loading} | row for (_, loading), row in rows.items()
            ]
    console.print("constants were fitted near the paper's totals: read ratios, not seconds")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


@cache
def _scenario(device: str, task: str) -> "tuple[DeviceFile, Task]":
    from tools.simulate.files import read_device, read_task
    from tools.simulate.world import task_of

    return read_device(SCENARIOS / f"device-{device}.json"), task_of(read_task(SCENARIOS / f"task-{task}.json.gz"))


@cache
def simulated(device: str, task_name: str, loading: Loading, policy: str) -> dict[str, Any]:
    """Return one run's figures."""
    from tools.simulate.bound import task_bound
    from tools.simulate.engine import Simulation
    from tools.simulate.report import figures
    from tools.simulate.world import machine_of

    file, task = _scenario(device, task_name)
    bound_s = task_bound(machine_of(file, task, "coserve-plus"), task).seconds
    return figures(Simulation(machine_of(file, task, policy, loading), task, policy).run(), bound_s)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['images_per_s']:.1f} · {row['loads']} · {row['share_of_bound']:.0%}"
