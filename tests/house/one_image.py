"""What an image crosses from its arrival at the intake's socket to its published row: files, threads, values."""

import logging
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from coserve_client import Publisher, Results
from daemon.app import App
from daemon.line.line import load_line
from tests import ROOT
from tests.lines import a_jpeg, a_line
from tests.simulated import SimulatedDevices, answer, make_experts

_IMAGES = 20
_WARM_IMAGES = 3
_PATIENCE_S = 30.0
_FOLDERS = ("daemon/", "experts/", "routing_rules/")
#: Kinds that are a part of `Image`.
_PARTS = ("BoardRef", "JournalKey", "Pixels")
_ROOMS = ("daemon.", "experts.", "routing_rules.")


@dataclass(frozen=True)
class Crossing:
    """What runs or is made at least once an image, in the order of first calls.

    `cells` are a thread and a file with a function that is called so often there; `kinds` are dataclasses and named
    tuples.
    """

    cells: list[tuple[str, str]]
    kinds: list[str]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for _, file in self.cells))

    @property
    def threads(self) -> list[str]:
        return list(dict.fromkeys(thread for thread, _ in self.cells))


def crossing() -> Crossing:
    """Serve images on a line with simulated devices, and count calls by thread and file.

    Not counted: the pure decisions of daemon/policy, which see no image; what only runs once for several images; and
    what stands behind the devices (a simulated device stands for torch's).
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    calls: Counter[tuple[str, str, str]] = Counter()
    made: Counter[str] = Counter()
    prefix = f"{ROOT}/"
    is_counting = threading.Event()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or not is_counting.is_set():
            return
        file = frame.f_code.co_filename
        if file.startswith(prefix):
            thread = threading.current_thread().name.partition(" ")[0]  # all executors count as one
            if calls or thread == "intake":  # where an image arrives
                calls[thread, file.removeprefix(prefix), frame.f_code.co_qualname] += 1
        elif file.startswith("<string>"):  # the methods that dataclasses and named tuples generate
            kind = frame.f_locals.get("_cls") or type(frame.f_locals.get("self"))
            if frame.f_code.co_name in ("__init__", "<lambda>") and kind.__module__.startswith(_ROOMS):
                made[kind.__name__] += 1

    threading.setprofile(note)
    try:
        with tempfile.TemporaryDirectory() as folder:
            _serve(Path(folder), is_counting)
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert "torch" not in sys.modules, "a line on simulated devices imported torch"
    cells = dict.fromkeys(
        (thread, file)
        for (thread, file, function), count in calls.items()
        if count >= _IMAGES and file.startswith(_FOLDERS) and not function.endswith(("comp>", "genexpr>"))
    )
    kinds = [kind for kind, count in made.items() if count >= _IMAGES and kind not in _PARTS]
    return Crossing([cell for cell in cells if not cell[1].startswith("daemon/policy/")], kinds)


def _serve(folder: Path, is_counting: threading.Event) -> None:
    (folder / "made").mkdir()
    make_experts(folder / "made")
    config = a_line(folder / "line", folder / "made")
    run = folder / "line" / "run"
    app = App(load_line(config), config, devices=SimulatedDevices(answer))
    app.start()
    try:
        intake = f"ipc://{run}/intake.sock"
        with (
            Publisher(intake, source="camera") as publisher,
            Results(f"ipc://{run}/results.sock", intake, since=0) as results,
        ):
            _judge(publisher, results, range(_WARM_IMAGES))
            is_counting.set()
            _judge(publisher, results, range(_WARM_IMAGES, _WARM_IMAGES + _IMAGES))
            is_counting.clear()
    finally:
        app.stop()


def _judge(publisher: Publisher, results: Results, numbers: range) -> None:
    """Publish images, and wait for the results of all."""
    board = {"type": "open-board", "serial": "S0", "lot": "L"}
    for number in numbers:
        publisher.send(f"image-{number}", a_jpeg(number), board=board, component="R0402", designator=f"R{number}")
    publisher.finish()
    missing = len(numbers)
    while missing:
        result = results.take(_PATIENCE_S)
        if result is None:
            raise TimeoutError(f"{missing} of {len(numbers)} results did not come within {_PATIENCE_S:g} s")
        missing -= result["kind"] == "inspection"
