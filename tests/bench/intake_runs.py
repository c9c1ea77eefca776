"""Runs of the intake benchmark: floods and steady rates against a real daemon, each beside the raw disk."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

from daemon.storage.journal import GROUP_BYTES, GROUP_IMAGES
from daemon.wire.control import ask
from tests.bench.intake_camera import CameraAnswers, Order
from tests.bench.intake_line import a_jpeg_of, make_line
from tests.bench.line import files_in
from tests.bench.raw_disk import Loop
from tests.bench.rounds import ratios, run_in_turn
from tools.setup.service import Service
from tools.terminal.console import quiet_start

_WARM_S = 0.7
_POLL_S = 0.05
_DAEMON = {"idle": ("tests.bench.intake_line",), "saturated": ("tools", "run")}


class BenchError(Exception):
    """A part of the benchmark did not do what it should; the text has the end of its output."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`seconds` of each measurement, `rounds` of each; `rate` is that of the open loop."""

    folder: Path
    sizes: Sequence[int]
    seconds: float
    rounds: int
    rate: float
    executors: int

    @staticmethod
    def group(size: int) -> int:
        """Return the images of a raw group: as many as the daemon's may have."""
        return max(1, min(GROUP_IMAGES, GROUP_BYTES // size))


@dataclass(frozen=True, slots=True)
class Flood:
    """Images per second, medians: the daemon's, and the raw disk's in the same rounds without and with rows.

    `share` and `share_with_rows` are medians of each round's own ratio.
    """

    image_bytes: int
    disk: str
    accepted_per_s: float
    raw_per_s: float
    raw_with_rows_per_s: float
    share: float
    share_with_rows: float


@dataclass(frozen=True, slots=True)
class Steady:
    """An open loop at `rate`: images accepted per second, their waits in ms, and inference beside it."""

    image_bytes: int
    beside: Literal["idle", "saturated"]
    accepted_per_s: float
    p50_ms: float
    p99_ms: float
    inference_per_s: float | None = None
    inference_alone_per_s: float | None = None
    inference_kept: float | None = None


class Bench:
    """One folder, one line; each run has a daemon, a database and a journal of its own."""

    def __init__(self, plan: Plan, advance: Callable[[str], None] = lambda _what: None) -> None:
        self._plan = plan
        self._advance = advance
        self._config = make_line(plan.folder, executors=plan.executors)
        self._runs = 0
        for size in plan.sizes:
            Path(self._image(size)).write_bytes(a_jpeg_of(size))

    def flood(self, size: int, disk: str, faults: Mapping[str, str]) -> Flood:
        """Send as many images as the daemon takes, in turn with the raw loops; `faults`: the environment of all."""

        def daemon() -> float:
            self._advance(f"{size // 1000} KB, {disk}")
            with self._daemon("idle", faults) as endpoint:
                answers = Camera(Order(endpoint, "flood", self._image(size), self._plan.seconds, _WARM_S)).answers()
            return answers.accepted / answers.seconds

        sides = {
            "daemon": daemon,
            "raw": lambda: self._raw(size, rows=False, environ=faults),
            "raw with rows": lambda: self._raw(size, rows=True, environ=faults),
        }
        runs = run_in_turn(sides, self._plan.rounds, on_run=lambda _side: None)
        return Flood(
            size,
            disk,
            *(round(median(rates), 1) for rates in runs.values()),
            share=round(median(ratios(runs["daemon"], runs["raw"])), 3),
            share_with_rows=round(median(ratios(runs["daemon"], runs["raw with rows"])), 3),
        )

    def steady_idle(self, size: int) -> Steady:
        """Run the open loop against a daemon that has nothing else to do."""
        latency_ms: list[float] = []
        rates: list[float] = []
        for _ in range(self._plan.rounds):
            self._advance(f"{size // 1000} KB at {self._plan.rate:g} a second, idle")
            with self._daemon("idle", {}) as endpoint:
                answers = Camera(self._steady_order(endpoint, size)).answers()
            latency_ms += answers.latency_ms
            rates.append(answers.accepted / answers.seconds)
        return Steady(size, "idle", round(median(rates), 1), *_p50_p99(latency_ms))

    def steady_saturated(self, size: int) -> Steady:
        """Run the open loop beside executors that always have full batches, in turn with the same executors alone."""
        latency_ms: list[float] = []
        rates: list[float] = []
        with self._daemon("saturated", {}) as endpoint:
            order = self._steady_order(endpoint, size)
            self._advance(f"{size // 1000} KB: a backlog for the executors")
            self._fill(endpoint, size)

            def with_camera() -> float:
                self._advance(f"{size // 1000} KB at {self._plan.rate:g} a second, saturated")
                camera = Camera(order)
                time.sleep(_WARM_S)
                completed_per_s = self._completed_per_s(self._plan.seconds)
                answers = camera.answers()
                latency_ms.extend(answers.latency_ms)
                rates.append(answers.accepted / answers.seconds)
                return completed_per_s

            sides = {"alone": lambda: self._completed_per_s(self._plan.seconds), "beside": with_camera}
            runs = run_in_turn(sides, self._plan.rounds, on_run=lambda _side: None)
            if self._status()["backlog"] == 0:
                raise BenchError("the executors ran out of images: the backlog was too small for this machine")
        share = median(ratios(runs["beside"], runs["alone"]))
        inference = (round(median(runs["beside"]), 1), round(median(runs["alone"]), 1), round(share, 3))
        return Steady(size, "saturated", round(median(rates), 1), *_p50_p99(latency_ms), *inference)

    def _steady_order(self, endpoint: str, size: int) -> Order:
        return Order(endpoint, "steady", self._image(size), self._plan.seconds, _WARM_S, self._plan.rate)

    def _fill(self, endpoint: str, size: int) -> None:
        """Queue so many images that the executors will not run out: their speed is measured on the first of them."""
        order = Order(endpoint, "backlog", self._image(size), images=500)
        Camera(order).answers()
        per_s = self._completed_per_s(self._plan.seconds)
        windows_s = (self._plan.rounds + 2) * (2 * self._plan.seconds + 4 * _WARM_S)
        Camera(replace(order, images=int(max(per_s, 50.0) * windows_s))).answers()
        time.sleep(self._plan.seconds)

    def _completed_per_s(self, seconds: float) -> float:
        """Return the images judged per second in the next `seconds`, or until the first of them is."""
        before, began_s = self._status()["completed"], time.perf_counter()
        time.sleep(seconds)
        while (now := self._status())["completed"] == before and now["backlog"]:
            time.sleep(_POLL_S)
        return (now["completed"] - before) / (time.perf_counter() - began_s)

    def _status(self) -> dict[str, Any]:
        return ask(f"ipc://{self._plan.folder}/run/control.sock", "status")

    def _image(self, size: int) -> str:
        return f"{self._plan.folder}/{size}.jpg"

    def _raw(self, size: int, *, rows: bool, environ: Mapping[str, str]) -> float:
        loop = Loop(str(self._plan.folder), size, self._plan.group(size), self._plan.seconds, rows)
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.raw_disk"],
            input=json.dumps(asdict(loop)),
            capture_output=True,
            text=True,
            check=False,
            env=quiet_start(dict(environ)),
        )
        if done.returncode:
            raise BenchError(f"the raw loop ended with status {done.returncode}: {done.stderr[-500:]}")
        return float(done.stdout)

    @contextmanager
    def _daemon(self, kind: Literal["idle", "saturated"], faults: Mapping[str, str]) -> Iterator[str]:
        """Run a fresh daemon; yield its intake endpoint."""
        folder = self._plan.folder
        self._runs += 1
        run = folder / f"run-{self._runs}"
        try:
            with Service(self._config, folder / "daemon.log", {**files_in(run), **faults}, command=_DAEMON[kind]):
                yield f"ipc://{folder}/run/intake.sock"
        finally:
            shutil.rmtree(run, ignore_errors=True)


class Camera:
    """A camera process, connected; `answers` waits for its end."""

    def __init__(self, order: Order) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.intake_camera"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=quiet_start(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(order)))
        self._process.stdin.close()
        self._process.stdin = None
        self._process.stdout.readline()

    def answers(self) -> CameraAnswers:
        output, errors = self._process.communicate()
        if self._process.returncode:
            raise BenchError(f"a camera ended with status {self._process.returncode}: {errors[-500:]}")
        answers = CameraAnswers(**json.loads(output))
        if answers.refusals or not answers.accepted:
            raise BenchError(f"not every image was accepted: {answers.refusals or 'none was'}")
        return answers


def _p50_p99(latency_ms: list[float]) -> tuple[float, float]:
    cuts = quantiles(latency_ms, n=100)
    return round(cuts[49], 2), round(cuts[98], 2)
