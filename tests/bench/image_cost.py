"""`coserve bench image-cost`: the daemon's processor time for one accepted and judged image, thread by thread.

`python -m tests.bench.image_cost CONFIG` runs a daemon whose experts answer at once, on simulated devices, and writes
the names of its threads beside the configuration, because the kernel knows their numbers alone.
"""

import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from tests.bench.rounds import run_in_turn
from tests.bench.tables import print_rows
from tools.terminal.console import AsJson, fail, print_json

_IMAGE_BYTES = 20_000
_WARM_S = 1.5
_THREADS = "threads.json"


@dataclass(frozen=True, slots=True)
class ImageCost:
    """Processor milliseconds an image, of the daemon and of each of its threads; `rate` 0 is as many as are taken."""

    rate: float
    judged_per_s: float
    total_ms: float
    threads_ms: dict[str, float]


def bench_image_cost(
    rate: Annotated[
        list[float] | None, typer.Option(min=0, help="Images a second, 0: as many as taken; repeat. [300 and 0]")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of each measurement.")] = 6.0,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each rate, interleaved; the median counts.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the processor time of intake, journal, rows, verdict and publication of one image, in all threads.

    Images of 20 KB whose 8 x 8 pixels cost nothing to decode; experts that answer at once. Exit status 1 if it could
    not be measured.

    Example: coserve bench image-cost --rounds 1
    """
    from tests.bench.intake_runs import BenchError
    from tools.setup.service import ServiceError

    asked = [300.0, 0.0] if rate is None else rate
    try:
        with tempfile.TemporaryDirectory(prefix="coserve-cost-") as scratch:
            runs = run_in_turn(
                {f"{each:g} a second": partial(_measure, Path(scratch), each, seconds) for each in asked}, rounds
            )
    except (BenchError, ServiceError, OSError) as error:
        fail(f"could not measure: {error}", status=1)
    costs = [_middle(of_rate) for of_rate in runs.values()]
    if as_json:
        print_json({"cores": os.cpu_count(), "rounds": rounds, "costs": [asdict(cost) for cost in costs]})
        return
    names = sorted(
        {name for cost in costs for name in cost.threads_ms}, key=lambda name: -costs[0].threads_ms.get(name, 0.0)
    )
    shown = {
        f"{cost.rate:g} a second" if cost.rate else "as many as taken": {
            "judged a second": cost.judged_per_s,
            "all threads": cost.total_ms,
            **{name: cost.threads_ms.get(name, 0.0) for name in names},
        }
        for cost in costs
    }
    rows = [{"": name} | {rate: own[name] for rate, own in shown.items()} for name in next(iter(shown.values()))]
    print_rows(f"Processor milliseconds of one image, medians of {rounds} rounds; {os.cpu_count()} cores", rows)


def _middle(runs: list[ImageCost]) -> ImageCost:
    threads = {
        name: round(median(run.threads_ms.get(name, 0.0) for run in runs), 3)
        for name in {name for run in runs for name in run.threads_ms}
    }
    middle = sorted(runs, key=lambda run: run.total_ms)[len(runs) // 2]
    return ImageCost(middle.rate, middle.judged_per_s, middle.total_ms, threads)


def _measure(scratch: Path, rate: float, seconds: float) -> ImageCost:
    from daemon.wire.control import ask
    from tests.bench.intake_camera import Order
    from tests.bench.intake_line import a_jpeg_of, make_line
    from tests.bench.intake_runs import Camera
    from tests.simulated import make_experts
    from tools.setup.service import Service

    folder = Path(tempfile.mkdtemp(dir=scratch))
    config = make_line(folder, executors=1, make=make_experts, expert="R0402")
    image = folder / "image.jpg"
    image.write_bytes(a_jpeg_of(_IMAGE_BYTES, side=8))
    with Service(config, folder / "daemon.log", command=("tests.bench.image_cost",)) as service:
        assert service.process is not None
        pid = service.process.pid
        endpoint, control = f"ipc://{folder}/run/intake.sock", f"ipc://{folder}/run/control.sock"
        camera = Camera(Order(endpoint, "camera", str(image), seconds + _WARM_S, 0.0, rate or None))
        time.sleep(_WARM_S)
        before, judged, began_s = _seconds_of_threads(pid), ask(control, "status")["completed"], time.monotonic()
        time.sleep(seconds - 0.5)
        after, judged = _seconds_of_threads(pid), ask(control, "status")["completed"] - judged
        took_s = time.monotonic() - began_s
        camera.answers()
        names = {int(number): name for number, name in json.loads((folder / _THREADS).read_text()).items()}
    spent_s: defaultdict[str, float] = defaultdict(float)
    for number, thread_s in after.items():
        spent_s[names.get(number, "libzmq")] += thread_s - before.get(number, 0.0)
    threads_ms = {name: round(1000 * thread_s / judged, 3) for name, thread_s in spent_s.items() if thread_s > 0}
    return ImageCost(rate, round(judged / took_s, 1), round(1000 * sum(spent_s.values()) / judged, 3), threads_ms)


def _seconds_of_threads(pid: int) -> dict[int, float]:
    """Return the processor seconds of each thread of `pid`, from the scheduler's count in nanoseconds."""
    spent_s: dict[int, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            spent_s[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):  # it ended
            continue
    return spent_s


def _run(config: Path) -> int:
    from daemon.serve import serve
    from experts.spec import Answer
    from tests.simulated import SimulatedDevices

    def name_threads() -> None:
        while True:
            names = {thread.native_id: thread.name for thread in threading.enumerate()}
            new = config.with_name(_THREADS + ".new")
            new.write_text(json.dumps(names))
            new.replace(config.with_name(_THREADS))
            time.sleep(1.0)

    threading.Thread(target=name_threads, name="names", daemon=True).start()
    return serve(config, SimulatedDevices(lambda spec, _image: Answer(spec.classes[0], 0.9)))


if __name__ == "__main__":
    sys.exit(_run(Path(sys.argv[1])))
