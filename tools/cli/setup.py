"""Commands before a line runs: demo, init, doctor, install-service, profile, simulate."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from daemon.errors import ConfigError
from daemon.policy.presets import PRESETS
from daemon.units import size_text
from routing_rules.load import read_yaml_text
from tools.simulate.files import FileError, read_device, read_task
from tools.simulate.world import Loading, machine_of, task_of, with_deadlines, with_heads
from tools.terminal.console import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    as_typed,
    console,
    errors,
    exit_on,
    fail,
    need_file,
    need_folder,
    print_json,
    print_table,
    share_bar,
)
from tools.terminal.option_values import must_be_policies, parsed_size

if TYPE_CHECKING:
    from tools.profile.run import DeviceProfile, MeasuredProfile
    from tools.setup.line_files import Answers
    from tools.simulate.world import SimulatedMachine, Task

_SIGNS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "wrong": ("✗", "red")}


def must_be_a_checkout() -> None:
    """End the command where rendered boards are not there: they come with the repository, not with a wheel."""
    if find_spec("tools.demo") is None:
        fail("rendered boards come with CoServe's repository, not with an installed line: clone it, `make demo`", 2)


def demo(
    folder: Annotated[Path, typer.Option("--dir", help="Where the line is made.")] = Path("demo"),
    prepare_only: Annotated[bool, typer.Option("--prepare-only", help="Make the line, do not run it.")] = False,
    boards: Annotated[int, typer.Option(min=1, help="Boards that the camera shows.")] = 20,
    seed: Annotated[int, typer.Option(help="Which boards: another seed, other boards.")] = 7,
    train: Annotated[bool, typer.Option("--train", help="Make the experts again in DIR/experts: hours.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Judge 400 boards with the line in DIR: minutes.")] = False,
) -> None:
    """Make a small line (rendered boards, trained experts, rules), run it, and show verdicts beside the truth.

    Example: coserve demo --dir demo
    """
    must_be_a_checkout()
    from tools.demo.run import run_demo
    from tools.query.formats import clean_up_on_signals

    clean_up_on_signals()
    if train or measure:
        from tools.demo import recipe

        (recipe.train if train else recipe.measure_line)(folder)
    else:
        raise SystemExit(run_demo(folder, prepare_only=prepare_only, boards=boards, seed=seed))


def init(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where the line is made.")] = Path("line"),
    board: Annotated[
        list[str] | None,
        typer.Option(help="A board type and its components, e.g. 'mainboard-a R0402=180 U=U1,U2'; repeats."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Read them from sample images, FOLDER/BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Where to put journal, database and images.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory for experts: 2GB, or 'cuda:0=6GB cpu=2GB'.")
    ] = None,
    dashboard: Annotated[
        str | None, typer.Option(help="no, here (this PC alone), or network (any PC, with a token).")
    ] = None,
    keep: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long images of failures stay: 90d, 1y, ever.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take the proposals.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a line of your own: coserve.yaml, rules.yaml, a catalog, folders. Nothing that is there is overwritten.

    Example: coserve init line --board "mainboard-a R0402=180 QFP64=U1,U2" --memory 2GB --dashboard here --yes
    """
    for name in ("coserve.yaml", "rules.yaml"):
        if (folder / name).exists():
            fail(f"{folder / name} is there already, and is never overwritten: name another folder", status=2)
    if board and images:
        fail("name the boards with --board or their --images, not both", status=2)
    from routing_rules.compile import RulesError, compile_rules
    from tools.setup.line_files import collect_answers, rules_text, write_line

    try:
        answers = collect_answers(board, images, data, memory, dashboard, keep, is_silent=yes or as_json)
        routes = compile_rules(read_yaml_text(rules_text(answers.boards), "rules.yaml", refuse_hidden=True))
        written_files = write_line(folder, answers)
    except RulesError as error:
        fail(f"that makes no rules: {error.problems[0].message}", status=2)
    _print_made(folder, written_files, sorted(routes.experts), answers, as_json)


