"""`coserve bench paper`: CoServe's devices and tasks (§5.1) simulated under every policy, and where its ranges are met.

The constants of tests/bench/scenarios were fitted by hand so that totals come near the paper's, whose text gives ratios
and totals but not every constant: ratios between policies mean something, seconds do not.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.policy.presets import PRESETS
from tests.bench.tables import print_narrow
from tools.simulate.world import Loading
from tools.terminal.console import console
from tools.terminal.option_values import JsonFile, must_be_one_of

if TYPE_CHECKING:
    from tests.bench.papers_window import PaperChoice
    from tools.profile.split import Plan, Split
    from tools.simulate.files import DeviceFile
    from tools.simulate.report import Row
    from tools.simulate.world import Task

SCENARIOS = Path(__file__).parent / "scenarios"
DEVICES = {"numa": "12 GB GPU, SATA disk", "uma": "24 GB unified memory, NVMe"}
TASKS = ("A1", "A2", "B1", "B2")
#: Task A1 in the order of a board's placement list, which is not one of the paper's tasks.
BOARD = "A1-board"
WORLDS: dict[Loading, str] = {"ordinary": "as the paper loads", "slots": "slots"}
BASELINES = ("samba", "samba-fifo", "samba-parallel")
#: CoServe without its ideas, and with one more each (§5.3).
_STEPS = ("coserve-none", "coserve-em", "coserve-em-ra", "coserve")
#: Memory that is divided between experts and batches, GB: what the paper's 12 GB GPU leaves free, and more.
_MEMORY_GB = (11, 24, 48, 80)


@dataclass(frozen=True, slots=True)
class Claim:
    """A range that the paper's text gives, and the same figure here in each of `cases`."""

    figure: str
    low: float
    high: float
    cases: tuple[float, ...]

    def within(self) -> int:
        """Return the number of cases within the paper's range."""
        return sum(self.low <= case <= self.high for case in self.cases)

    def here(self) -> str:
        return f"{_range(min(self.cases), max(self.cases))} {self.within()}/{len(self.cases)}"


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("paper")(bench_paper)


def bench_paper(
    tasks: Annotated[str, typer.Option(help="Of A1, A2, B1, B2 and A1-board, with commas.")] = "A1,A1-board,A2,B1,B2",
    ranges: Annotated[bool, typer.Option(help="Also the paper's ranges, and its rule for a GPU's memory.")] = True,
    json_file: JsonFile = None,
) -> None:
    """Simulate the paper's tasks on its devices under all eight policies, with loads as in the paper and into slots.

    Print images/s, loads and the share of the bound; the paper's ranges beside the simulated ones; and how many experts
    its rule and ours keep in a GPU's memory. Deterministic; four to six minutes.

    Example: coserve bench paper --tasks A1,A1-board --no-ranges
    """
    figures: dict[str, Any] = {"rows": []}
    for name in tasks.split(","):
        must_be_one_of("--tasks", name, (*TASKS, BOARD))
        for device, described in DEVICES.items():
            rows = {(policy, each): simulated(device, name, each, policy) for policy in PRESETS for each in WORLDS}
            print_narrow(
                f"{name} on {described}: images/s · loads · share of the bound",
                ("policy", *WORLDS.values()),
                [[policy, *(_cell(rows[policy, each]) for each in WORLDS)] for policy in PRESETS],
            )
            figures["rows"] += [
                {"device": device, "task": name, "loading": loading} | asdict(row) for (_, loading), row in rows.items()
            ]
    if ranges:
        by_world = {loading: list(paper_claims(loading)) for loading in WORLDS}
        print_narrow(
            "The paper's ranges (§2, §5.2, §5.3), and the simulated ones with the cases within",
            ("figure", "paper", *WORLDS.values()),
            [
                [claims[0].figure, _range(claims[0].low, claims[0].high), *(claim.here() for claim in claims)]
                for claims in zip(*by_world.values(), strict=True)
            ],
        )
        figures["ranges"] = {
            loading: [asdict(claim) | {"within": claim.within()} for claim in claims]
            for loading, claims in by_world.items()
        }
        figures["memory"] = list(_memory_rows())
        print_narrow(
            "Experts that a GPU keeps, task A1 into slots: number · images/s",
            ("GPU", "GB", "kept", "batches first", "all that fit", "paper's rule"),
            [list(row.values()) for row in figures["memory"]],
        )
    console.print("constants were fitted near the paper's totals: read ratios, not seconds")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


