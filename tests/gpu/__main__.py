"""`python -m tests.gpu`: run stages, each in a process of its own, and write the page's section (`make gpu`)."""

import os
import signal
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from daemon.errors import is_device_error
from tests import ROOT
from tests.gpu.page import FigureFiles, StageFigures, Table, around_section, write_section
from tests.gpu.stages import DRY_RUN, STAGES, NoGpuError, Plan, machine_facts, must_answer

_LOST, _FAILED = 3, 1


def main(
    stages: Annotated[list[str] | None, typer.Argument(help=f"Some of {', '.join(STAGES)}; all without.")] = None,
    folder: Annotated[Path, typer.Option(help="Figures and experts; on the disk to measure.")] = ROOT / "build" / "gpu",
    page: Annotated[Path, typer.Option(help="The page with the section.")] = ROOT / "docs" / "benchmarks.md",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny, on a simulated GPU.")] = False,
    here: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure a GPU stage by stage and write the section. Exit status 1 if a stage failed, 3 if the GPU is lost."""
    plan, figures = DRY_RUN if dry_run else Plan(), FigureFiles(folder / "figures")
    if here is not None:
        raise SystemExit(measure(here, plan, folder, figures))
    names = [name for text in stages or STAGES for name in text.split()]
    if unknown := [name for name in names if name not in STAGES]:
        print(f"no stage {unknown[0]}: there are {', '.join(STAGES)}", file=sys.stderr)
        raise SystemExit(2)
    status = 0
    around_section(page)  # a page without the marks is refused before anything is measured
    for name in names:
        ended = _in_own_process(name, folder, dry_run=dry_run)
        status = max(status, ended)
        write_section(page, [each for stage in STAGES if (each := figures.read(stage)) is not None])
        if ended == _LOST:
            print(f"The figures of stages that ended are kept. Go on later: make gpu STAGES={name!r}", file=sys.stderr)
            break
    print(f"{page}: written; figures: {folder / 'figures'}")
    raise SystemExit(status)


def measure(name: str, plan: Plan, folder: Path, files: FigureFiles) -> int:
    """Run one stage in this process; return 0, or why it failed. The stage's figures are replaced if it ends."""
    began_s = time.monotonic()
    figures = StageFigures(name, f"make gpu STAGES={name}", machine_facts(plan), datetime.now(UTC).date().isoformat())

    def keep(table: Table) -> None:
        figures.tables.append(table)
        figures.seconds = round(time.monotonic() - began_s, 1)
        files.keep(figures)

    try:
        must_answer(plan.gpu)
        folder.mkdir(parents=True, exist_ok=True)
        STAGES[name].measure(plan, folder, keep)
        must_answer(plan.gpu)
    except Exception as error:  # noqa: BLE001  whatever it is, the other stages go on
        is_lost = isinstance(error, NoGpuError) or is_device_error(error)
        figures.problem = f"the GPU is lost: {error}" if is_lost else f"{type(error).__name__}: {error}"
        if figures.tables:
            files.keep(figures)
        if not is_lost:
            traceback.print_exc()
        print(f"{name}: {figures.problem}", file=sys.stderr)
        return _LOST if is_lost else _FAILED
    files.finish(name)
    print(f"{name}: {time.monotonic() - began_s:.0f} s")
    return 0


def _in_own_process(name: str, folder: Path, *, dry_run: bool) -> int:
    """Return the exit status of a stage's process, which is killed with its children at the stage's limit."""
    command = [sys.executable, "-m", "tests.gpu", "--here", name, "--folder", str(folder)]
    # So that asking for GPUs does not begin CUDA, which a process that is forked later could not use.
    environ = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    process = subprocess.Popen(command + ["--dry-run"] * dry_run, cwd=ROOT, env=environ, start_new_session=True)
    try:
        return process.wait(STAGES[name].limit_s)
    except subprocess.TimeoutExpired:
        print(f"{name}: stopped after {STAGES[name].limit_s:.0f} s", file=sys.stderr)
        return _FAILED
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    typer.run(main)