def _print_made(folder: Path, written_files: list[Path], experts: list[str], answers: "Answers", as_json: bool) -> None:
    from daemon.check import check_line
    from daemon.config.settings import load_config
    from daemon.host.machine import own_address
    from daemon.line.line import load_catalog
    from tools.setup.line_files import CATALOG, TOKEN

    config = folder / "coserve.yaml"
    catalog, _, _ = load_catalog(folder / CATALOG)
    missing = [expert for expert in experts if expert not in (catalog or {})]
    problems, _ = check_line(config)
    others = [problem for problem in problems if not any(f"no expert `{expert}`" in problem for expert in missing)]
    words = [f"train all training --out {folder / 'experts'}"] if missing else []
    commands = [as_typed(line) for line in (*words, *(f"{word} {config}" for word in ("check", "doctor", "run")))]
    if as_json:
        report = {"config": str(config), "made": list(map(str, written_files)), "missing_experts": missing}
        print_json(report | {"problems": others, "next": commands})
        return
    for path in written_files:
        console.print(f"made  {path}")
    for problem in others:
        console.print(problem, style="yellow")
    if missing:
        console.print(
            f"\nExperts still to be trained, or imported: {', '.join(missing)}.\nSort pictures of each component type"
            f" into a folder for each label\n(training/{missing[0]}/ok, training/{missing[0]}/missing, …), then:"
        )
    else:
        console.print("\nNext:")
    for command in commands:
        console.print(f"  {command}")
    http = load_config(config).endpoints.http
    if http is not None:
        host = own_address() if answers.dashboard == "network" else "127.0.0.1"
        console.print(f"\nWhile it runs, the dashboard is at http://{host}:{urlsplit(http).port}/")
    if answers.dashboard == "network":
        console.print(f"The token is in {folder / TOKEN}")


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="The line's coserve.yaml; default: ./coserve.yaml, else the service's.",
            show_default=False,
        ),
    ] = None,
    user: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Who will run the line; the service's user where it is installed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find what is wrong on this PC (driver, memory, disks, clock, permissions, ports), and say what to do about it.

    Takes seconds, and disturbs no line that runs. Exit status 1 if something is wrong.

    Example: coserve doctor demo/coserve.yaml
    """
    if config is not None:
        need_file(config, f"name the line's coserve.yaml, or make one with: {as_typed('init')}")
    from tools.setup import doctor as checks

    path = config or (DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None)
    try:
        machine = checks.machine_of(path, user)
    except KeyError:
        fail(f"user {user} does not exist", status=2)
    findings: list[checks.Finding] = []
    for finding in checks.examine(machine):
        findings.append(finding)
        if not as_json:
            sign, colour = _SIGNS[finding.grade]
            console.print(f"[{colour}]{sign}[/] [bold]{finding.check:<13}[/] ", end="", markup=True)
            console.print(finding.so)
            if finding.do:
                console.print(f"  {'':<13} → {finding.do}", style=colour)
    bad = [finding for finding in findings if finding.grade == "wrong"]
    if as_json:
        print_json({"ok": not bad, "findings": [asdict(finding) for finding in findings]})
    else:
        warned = sum(finding.grade == "warn" for finding in findings)
        console.print(f"\n{len(findings)} findings: {len(bad)} wrong, {warned} to look at")
    raise SystemExit(1 if bad else 0)


def install_service(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="The line's coserve.yaml, used where it lies; without it /etc/coserve/coserve.yaml, made if missing.",
            show_default=False,
        ),
    ] = None,
    prefix: Annotated[
        Path | None,
        typer.Option(
            "--prefix", metavar="DIR", help="Write everything under DIR, for a trial or an image; run nothing."
        ),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Stop the service and remove its files; configuration and results stay.")
    ] = False,
) -> None:
    """Install the daemon as a service of systemd: unit, user, folders. What you have changed is kept.

    Example: coserve install-service /etc/coserve/coserve.yaml
    """
    from tools.setup.service_files import Places, install, uninstall

    places, is_trial = Places((prefix or Path("/")).resolve()), prefix is not None
    path = (config or places.config).resolve()
    if remove and not places.unit.exists():
        fail(f"no service is installed: there is no {places.unit}", status=1)
    if config is not None and not path.is_file() and path != places.config:
        fail(f"no file {config}: name the line's coserve.yaml, or none to begin with {places.config}", status=2)
    try:
        uninstall(places, is_trial=is_trial) if remove else install(path, places, is_trial=is_trial)
    except ConfigError as error:
        fail(str(error), status=2)
    except OSError as error:
        rights = "; run it with sudo, or try it with --prefix DIR" if isinstance(error, PermissionError) else ""
        fail(f"{error.filename}: {error.strerror}{rights}", status=2)


def profile(
    config: ConfigPath,
    out: Annotated[Path | None, typer.Option(help="The file to write; default: profile.yaml beside CONFIG.")] = None,
    images: Annotated[Path | None, typer.Option(help="A folder of real images; default: drawn pictures.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of each device for experts and batches, 2GB; default: as configured.")
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="The largest batch to measure.")] = 16,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes, and rougher.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure batches, loads and memory on this machine; the daemon schedules by it. Minutes, on a quiet machine.

    Name the file in coserve.yaml: `devices.cpu.profile: profile.yaml`. Values set there by hand win.

    Example: coserve profile demo/coserve.yaml --images photos/
    """
    if images is not None:
        need_folder(images)
    from daemon.dispatch.torch_devices import TorchDevices
    from daemon.line.devices import device_problems
    from daemon.line.line import load_line
    from tools.profile.measure import QUICK, ProfileEffort
    from tools.profile.remote import with_remote
    from tools.profile.run import Wish, profile_line, write_profile
    from tools.profile.samples import drawn_samples, read_samples

    memory_bytes = parsed_size("--memory", memory) if memory is not None else None
    effort = replace(QUICK, max_batch=min(max_batch, QUICK.max_batch)) if quick else ProfileEffort(max_batch=max_batch)
    with exit_on(ConfigError, ValueError, status=2):
        line = load_line(config, with_profiles=False)
        samples = read_samples(images) if images is not None else drawn_samples()
    if problems := device_problems(line.config, TorchDevices({}).gpu_count()):
        fail("\n".join(problems), status=2)
    wish = Wish(samples, memory_bytes, effort)
    path = out or config.parent / "profile.yaml"
    with share_bar("starting") as on_share:
        measured = with_remote(config, line, wish, profile_line(line, wish, on_share), on_share)
        write_profile(path, measured)
    for name, reason in measured.skipped.items():
        errors.print(f"{name} was not measured: {reason}; then profile again")
    if as_json:
        print_json(_as_figures(measured) | {"files": [str(path)]})
        return
    for figures in measured.devices:
        _print_device(figures)
    console.print(f"measured with {measured.samples}; written: {path}")
    console.print(f"to use it: `profile: {path.name}` under the device in {config}")


