"""`coserve profile`: measure this machine with a line's experts, once, before the line runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from daemon.units import size_text
from tools.terminal.console import AsJson, ConfigPath, console, exit_on, fail, print_json, print_table
from tools.terminal.progress import share_bar

if TYPE_CHECKING:
    from tools.profile.run import DeviceProfile, MeasuredProfile


def profile(  # one parameter for each option
    config: ConfigPath,
    out: Annotated[Path | None, typer.Option(help="The file to write; profile.yaml beside CONFIG without it.")] = None,
    images: Annotated[Path | None, typer.Option(help="A folder of real images; rendered parts without it.")] = None,
    usage: Annotated[
        str, typer.Option(help="rules, database, or FOLDER/BOARD_TYPE/SERIAL/DESIGNATOR.COMPONENT.png.")
    ] = "rules",
    memory: Annotated[
        str | None, typer.Option(help="Of each device, for experts and batches: 2GB. As configured without it.")
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="The largest batch to measure.")] = 16,
    quick: Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes, and rougher.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure batches, loads and memory on this machine; the daemon schedules by it. Minutes, on a quiet machine.

    Name the file in coserve.yaml: `devices.cpu.profile: profile.yaml`. What stands there by hand wins.

    Example: coserve profile demo/coserve.yaml --images photos/
    """
    if images is not None and not images.is_dir():
        fail(f"no folder {images}", status=2)
    from dataclasses import replace

    from daemon.dispatch.torch_devices import TorchDevices
    from daemon.errors import ConfigError
    from daemon.line.devices import device_problems
    from daemon.line.line import load_line
    from daemon.units import parse_bytes
    from experts.errors import ExpertError
    from tools.profile.measure import QUICK, ProfileEffort
    from tools.profile.remote import with_remote
    from tools.profile.run import ProfileError, Progress, Wish, profile_line, write_profile
    from tools.profile.samples import read_samples, rendered_samples
    from tools.profile.usage import UsageError

    try:
        memory_bytes = parse_bytes(memory) if memory is not None else None
    except ValueError as error:
        fail(f"--memory: {error}", status=2)
    if usage not in ("rules", "database") and not Path(usage).is_dir():
        fail(f"--usage: expected rules, database, or a folder of sample images, not {usage!r}", status=2)
    effort = replace(QUICK, max_batch=min(max_batch, QUICK.max_batch)) if quick else ProfileEffort(max_batch=max_batch)
    try:
        line = load_line(config, with_profiles=False)
        samples = read_samples(images) if images is not None else rendered_samples()
    except (ConfigError, ValueError) as error:
        fail(str(error), status=2)
    if problems := device_problems(line.config, TorchDevices({}).gpu_count()):
        fail("\n".join(problems), status=2)
    wish = Wish(samples, usage, memory_bytes, effort)
    path = out or config.parent / "profile.yaml"
    with exit_on(ProfileError, UsageError, ExpertError), share_bar("starting") as (bar, task):
        tell: Progress = lambda what, share: bar.update(task, description=what, completed=share)  # noqa: E731
        measured = with_remote(config, line, wish, profile_line(line, wish, tell), tell)
        write_profile(path, measured)
    for name, reason in measured.skipped.items():
        console.print(f"{name} was not measured: {reason}; then profile again", style="yellow", markup=False)
    if as_json:
        print_json(as_figures(measured) | {"files": [str(path)]})
        return
    for figures in measured.devices:
        _print_device(figures)
    console.print(f"measured with {measured.samples}; written: {path}", markup=False)
    console.print(f"to use it: `profile: {path.name}` under the device in {config}", markup=False)


def as_figures(measured: "MeasuredProfile") -> dict[str, Any]:
    """The file's content, and what was measured on the way to it."""
    from dataclasses import asdict

    from tools.profile.run import as_document

    document = as_document(measured)
    for figures in measured.devices:
        entry = document["devices"][figures.device]
        entry["pairs"] = [
            {"executors": pair.executors, "threads": pair.threads, "images_per_s": pair.images_per_s}
            for pair in figures.pairs
        ]
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
    tried = ", ".join(f"{pair.executors} × {pair.threads}: {pair.images_per_s:.1f}" for pair in figures.pairs)
    console.print(
        f"{figures.device}: executors × threads, images/s: {tried};"
        f" kept {figures.chosen.executors} × {figures.chosen.threads}"
    )
    split, rates = figures.split, figures.split.images_per_s
    console.print(
        f"{figures.device}: {size_text(figures.expert_bytes)} for experts (the {split.experts} most used),"
        f" {size_text(figures.batches_bytes)} for batches"
    )
    console.print(
        f"{figures.device}: simulated images/s: {rates[split.experts]:.1f}; with full batches first ({split.limited}"
        f" experts) {rates[split.limited]:.1f}, with all that fit ({split.most}) {rates[split.most]:.1f}, by the"
        f" paper's rule ({split.paper.experts}) {split.paper.images_per_s:.1f}"
    )


def _short(layout: str) -> str:
    """Return the short name that people use; the file has the whole name."""
    architecture, _, size, dtype, *_ = layout.split("-")
    return f"{architecture} {size} px {dtype}"
