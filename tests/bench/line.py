"""`coserve bench line`: the demo line under each policy, real daemon and real sockets, interleaved runs, the ratio."""

import json
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tests.bench.options import chosen_devices
from tests.bench.rounds import run_in_turn, spread
from tests.bench.tables import print_rows
from tools.terminal.console import AsJson, fail, print_json
from tools.terminal.option_values import must_be_policies

if TYPE_CHECKING:
    from coserve_client import CameraImage

_SEED = 11


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run. `images_per_s` counts from the first image sent to the last verdict durable."""

    policy: str
    images: int
    images_per_s: float
    expert_switches: int
    unknown: int


def bench_line(
    folder: Annotated[Path, typer.Option("--dir", help="The demo's folder (made if it is not there).")] = Path("demo"),
    boards: Annotated[int, typer.Option(min=1, help="Boards published in each run.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each policy, interleaved; the median counts.")] = 3,
    policies: Annotated[list[str] | None, typer.Option("--policy", help="Policies to compare (repeat).")] = None,
    device: Annotated[list[str] | None, typer.Option(help="cpu, cuda:0; repeat. Default: the configuration's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Images per second of the demo line under each policy, real daemons and cameras, in one command.

    With `--device`, each of these devices gets the demo's memory for experts and its executors.

    Example: coserve bench line --dir demo
    """
    from tools.camera.render.images import rendered_images
    from tools.demo.line import make_line

    names = policies or ["samba", "coserve-plus"]
    must_be_policies(names)
    make_line(folder)
    images = list(rendered_images(boards, _SEED, "B", lot=None))
    config = folder / "coserve.yaml"
    environ = {} if device is None else on_devices(config, chosen_devices(device))
    runs = run_in_turn(
        {name: lambda name=name: run_line(config, images, name, {"COSERVE_POLICY": name} | environ) for name in names},
        rounds,
    )
    rates = {name: spread([run.images_per_s for run in own]) for name, own in runs.items()}
    rows = [
        {
            "policy": name,
            "images_per_s": round(rates[name].median, 2),
            "expert_switches": int(spread([run.expert_switches for run in own]).median),
            "ratio": round(rates[name].median / rates[names[0]].median, 2),
            "runs": [asdict(run) for run in own],
        }
        for name, own in runs.items()
    ]
    if as_json:
        print_json({"machine": platform.platform(), "cores": os.cpu_count(), "images": len(images), "policies": rows})
        return
    title = f"{len(images)} images of {boards} boards, in board order, {rounds} rounds; ratio to {names[0]}"
    print_rows(title, [row | {"images_per_s": rates[row["policy"]].text(1), "runs": len(row["runs"])} for row in rows])


def on_devices(config: Path, devices: Sequence[str]) -> dict[str, str]:
    """Return the environment that gives each device the settings of the first one in `config`."""
    from daemon.config.settings import load_config

    first = next(iter(load_config(config, {}).devices.values())).model_dump(mode="json", exclude_unset=True)
    return {"COSERVE_DEVICES": json.dumps(dict.fromkeys(devices, first))}


def files_in(folder: Path | str) -> dict[str, str]:
    """Return overrides that put results, journal and images of a daemon into `folder`."""
    return {
        "COSERVE_DATABASE": f"sqlite:///{folder}/inspection.db",
        "COSERVE_JOURNAL": f"{folder}/journal",
        "COSERVE_IMAGES": f"{folder}/images",
    }


def run_line(config: Path, images: "Sequence[CameraImage]", name: str, environ: Mapping[str, str]) -> RunFigures:
    """Publish all images as fast as a fresh daemon with a fresh database takes them."""
    from coserve_client import Publisher, publish_images
    from daemon.config.settings import load_config
    from daemon.wire.control import ask
    from tools.setup.service import Service, ServiceError

    with tempfile.TemporaryDirectory(prefix="coserve-bench-") as scratch:
        settings = {
            **files_in(scratch),
            "COSERVE_ENDPOINTS_INTAKE": f"[ipc://{scratch}/intake.sock]",
            "COSERVE_ENDPOINTS_RESULTS": f"ipc://{scratch}/results.sock",
            "COSERVE_ENDPOINTS_CONTROL": f"ipc://{scratch}/control.sock",
            "COSERVE_ENDPOINTS_HTTP": "null",
            **environ,
        }
        endpoints = load_config(config, settings).endpoints
        try:
            with Service(config, Path(scratch) / "daemon.log", settings) as service:
                began_s = time.monotonic()
                with Publisher(endpoints.intake[0], "bench") as publisher:
                    account = publish_images(publisher, images)
                while (status := ask(endpoints.control, "status"))["backlog"] > 0:
                    time.sleep(0.05)
                seconds = time.monotonic() - began_s
                if not account.complete:
                    fail(f"{name}: {account.as_dict()}; see the log:\n{service.tail()}", status=1)
        except ServiceError as error:
            fail(f"{name}: {error}", status=1)
        with closing(sqlite3.connect(f"file:{scratch}/inspection.db?mode=ro", uri=True)) as database:
            (unknown,) = database.execute("SELECT count(*) FROM inspections WHERE verdict = 'unknown'").fetchone()
    return RunFigures(name, len(images), len(images) / seconds, status["expert_switches"], unknown)
