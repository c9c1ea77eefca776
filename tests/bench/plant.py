"""`coserve bench plant`: rows lost while a broker is restarted, and the rate of a line beside a dead broker."""

import itertools
import json
import os
import platform
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tests.bench.dashboard import rates_and_ratios
from tests.bench.line import RunFigures, files_in, run_line, sockets_in
from tests.bench.rounds import run_in_turn
from tools.setup.service import Service
from tools.terminal.console import AsJson, console, errors, fail, print_json, print_table

if TYPE_CHECKING:
    from coserve_client import CameraImage
    from tests.bench.broker import Broker, Subscriber

_SEED = 21
#: While the broker is restarted: below what the line can do, so that verdicts come all the time.
_IMAGES_PER_S = 20.0
_UP_S = (1.0, 3.0)
_DOWN_S = (0.2, 2.0)
_CATCH_UP_S = 120.0
_SETTLE_S = 4.0
#: What is promised: so much of the rate without a consumer.
PROMISED = 0.97


def register(app: typer.Typer) -> None:
    """Add this module's command to `app`."""
    app.command("plant")(bench_plant)


@dataclass(frozen=True, slots=True)
class Restarts:
    """A line whose broker was restarted so often; `rows` are the results that it made meanwhile, by `seq`."""

    persistence: bool
    restarts: int
    rows: int
    lost: int
    heard: int
    missed: int
    unretained: int


