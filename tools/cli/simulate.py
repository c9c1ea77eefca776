"""`coserve simulate`: what a policy would do, on a device that you describe or with a trace of your own line."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.policy.presets import PRESETS
from tools.simulate.world import Loading
from tools.terminal.console import AsJson, console, errors, fail, print_json, print_table
from tools.terminal.option_values import must_be_policies

if TYPE_CHECKING:
    from tools.simulate.engine import Simulation
    from tools.simulate.report import Row


def simulate(
    device: Annotated[Path | None, typer.Option(metavar="FILE", help="A device file (JSON).")] = None,
    task: Annotated[Path | None, typer.Option(metavar="FILE", help="A task file (JSON, or JSON in gzip).")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A policy; repeat for more, all without it.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A recorded run, instead of device and task.")
    ] = None,
    loading: Annotated[
        Loading,
        typer.Option(help="How every policy loads a device file's experts: as the daemon or as the paper does."),
    ] = "slots",
    deadline: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds in which each image must be answered.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="As if these experts of a task were heads of one backbone.")
    ] = None,
    timeline: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw loads and batches over time.")] = None,
    until: Annotated[float | None, typer.Option(min=0.001, help="Seconds that the timeline shows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate policies on a device and a task, with the same policy objects that run the line; one row for each.

    With --trace, a recorded run (`record:` in coserve.yaml) is replayed with the costs measured in it, under its own
    policy or under others: what would another policy have done?

    Example: coserve simulate --device device.json --task task.json.gz --policy coserve --policy coserve-plus
    """
    must_be_policies(policy or ())
    if (trace is None) == (device is None and task is None):
        fail("name either --device and --task, or --trace", status=2)
    if heads is not None and trace is not None:
        fail("--heads needs --device and --task: a trace has the experts that it was recorded with", status=2)
    keep_spans = timeline is not None
    if trace is not None:
        simulated = _of_trace(trace, keep_spans=keep_spans)
    elif device is None or task is None:
        fail("both --device and --task are needed", status=2)
    else:
        simulated = _of_files(device, task, loading, deadline, heads, keep_spans=keep_spans)
    from tools.simulate.report import cells, columns

    rows = _run_policies(list(dict.fromkeys(policy or simulated.policies)), simulated, timeline, until)
    live = simulated.live
    if as_json:
        print_json([asdict(row) | ({"live": live} if live else {}) for row in rows])
        return
    names = columns(rows)
    print_table(f"{simulated.title}; waits to the first batch", names, [cells(row, names) for row in rows])
    if live:
        console.print(
            f"recorded live under {live['policy']}: {live['images_per_s']:.2f} images/s ({live['answered']} answered in"
            f" {live['makespan_s']:.1f} s), {live['loads']} loads"
        )


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A task on a machine, ready to be simulated under any policy; `live` has the figures of a recorded run."""

    title: str
    bound_s: float
    under: "Callable[[str], Simulation]"
    policies: Sequence[str]
    live: dict[str, Any] | None = None


def _of_files(
    device_path: Path,
    task_path: Path,
    loading: Loading,
    deadline_s: float | None,
    heads: str | None,
    *,
    keep_spans: bool,
) -> _Simulated:
    from tools.simulate.bound import task_bound
    from tools.simulate.engine import Simulation
    from tools.simulate.files import FileError, read_device, read_task
    from tools.simulate.world import machine_of, task_of, with_deadlines, with_heads

    try:
        device, task = read_device(device_path), task_of(read_task(task_path))
        if heads is not None:
            task = with_heads(task, heads)
        # Every policy is measured against one bound, all processors and all memory, also if it uses less of them.
        bound = task_bound(machine_of(device, task, "coserve-plus"), task)
    except (FileError, ValueError) as error:
        fail(str(error), status=2)
    if deadline_s is not None:
        task = with_deadlines(task, deadline_s)

    def under(policy: str) -> Simulation:
        return Simulation(machine_of(device, task, policy, loading), task, policy, keep_spans=keep_spans)

    pcs = f"{len(device.by_host())} PCs, " if len(device.by_host()) > 1 else ""
    bound_text = f"bound {bound.seconds:.1f} s" + (f" ({bound.cause})" if pcs else "")
    title = f"{task.name} on {device.name}, {pcs}{loading} loading: {len(task.images)} images, {bound_text}"
    return _Simulated(title, bound.seconds, under, tuple(PRESETS))


def _of_trace(path: Path, *, keep_spans: bool) -> _Simulated:
    from daemon.dispatch.trace import TraceError
    from tools.simulate.bound import task_bound
    from tools.simulate.engine import Simulation
    from tools.simulate.recorded import read_recorded

    try:
        recorded = read_recorded(path)
    except OSError as error:
        fail(f"{path}: {error.strerror or error}", status=2)
    except TraceError as error:
        fail(str(error), status=2)
    task, tuning, prefilled = recorded.task, recorded.tuning, recorded.prefilled

    def under(policy: str) -> Simulation:
        machine = recorded.machine(policy)
        return Simulation(machine, task, policy, tuning=tuning, prefilled=prefilled, keep_spans=keep_spans)

    live = {
        "policy": recorded.policy,
        "images": len(task.images),
        "answered": recorded.answered,
        "images_per_s": round(recorded.images_per_s, 3),
        "makespan_s": round(recorded.makespan_s, 3),
        "loads": recorded.loads,
    }
    bound = task_bound(recorded.machine(recorded.policy), task).seconds
    return _Simulated(f"{path}: {len(task.images)} images", bound, under, (recorded.policy,), live)


def _run_policies(
    names: Sequence[str], simulated: _Simulated, timeline: Path | None, until_s: float | None
) -> "list[Row]":
    """Return a row for each policy, and draw its timeline; several have their names before the suffix."""
    from tools.simulate.engine import StuckError
    from tools.simulate.report import row_of
    from tools.simulate.timeline import draw_timeline

    rows: list[Row] = []
    for name in names:
        try:
            outcome = simulated.under(name).run()
        except (StuckError, ValueError) as error:
            fail(f"{name}: {error}", status=1)
        rows.append(row_of(outcome, simulated.bound_s))
        if timeline is None:
            continue
        path = timeline if len(names) == 1 else timeline.with_name(f"{timeline.stem}-{name}{timeline.suffix}")
        try:
            draw_timeline(outcome, path, until_s=until_s)
        except (OSError, ValueError) as error:
            fail(f"cannot write {path}: {error}", status=2)
        errors.print(f"wrote {path}")
    return rows