@cache
def _scenario(device: str, task: str) -> "tuple[DeviceFile, Task]":
    from tools.simulate.files import read_device, read_task
    from tools.simulate.world import task_of

    return read_device(SCENARIOS / f"device-{device}.json"), task_of(read_task(SCENARIOS / f"task-{task}.json.gz"))


@cache
def simulated(
    device: str,
    task_name: str,
    loading: Loading,
    policy: str,
    gpu_executors: int | None = None,
    gpu_share: float | None = None,
) -> "Row":
    """Return one run's row. `gpu_executors` and `gpu_share` (of its memory, for experts) replace the device file's."""
    from tools.simulate.bound import task_bound
    from tools.simulate.engine import simulate
    from tools.simulate.report import row_of
    from tools.simulate.world import machine_of

    file, task = _scenario(device, task_name)
    bound_s = task_bound(machine_of(file, task, "coserve-plus"), task).seconds
    changes = {"executors": gpu_executors, "expert_share": gpu_share}
    gpu = file.processors["gpu"].model_copy(update={name: value for name, value in changes.items() if value})
    file = file.model_copy(update={"processors": {**file.processors, "gpu": gpu}})
    return row_of(simulate(machine_of(file, task, policy, loading), task, policy), bound_s)


def paper_claims(loading: Loading) -> Iterator[Claim]:
    """Yield the ranges that the paper's text gives for its four tasks, with the figures here.

    CoServe Best is the device file; Casual gives 75 % of the GPU's memory to experts (NUMA), or has two executors there
    (UMA, where the paper does not say the memory).
    """
    for device, gain, casual, casual_gain, casual_loads in (
        ("numa", (4.5, 10.5), (None, 0.75), 8.5, (1 - 0.1818, 1 - 0.0128)),
        ("uma", (4.6, 12.0), (2, None), 10.6, (1 - 0.3113, 1 - 0.1648)),
    ):
        best = [simulated(device, name, loading, "coserve") for name in TASKS]
        casually = [simulated(device, name, loading, "coserve", *casual) for name in TASKS]
        steps = [[simulated(device, name, loading, policy) for policy in _STEPS] for name in TASKS]
        ideas = [(after, before) for rows in steps for before, after in pairwise(rows)]
        baselines = [[simulated(device, name, loading, policy) for name in TASKS] for policy in BASELINES]
        to_baselines = [pair for rows in baselines for pair in zip(best, rows, strict=True)]
        casual_pairs = [pair for rows in baselines for pair in zip(casually, rows, strict=True)]

        def claim(figure: str, low: float, high: float, cases: Iterable[float], device: str = device) -> Claim:
            return Claim(f"{device}: {figure}", low, high, tuple(cases))

        yield claim("images/s, × baselines", *gain, _rates(to_baselines))
        yield claim("loads, × baselines", 1 - 0.9387, 1 - 0.785, _loads(to_baselines))
        yield claim("images/s, × by each idea", 1.0, 1e9, _rates(ideas))
        yield claim("loads, × by each idea", 0.0, 1.0, _loads(ideas))
        yield claim("Casual images/s, × baselines", 0.0, casual_gain, _rates(casual_pairs))
        yield claim("Best loads, × Casual", *casual_loads, _loads(zip(best, casually, strict=True)))
        for board, fastest in (("A", 3), ("B", 4)):
            trials = {
                name: {count: simulated(device, name, loading, "coserve", count).images_per_s for count in (2, 3, 4)}
                for name in TASKS
                if name.startswith(board)
            }
            best_counts = (max(each, key=lambda count: each[count]) for each in trials.values())
            yield claim(f"GPU executors, board {board}", fastest, fastest, best_counts)
        for path, low, share in zip(("disk", "host memory"), (0.9, 0.6), _load_shares(device, loading), strict=True):
            yield claim(f"load from {path}, part of latency", low, 1.0, [share])
        if device == "numa":
            yield claim("images/s", 24.5, 27.2, (row.images_per_s for row in best))
            yield claim("Casual images/s, × Best", 1 - 0.1875, 1 - 0.0571, _rates(zip(casually, best, strict=True)))
            for task, low, high in (("A1", 28, 39), ("B1", 31, 42)):
                number = papers_split(device, 11, task, loading).experts
                yield claim(f"experts, paper's rule, {task}", low, high, [number])
            yield claim("loads, B2", 65, 65, [best[3].loads])
        else:
            yield claim("loads, B1", 63, 63, [best[2].loads])


