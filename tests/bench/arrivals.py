"""The live half of `coserve bench online`: the same images arriving one by one, or board by board."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from tests.bench.job import Job, Run
from tests.bench.stage import Size, Stage, set_stage
from tests.bench.workload import Order, Trace
from tools.cli.console import errors
from tools.cli.progress import Bars
from tools.simulate.report import quantile

Arrivals = Literal["poisson", "bursty"]
#: Which images arrive how: single images by usage, whole boards in placement order.
_ORDERS: dict[Arrivals, Order] = {"poisson": "skewed", "bursty": "board"}
_BOARD_IMAGES = 50
_SEED = 23


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """`loads` are shares of coserve's saturated throughput, measured first."""

    folder: Path
    size: Size
    loads: tuple[float, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class LiveRow:
    """As tools.simulate.online.OnlineRow; `finished` is the share of images that ended before the limit."""

    policy: str
    arrivals: Arrivals
    load: float
    images_per_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    longest_wait_s: float
    finished: float
    unknown_share: float
    loads: int


def run_online(settings: OnlineSettings, scratch: Path, policies: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """A title and a row per kind of arrivals, load and policy. Raises SideError."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=errors) as bar:
        total = len(_ORDERS) * (1 + len(settings.loads) * len(policies) * 2)
        task = bar.add_task("preparing", total=total)
        stage = set_stage(settings.folder, scratch, settings.size, (), lambda text: bar.update(task, description=text))

        def run(job: Job) -> Run:
            deadline = "" if job.deadline_s is None else ", deadlines"
            bar.update(task, description=f"{job.trace.order}, {job.side}{deadline}")
            done = stage.run(job)
            bar.advance(task)
            return done

        saturated, rows = live_rows(stage, settings, policies, run)
    rates = ", ".join(f"{kind} {rate:.2f}" for kind, rate in saturated.items())
    title = f"live, paced disk: coserve saturated (images/s): {rates}; deadline {settings.deadline_s:g} s"
    return title, [asdict(row) for row in rows]


def live_rows(
    stage: Stage, settings: OnlineSettings, policies: Sequence[str], run: Callable[[Job], Run]
) -> tuple[dict[Arrivals, float], list[LiveRow]]:
    """Saturated throughput of coserve by kind of arrivals, and rows: each of a run without deadlines and one with."""
    rows: list[LiveRow] = []
    saturated: dict[Arrivals, float] = {}
    for kind, order in _ORDERS.items():
        waiting = stage.trace(order)
        saturated[kind] = run(_job(stage, "coserve", waiting, settings)).images_per_s
        for load in settings.loads:
            paced = arriving(waiting, load * saturated[kind], kind)
            for policy in policies:
                job = _job(stage, policy, paced, settings)
                free, limited = run(job), run(replace(job, deadline_s=settings.deadline_s))
                rows.append(_row(kind, load, free, limited, len(paced.asks)))
    return saturated, rows


def arriving(trace: Trace, rate_per_s: float, kind: Arrivals) -> Trace:
    """The images in their order at `rate_per_s`: one by one, or a board's worth at once."""
    dice = random.Random(_SEED)
    now_s = 0.0
    times: list[float] = []
    for number in range(len(trace.asks)):
        if kind == "poisson":
            now_s += dice.expovariate(rate_per_s)
        elif number and number % _BOARD_IMAGES == 0:
            now_s += dice.expovariate(rate_per_s / _BOARD_IMAGES)
        times.append(now_s)
    asks = tuple(replace(ask, at_s=at_s) for ask, at_s in zip(trace.asks, times, strict=True))
    return replace(trace, asks=asks)


def _job(stage: Stage, policy: str, trace: Trace, settings: OnlineSettings) -> Job:
    job = stage.job(policy, trace, "paced")
    return replace(job, limit_s=trace.asks[-1].at_s + settings.size.limit_s)


def _row(kind: Arrivals, load: float, free: Run, limited: Run, images: int) -> LiveRow:
    never = images - limited.images
    return LiveRow(
        policy=free.side,
        arrivals=kind,
        load=load,
        images_per_s=round(free.images_per_s, 2),
        p50_s=round(quantile(free.latencies_s, 0.5), 2),
        p95_s=round(quantile(free.latencies_s, 0.95), 2),
        p99_s=round(quantile(free.latencies_s, 0.99), 2),
        longest_wait_s=round(max(free.waits_s, default=0.0), 2),
        finished=round(free.images / images, 3),
        unknown_share=round((limited.unknown + never) / images, 4),
        loads=free.loads or 0,
    )
