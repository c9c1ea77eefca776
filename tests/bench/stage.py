"""What the live benchmarks share: experts, pictures, what this machine measured, and a process for each run."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from daemon.records import JournalKey
from daemon.storage.journal import Journal
from experts.spec import ExpertId, ExpertSpec
from tests import ROOT
from tests.bench.job import JOB, RAY, RUN, Disk, Job, Run, is_stationary
from tests.bench.measure import MACHINE, QUESTION, Machine, Question
from tests.bench.pictures import make_pictures
from tests.bench.ray_env import RayUnavailableError, make_environment
from tests.bench.stock import Recipe, make_stock, read_stock
from tests.bench.workload import Order, Trace, make_parts, make_trace
from tools.cli.console import quiet_start

_PICTURES = 120
_SEED = 17
#: What a side's process may take beside its run: imports, the initial fill, a cluster's start.
_AROUND_A_RUN_S = 240.0
#: Sides of which a part says little may take so many times the limit.
_WHOLE_TRACE = 10

Say = Callable[[str], None]


class SideError(Exception):
    """A side's process failed; the text is the end of what it said."""


def default_folder() -> Path:
    """Where experts are kept between benchmarks."""
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "coserve" / "bench"


@dataclass(frozen=True, slots=True)
class Size:
    """How large the benchmark is: the same for every side. `limit_s` is of sides that serve images as they come."""

    recipe: Recipe
    requests: int
    memory_share: float
    executors: int
    threads: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Stage:
    """`pythons` are the interpreters of sides that do not run in ours; `unavailable` are sides that cannot, and why."""

    size: Size
    scratch: Path
    catalog: Path
    specs: dict[ExpertId, ExpertSpec]
    keys: tuple[JournalKey, ...]
    machine: Machine
    pythons: dict[str, Path]
    unavailable: dict[str, str]

    @property
    def memory_bytes(self) -> int:
        """The budget of every side; never less than each executor needs for the largest expert."""
        largest = max(spec.weights_bytes for spec in self.specs.values())
        share = int(self.size.memory_share * sum(spec.weights_bytes for spec in self.specs.values()))
        return max(share, largest * self.size.executors)

    @property
    def max_batch(self) -> int:
        return max(row.max_batch for row in self.machine.rows)

    def trace(self, order: Order, requests: int | None = None, classifiers: int | None = None) -> Trace:
        """The one trace of this order; fewer classifiers where all shall fit the memory."""
        names, detectors = self.size.recipe.names()
        if classifiers is not None:
            names, detectors = names[:classifiers], detectors[:1]
        parts = make_parts(names, detectors)
        return make_trace(parts, order, requests or self.size.requests, len(self.keys) // 2, _SEED)

    def job(self, side: str, trace: Trace, disk: Disk, *, memory_bytes: int | None = None) -> Job:
        matrix = tuple(
            replace(row, disk_s=row.disk_s * self.machine.cold_bytes_per_s / self.machine.bytes_per_s(disk))
            for row in self.machine.rows
        )
        return Job(
            side=side,
            trace=trace,
            catalog=self.catalog,
            journal=self.scratch / "journal",
            keys=self.keys,
            memory_bytes=memory_bytes or self.memory_bytes,
            disk=disk,
            limit_s=self.size.limit_s * (1 if is_stationary(side) else _WHOLE_TRACE),
            scratch=self.scratch,
            executors=self.size.executors,
            threads=self.size.threads,
            max_batch=self.max_batch,
            matrix=matrix,
        )

    def run(self, job: Job) -> Run:
        """One run in its own process. Raises SideError."""
        if job.side in self.unavailable:
            raise SideError(self.unavailable[job.side])
        asked, told = self.scratch / "job.json", self.scratch / "run.json"
        asked.write_bytes(JOB.dump_json(job))
        _in_a_process(self.pythons.get(job.side), "tests.bench.side", asked, told, job.limit_s + _AROUND_A_RUN_S)
        return RUN.validate_json(told.read_bytes())


def set_stage(folder: Path, scratch: Path, size: Size, sides: tuple[str, ...], say: Say) -> Stage:
    """Make, or find, everything that runs need; measure the machine."""
    folder = folder.resolve()
    catalog = make_stock(folder, size.recipe, lambda name: say(f"making {name}"))
    pythons: dict[str, Path] = {}
    unavailable: dict[str, str] = {}
    if RAY in sides:
        say("the environment of Ray Serve")
        try:
            pythons[RAY] = make_environment(folder / "ray")
        except RayUnavailableError as error:
            unavailable[RAY] = str(error)
    say("rendering images")
    journal = Journal(scratch / "journal")
    pictures = make_pictures(_PICTURES, _SEED)
    keys = tuple(journal.append([payload for both in pictures for payload in both]))
    journal.close()
    say("measuring this machine")
    asked, told = scratch / "question.json", scratch / "machine.json"
    question = Question(catalog, scratch / "journal", keys, size.executors, size.threads)
    asked.write_bytes(QUESTION.dump_json(question))
    _in_a_process(None, "tests.bench.measure", asked, told, _AROUND_A_RUN_S)
    machine = MACHINE.validate_json(told.read_bytes())
    return Stage(size, scratch, catalog, read_stock(catalog), keys, machine, pythons, unavailable)


def _in_a_process(python: Path | None, module: str, asked: Path, told: Path, timeout_s: float) -> None:
    told.unlink(missing_ok=True)
    command = [str(python or sys.executable), "-m", module, str(asked), str(told)]
    try:
        done = subprocess.run(
            command, env=quiet_start({"PYTHONPATH": str(ROOT)}), capture_output=True, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SideError(f"did not end within {timeout_s:.0f} s") from error
    if done.returncode or not told.is_file():
        raise SideError((done.stderr.strip() or f"exit status {done.returncode}")[-800:])