def _as_figures(measured: "MeasuredProfile") -> dict[str, Any]:
    from tools.profile.run import as_document

    document = as_document(measured)
    for figures in measured.devices:
        entry = document["devices"][figures.device]
        entry["pairs"] = [asdict(pair) for pair in figures.pairs]
        for cost in figures.costs:
            entry["architectures"][str(cost.row.architecture)]["latencies_s"] = dict(cost.latencies_s)
        entry["search"] = figures.split and asdict(figures.split)
    return document | {"measured_with": measured.samples, "skipped": dict(measured.skipped)}


def _print_device(figures: "DeviceProfile") -> None:
    columns = ("layout", "K ms", "B ms", "error", "batch", "MB/image", "disk ms", "RAM ms")
    rows = [
        (
            _short(cost.row.architecture),
            f"{cost.row.k_s * 1e3:.2f}",
            f"{cost.row.b_s * 1e3:.2f}",
            f"{cost.residual:.1%}",
            cost.row.max_batch,
            f"{cost.row.activation_bytes / 1e6:.1f}",
            f"{cost.row.disk_s * 1e3:.1f}",
            None if cost.row.ram_s is None else f"{cost.row.ram_s * 1e3:.1f}",
        )
        for cost in figures.costs
    ]
    print_table(f"{figures.device}: a batch of n takes K·n + B", columns, rows)
    if figures.split is None:
        return
    console.print(
        f"{figures.device}: {figures.chosen.executors} executors × {figures.chosen.threads} threads are fastest;"
        f" {size_text(figures.expert_bytes)} for experts (the {figures.split.experts} most used),"
        f" {size_text(figures.batches_bytes)} for batches (--json has what was tried)"
    )


def _short(layout: str) -> str:
    architecture, _, size, dtype, *_ = layout.split("-")
    return f"{architecture} {size} px {dtype}"


