"""`coserve bench backup`: what a backup costs the line beside which it runs."""

import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any, Self

import typer

from tools.cli.console import AsJson, console, errors, fail, print_json, print_table, quiet_start

_PROBE_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Window:
    """One stretch of time: images judged a second, and how long an image of a calm camera waited for `accepted`."""

    backup: bool
    images_per_s: float
    accept_p99_ms: float
    backups: int


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("backup")(bench_backup)


def bench_backup(
    experts: Annotated[int, typer.Option(min=1, help="Weights files of 45 MB in the line.")] = 30,
    seconds: Annotated[float, typer.Option(min=2.0, help="Length of each window.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="Windows of each kind, interleaved; the median counts.")] = 3,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="FOLDER", help="On the disk to measure; temporary files go there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Images a second of a saturated line, alone and beside backups that follow one another, in one run.

    Example: coserve bench backup --folder /var/lib/coserve
    """
    if folder is not None and not folder.is_dir():
        fail(f"no folder {folder}", status=2)
    from tools.cli.progress import Bars

    with tempfile.TemporaryDirectory(dir=folder) as scratch, Bars(console=errors) as bar:
        task = bar.add_task("making experts", total=2 * rounds)
        config = _make_line(Path(scratch) / "line", experts)
        windows: list[Window] = []
        with _Load(config) as load:
            for _ in range(rounds):
                for beside in (False, True):
                    bar.update(task, description="beside backups" if beside else "alone")
                    windows.append(load.window(seconds, beside))
                    bar.advance(task)
    alone, beside = (_row(windows, kind) for kind in (False, True))
    ratio = round(beside["images_per_s"] / alone["images_per_s"], 3)
    if as_json:
        print_json({"machine": platform.processor(), "ratio": ratio, "windows": list(map(asdict, windows))})
        return
    print_table(
        f"{experts} experts, windows of {seconds:g} s, medians of {rounds}",
        ("", "images/s", "accepted, p99 ms", "backups"),
        [(row["kind"], row["images_per_s"], row["accept_p99_ms"], row["backups"]) for row in (alone, beside)],
    )
    console.print(f"beside backups {ratio:.1%} of the images")


def _row(windows: list[Window], backup: bool) -> dict[str, Any]:
    chosen = [window for window in windows if window.backup == backup]
    return {
        "kind": "beside backups" if backup else "alone",
        "images_per_s": round(median(window.images_per_s for window in chosen), 1),
        "accept_p99_ms": round(median(window.accept_p99_ms for window in chosen), 1),
        "backups": sum(window.backups for window in chosen),
    }


def _make_line(folder: Path, experts: int) -> Path:
    """A small line with many weights files, most of which only lie there."""
    from experts.catalog import add_to_catalog
    from routing_rules.load import read_yaml
    from tests.stress.line import make_small_line

    config = make_small_line(
        folder, {"limits": {"backlog_images": 300, "source_images": 250}, "retention": {"keep": []}}
    )
    catalog = folder / "experts" / "catalog.yaml"
    name, entry = next(iter(read_yaml(catalog).data["experts"].items()))
    for number in range(experts - 3):
        copy = f"more-{number:03d}.safetensors"
        shutil.copy(folder / "experts" / entry["file"], folder / "experts" / copy)
        add_to_catalog(catalog, f"{name}-{number}", {**entry, "file": copy})
    return config


class _Load:
    """A daemon with one camera that never lets it rest and a calm one that measures."""

    def __init__(self, config: Path) -> None:
        from tests.stress.line import make_jpegs
        from tools.setup.service import Service

        self._config = config
        self._service = Service(config, config.parent / "daemon.log")
        self._images = make_jpegs(20, 20_000)
        self._stop = threading.Event()
        self._waits_s: list[float] = []
        self._threads = [threading.Thread(target=run) for run in (self._flood, self._probe)]

    def __enter__(self) -> Self:
        self._service.start()
        for thread in self._threads:
            thread.start()
        self.window(5.0, beside=False)  # experts are loaded, the backlog is full
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._service.kill()

    def window(self, seconds: float, beside: bool) -> Window:
        """Measure for `seconds`, with one backup after the other where `beside` says so."""
        before, began_s = self._completed(), time.monotonic()
        self._waits_s.clear()
        backups = 0
        while (left_s := began_s + seconds - time.monotonic()) > 0:
            if beside:
                self._back_up()
                backups += 1
            else:
                time.sleep(left_s)
        took_s = time.monotonic() - began_s
        waits_s = list(self._waits_s)
        p99_ms = quantiles(waits_s, n=100)[98] * 1000 if len(waits_s) > 1 else float("nan")
        return Window(beside, round((self._completed() - before) / took_s, 2), round(p99_ms, 2), backups)

    def _back_up(self) -> None:
        archive = self._config.parent.with_name("line.tar")
        command = [sys.executable, "-m", "tools", "backup", str(self._config), str(archive)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=quiet_start())

    def _completed(self) -> int:
        from daemon.wire.control import ask

        return ask(f"ipc://{self._config.parent}/run/control.sock", "status", timeout_s=30.0)["completed"]

    def _flood(self) -> None:
        self._publish("flood", 0.0)

    def _probe(self) -> None:
        self._publish("probe", _PROBE_EVERY_S)

    def _publish(self, source: str, every_s: float) -> None:
        from coserve_client import Publisher
        from tests.stress.line import COMPONENT, OPEN_BOARD_TYPE

        with Publisher(f"ipc://{self._config.parent}/run/intake.sock", source) as publisher:
            number = 0
            while not self._stop.wait(every_s):
                number += 1
                sent_s = time.monotonic()
                image = self._images[number % len(self._images)]
                board = {"type": OPEN_BOARD_TYPE, "serial": source}
                publisher.send(f"{source}-{number}", image, board=board, component=COMPONENT)
                if every_s:
                    publisher.finish()
                    self._waits_s.append(time.monotonic() - sent_s)