def bench_plant(
    folder: Annotated[Path, typer.Option("--dir", help="The demo's folder (made if it is not there).")] = Path("demo"),
    restarts: Annotated[int, typer.Option(min=0, help="Ends of the broker, with and without persistence each.")] = 10,
    boards: Annotated[int, typer.Option(min=1, help="Boards published in each run of the rate.")] = 40,
    rounds: Annotated[int, typer.Option(min=0, help="Runs of each kind, interleaved.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Rows lost while a real mosquitto is ended again and again, and the rate beside a dead broker.

    Every second end is a SIGKILL. Status 1, with a sentence, where a row is lost, the rate beside a dead broker is
    below 0.97, or the line did not run.

    Example: coserve bench plant --dir demo
    """
    from tools.camera.rendered import rendered_images
    from tools.demo.prepare import prepare

    _require_packages()
    prepare(folder)
    images = list(rendered_images(boards, _SEED, "P", lot=None))
    config = folder / "coserve.yaml"
    runs = [
        restart_a_broker(config, images, restarts, persistence=persistence) for persistence in (False, True) if restarts
    ]
    rates = compare(config, images, rounds) if rounds else {}
    if as_json:
        machine = {"machine": platform.platform(), "cores": os.cpu_count(), "date": time.strftime("%F")}
        print_json({**machine, "restarts": [asdict(run) for run in runs], "rate": rates})
    else:
        _show(runs, rates, images)
    if broken := broken_promises(runs, rates):
        fail("; ".join(broken), status=1)


def broken_promises(runs: Sequence[Restarts], rates: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each limit that was passed."""
    broken = [
        f"{run.lost} of {run.rows} rows never came to the subscriber and the consumer counts {run.missed} as missed"
        f" ({'with' if run.persistence else 'without'} persistence)"
        for run in runs
        if run.lost or run.missed
    ]
    if rates and rates["ratio_dead"] < PROMISED:
        broken.append(f"the rate beside a dead broker is {rates['ratio_dead']:.2f} of that without, below {PROMISED}")
    return broken


def restart_a_broker(config: Path, images: "list[CameraImage]", restarts: int, *, persistence: bool) -> Restarts:
    """Run a line that judges all the time, end its broker `restarts` times, and count what its subscriber heard."""
    from coserve_client import Publisher, publish_images
    from daemon.config.settings import load_config
    from tests.bench.broker import Broker, Subscriber

    with tempfile.TemporaryDirectory(prefix="coserve-plant-") as scratch:
        broker = Broker(Path(scratch) / "broker", persistence=persistence)
        settings = _settings(scratch, broker.port)
        endpoints = load_config(config, settings).endpoints
        done = threading.Event()

        def publish() -> None:
            with Publisher(endpoints.intake[0], "bench") as publisher:
                publish_images(publisher, _repeated(images, done), rate=_IMAGES_PER_S)

        camera = threading.Thread(target=publish, name="camera")
        with broker, Subscriber(broker.port, "coserve/#") as mes, Service(config, Path(scratch) / "log", settings):
            camera.start()
            try:
                _end_and_start(broker, restarts, f"{'with' if persistence else 'without'} persistence")
            finally:
                done.set()
                camera.join()
            return _account(endpoints.control, scratch, mes, broker, persistence=persistence, restarts=restarts)


def _account(
    control: str, scratch: str, mes: "Subscriber", broker: "Broker", *, persistence: bool, restarts: int
) -> Restarts:
    """Wait until everything is judged and delivered; compare the rows with the messages of the subscriber."""
    from daemon.wire.control import ask
    from tests.bench.broker import Subscriber

    until_s = time.monotonic() + _CATCH_UP_S
    while (status := ask(control, "status"))["backlog"] or status["consumers"][0]["behind"]:
        if time.monotonic() > until_s:
            fail(f"not delivered within {_CATCH_UP_S:.0f} s: {status['consumers'][0]}", status=1)
        time.sleep(0.2)
    rows, boards = _rows(scratch)
    while rows - mes.seqs and time.monotonic() < until_s:
        time.sleep(0.2)
        until_s = min(until_s, time.monotonic() + 5.0)
    with Subscriber(broker.port, "coserve/board/#", name="late", keeps_session=False) as late:
        time.sleep(1.0)
        retained = late.seqs
    heard = sum("/status" not in message.topic for message in mes.messages)
    missed = status["consumers"][0]["missed"]
    return Restarts(persistence, restarts, len(rows), len(rows - mes.seqs), heard, missed, len(boards - retained))


def compare(config: Path, images: "list[CameraImage]", rounds: int) -> dict[str, Any]:
    """Run without a consumer, beside a dead broker and with one that listens, in turn; return medians and ratios."""
    kinds = ("without", "dead", "alive")
    runs = run_in_turn({kind: partial(_run, config, images, kind) for kind in kinds}, rounds)
    rates, ratios = rates_and_ratios(runs, "without")
    return {
        **rates,
        **{f"ratio_{kind}": round(median(own), 4) for kind, own in ratios.items()},
        "ratios": {kind: [round(ratio, 3) for ratio in own] for kind, own in ratios.items()},
        "runs": {kind: [asdict(run) for run in own] for kind, own in runs.items()},
    }


def _run(config: Path, images: "list[CameraImage]", kind: str) -> RunFigures:
    from tests.bench.broker import Broker, Subscriber
    from tests.ports import free_port

    if kind != "alive":
        return run_line(config, images, kind, _consumer(free_port()) if kind == "dead" else {}, _settled)
    with tempfile.TemporaryDirectory(prefix="coserve-broker-") as scratch:
        broker = Broker(Path(scratch))

        @contextmanager
        def listening() -> Iterator[None]:
            with Subscriber(broker.port, "coserve/#"), _settled():
                yield

        with broker:
            return run_line(config, images, kind, _consumer(broker.port), listening)


@contextmanager
def _settled() -> Iterator[None]:
    """Wait until the processes beside the line have started, which takes a second of a processor, once."""
    time.sleep(_SETTLE_S)
    yield


def _end_and_start(broker: "Broker", restarts: int, title: str) -> None:
    from tools.terminal.progress import Bars

    draw = random.Random(_SEED)
    with Bars(console=errors) as bar:
        task = bar.add_task(title, total=restarts)
        for number in range(restarts):
            time.sleep(draw.uniform(*_UP_S))
            broker.end(signal.SIGTERM if number % 2 else signal.SIGKILL)
            time.sleep(draw.uniform(*_DOWN_S))
            broker.start()
            bar.advance(task)
        time.sleep(_UP_S[1])


def _repeated(images: "list[CameraImage]", done: threading.Event) -> "Iterator[CameraImage]":
    """Yield the images until `done`, under other names each time round."""
    for number in itertools.count():
        for image in images:
            if done.is_set():
                return
            board = {**image.board, "serial": f"{image.board['serial']}-{number}"}
            yield replace(image, image_id=f"{number}/{image.image_id}", board=board)


def _consumer(port: int) -> dict[str, str]:
    return {"COSERVE_CONSUMERS": json.dumps({"plant": {"kind": "mqtt", "host": "127.0.0.1", "port": port}})}


def _settings(scratch: str, port: int) -> dict[str, str]:
    return {**files_in(scratch), **sockets_in(scratch), "COSERVE_ENDPOINTS_HTTP": "null", **_consumer(port)}


def _rows(scratch: str) -> tuple[set[int], set[int]]:
    """Return the numbers of all results, and those of the boards among them."""
    from sqlalchemy import text

    from daemon.storage.database.connections import open_for_reading

    engine = open_for_reading(f"sqlite:///{scratch}/inspection.db")
    try:
        with engine.connect() as connection:
            rows = connection.execute(text("SELECT seq, kind FROM stream WHERE kind <> 'generation'")).all()
    finally:
        engine.dispose()
    return {seq for seq, _ in rows}, {seq for seq, kind in rows if kind == "board"}


def _require_packages() -> None:
    from daemon.errors import MissingExtraError

    try:
        from tests.bench.broker import mosquitto
    except ModuleNotFoundError as missing:
        fail(str(MissingExtraError(missing.name, "this benchmark", "mqtt")), status=2)
    if mosquitto() is None:
        fail("mosquitto is not installed: make system-tools, or apt-get install mosquitto", status=2)


def _show(runs: list[Restarts], rates: dict[str, Any], images: "list[CameraImage]") -> None:
    if runs:
        rows = [
            ("kept on disk" if run.persistence else "in memory", run.restarts, run.rows, run.lost, run.heard - run.rows)
            for run in runs
        ]
        print_table(
            "A broker that is ended again and again", ("its messages", "ends", "rows", "lost", "heard again"), rows
        )
    if rates:
        rows = [(kind, rates[kind], rates.get(f"ratio_{kind}", 1.0)) for kind in ("without", "dead", "alive")]
        print_table(f"{len(images)} images in each run", ("broker", "images/s (median)", "ratio (median)"), rows)
    console.print(f"on {os.cpu_count()} cores")