def simulate(
    device: Annotated[Path | None, typer.Option(metavar="FILE", help="A device file (JSON).")] = None,
    task: Annotated[Path | None, typer.Option(metavar="FILE", help="A task file (JSON, or JSON in gzip).")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A policy; repeat for several; default: all.")] = None,
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
    if trace is not None:
        simulated = _of_trace(trace)
    elif device is None or task is None:
        fail("both --device and --task are needed", status=2)
    else:
        simulated = _of_files(device, task, loading, deadline, heads)
    from tools.simulate.report import cells

    rows = _run_policies(list(dict.fromkeys(policy or simulated.policies)), simulated, timeline, until)
    live = simulated.live
    if as_json:
        print_json([row | ({"live": live} if live else {}) for row in rows])
        return
    print_table(f"{simulated.title}; waits to the first batch", *cells(rows))
    if live:
        console.print(
            f"recorded live under {live['policy']}: {live['images_per_s']:.2f} images/s ({live['answered']} answered in"
            f" {live['makespan_s']:.1f} s), {live['loads']} loads"
        )


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A task on the machine of any policy; `options` are a recorded run's, `live` its figures."""

    title: str
    task: "Task"
    machine: "Callable[[str], SimulatedMachine]"
    bound_s: float
    policies: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    live: dict[str, Any] | None = None


def _of_files(
    device_path: Path, task_path: Path, loading: Loading, deadline_s: float | None, heads: str | None
) -> _Simulated:
    from tools.simulate.bound import task_bound

    with exit_on(FileError, ValueError, status=2):
        device, task = read_device(device_path), task_of(read_task(task_path))
        task = task if heads is None else with_heads(task, heads)
        # One bound for every policy: all processors and all memory, even if a policy uses less.
        bound = task_bound(machine_of(device, task, "coserve-plus"), task)
    task = task if deadline_s is None else with_deadlines(task, deadline_s)
    pcs = f"{len(device.by_host())} PCs, " if len(device.by_host()) > 1 else ""
    bound_text = f"bound {bound.seconds:.1f} s" + (f" ({bound.cause})" if pcs else "")
    title = f"{task.name} on {device.name}, {pcs}{loading} loading: {len(task.images)} images, {bound_text}"
    return _Simulated(
        title, task, lambda policy: machine_of(device, task, policy, loading), bound.seconds, tuple(PRESETS)
    )


def _of_trace(path: Path) -> _Simulated:
    from daemon.dispatch.trace import TraceError
    from tools.simulate.bound import task_bound
    from tools.simulate.recorded import Recorded

    need_file(path, "name what `coserve run --trace` or `record:` wrote")
    with exit_on(TraceError, status=2):
        recorded = Recorded(path)
    live = {
        "policy": recorded.policy,
        "images": len(recorded.task.images),
        "answered": recorded.answered,
        "images_per_s": round(recorded.images_per_s, 3),
        "makespan_s": round(recorded.makespan_s, 3),
        "loads": recorded.loads,
    }
    bound_s = task_bound(recorded.machine(recorded.policy), recorded.task).seconds
    options = {"tuning": recorded.tuning, "prefilled": recorded.prefilled}
    title = f"{path}: {len(recorded.task.images)} images"
    return _Simulated(title, recorded.task, recorded.machine, bound_s, (recorded.policy,), options, live)


def _run_policies(
    names: Sequence[str], simulated: _Simulated, timeline: Path | None, until_s: float | None
) -> list[dict[str, Any]]:
    """Return the figures of each policy, and draw its timeline; of several, the file's name has the policy's."""
    from tools.simulate.engine import Simulation, StuckError
    from tools.simulate.report import draw_timeline, figures

    rows: list[dict[str, Any]] = []
    options = {**simulated.options, "keep_spans": timeline is not None}
    for name in names:
        try:
            outcome = Simulation(simulated.machine(name), simulated.task, name, **options).run()
        except (StuckError, ValueError) as error:
            fail(f"{name}: {error}", status=1)
        rows.append(figures(outcome, simulated.bound_s))
        if timeline is None:
            continue
        path = timeline if len(names) == 1 else timeline.with_name(f"{timeline.stem}-{name}{timeline.suffix}")
        try:
            draw_timeline(outcome, path, until_s=until_s)
        except (OSError, ValueError) as error:
            fail(f"cannot write {path}: {error}", status=2)
        errors.print(f"wrote {path}")
    return rows