def _rates(pairs: "Iterable[tuple[Row, Row]]") -> Iterator[float]:
    return (row.images_per_s / other.images_per_s for row, other in pairs)


def _loads(pairs: "Iterable[tuple[Row, Row]]") -> Iterator[float]:
    return (row.loads / other.loads for row, other in pairs)


def _load_shares(device: str, loading: Loading) -> Iterator[float]:
    """Yield the part of one image's latency that a load takes: from disk, and from the host's memory."""
    from tools.simulate.world import machine_of

    machine = machine_of(*_scenario(device, "A1"), "coserve", loading)
    row = next(row for row in machine.matrix if (row.device, row.architecture) == ("cuda:0", "resnet101"))
    (link,) = machine.from_ram["cuda:0"]
    for load_s in (row.disk_s, 178e6 / link.bytes_per_s + link.fixed_s):
        yield load_s / (load_s + row.k_s + row.b_s)


@cache
def papers_split(device: str, gigabytes: int, task_name: str, loading: Loading) -> "PaperChoice":
    """Return the choice of the paper's rule for that memory."""
    from tests.bench.papers_window import paper_choice
    from tools.profile.split import SAMPLE_IMAGES, sample_images, simulated_images_per_s

    plan = _memory_plan(device, gigabytes, task_name, loading)
    images = sample_images(plan, SAMPLE_IMAGES)
    return paper_choice(
        lambda experts: simulated_images_per_s(plan, plan.budget_bytes(experts), images), plan.max_experts()
    )


@cache
def memory_split(device: str, gigabytes: int, task_name: str, loading: Loading) -> "Split":
    """Divide so much memory of the device file's GPU between experts and batches, as `coserve profile` does."""
    from tools.profile.split import search_split

    return search_split(_memory_plan(device, gigabytes, task_name, loading))


def _memory_plan(device: str, gigabytes: int, task_name: str, loading: Loading) -> "Plan":
    from tools.profile.split import Plan
    from tools.simulate.world import machine_of

    file, task = _scenario(device, task_name)
    machine = machine_of(file, task, "coserve-plus", loading)
    rows = tuple(row for row in machine.matrix if row.device == "cuda:0")
    experts = tuple(sorted(task.experts, key=lambda facts: -facts.usage))
    executors = file.processors["gpu"].executors
    return Plan("cuda:0", gigabytes * 10**9, executors, rows, experts, "coserve-plus")


def _memory_rows() -> Iterator[dict[str, Any]]:
    for device in DEVICES:
        for gigabytes in _MEMORY_GB:
            split = memory_split(device, gigabytes, "A1", "slots")
            paper = papers_split(device, gigabytes, "A1", "slots")
            ours = {"kept": split.experts, "limited": split.limited, "most": split.most}
            yield (
                {"device": device, "gigabytes": gigabytes}
                | {name: f"{count} · {split.images_per_s[count]:.1f}" for name, count in ours.items()}
                | {"paper": f"{paper.experts} · {paper.images_per_s:.1f}"}
            )


def _cell(row: "Row") -> str:
    return f"{row.images_per_s:.1f} · {row.loads} · {row.share_of_bound:.0%}"


def _range(low: float, high: float) -> str:
    if low == high:
        return f"{low:.3g}"
    return f"{low:.3g}–{high:.3g}" if high < 1e9 else f"> {low:.3g}"
