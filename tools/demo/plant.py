"""`coserve plant demo`: three lines of rendered boards, their hub and its PostgreSQL on this PC, until Ctrl-C."""

import itertools
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from coserve_client import CoserveError, Publisher, publish_images
from daemon.config.settings import load_config
from daemon.storage.database.reviews import WaitingFilter
from tools.camera.render import render_board
from tools.camera.render.images import FIRST_SEED, images_of, new_prefix
from tools.demo.line import make_line
from tools.query.review import decide, waiting_images
from tools.setup.service import Service, ServiceError
from tools.terminal.console import CommandError, as_typed, console

#: The share of parts with a defect on each line.
DEFECT_RATES = {"line-1": 0.0, "line-2": 0.01, "line-3": 0.03}
#: Every fourth board goes through all lines; no pause before the first four.
_PRODUCT, _SHARED_EVERY, _AT_ONCE, _PAUSE_S = "sensor-node", 4, 4, 5.0
#: Lot of the boards that go through all lines. The demo knows their truth and reviews only these.
_SHARED = "all-lines"


def run_plant_demo(folder: Path, port: int) -> None:
    """Run the demo until KeyboardInterrupt. Raises CommandError."""
    with ExitStack() as stack:
        try:
            _run_boards(_start(stack, folder, port), port)
        except (ServiceError, CoserveError) as error:
            raise CommandError(str(error)) from None
        except KeyboardInterrupt:
            console.print(f"Stopping. The next start goes on with what {folder} has.")


def _start(stack: ExitStack, folder: Path, port: int) -> dict[Path, Publisher]:
    """Start the database, the hub and the lines, which `stack` stops in reverse; return cameras by configuration."""
    hub: dict[str, Any] = {"database": stack.enter_context(postgresql(folder / "postgresql"))}
    hub["http"] = f"http://127.0.0.1:{port}"
    hub["lines"] = {name: {"key": _make_line(folder, name)} for name in DEFECT_RATES}
    config, log = _write(folder / "plant.yaml", hub), folder / "hub.log"
    stack.enter_context(Service(config, log, command=("tools", "plant", "run"), ready="coserve plant: ready"))
    console.print(f"hub: {hub['http']}/ (lines side by side; Boards, Defects)")
    cameras: dict[Path, Publisher] = {}
    for number, (name, rate) in enumerate(DEFECT_RATES.items(), 1):
        http = f"http://127.0.0.1:{port + number}"
        config = _write(folder / name / "coserve.yaml", _line(name, hub, http))
        stack.enter_context(Service(config, folder / f"{name}.log"))
        cameras[config] = stack.enter_context(Publisher(load_config(config).endpoints.intake[0], "demo-camera"))
        console.print(f"{name}: {http}/ ({rate:.0%} of its parts are rendered with a defect)")
    console.print("Decide about a picture on a line's Review (p: pass, f: fail), and see its board at the hub. Or ask:")
    console.print(f"  {as_typed(f'results --plant {folder}/plant.yaml --verdict fail')}\nCtrl-C ends everything.")
    return cameras


def _make_line(folder: Path, name: str) -> str:
    """Make a line's experts, rules and key; return the key's file name."""
    key = folder / f"{name}.key"
    make_line(folder / name)
    key.touch(mode=0o600)
    key.write_text(key.read_text("ascii") or secrets.token_hex(32), encoding="ascii")
    return key.name


def _line(name: str, hub: dict[str, Any], http: str) -> dict[str, Any]:
    """Return the demo's coserve.yaml with the line's own sockets, one executor and the hub."""
    line: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("coserve.yaml").read_text(encoding="utf-8"))
    sockets = {socket: f"ipc://run/{socket}.sock" for socket in ("results", "control")}
    line["endpoints"] = {"intake": ["ipc://run/intake.sock"], **sockets, "http": http}
    line["devices"]["cpu"] |= {"expert_memory": "80MB", "executors": 1}
    consumer = {"kind": "plant", "database": hub["database"], "hub": hub["http"]}
    return line | {"line": name, "consumers": {"hub": {**consumer, "key": f"../{name}.key", "pictures": "failed"}}}


def _write(path: Path, document: dict[str, Any]) -> Path:
    path.write_text("# Written at each start of the demo.\n" + yaml.safe_dump(document, sort_keys=False), "utf-8")
    return path


def _run_boards(cameras: dict[Path, Publisher], port: int) -> None:
    """Send boards through the lines without end, and review those that go through all of them."""
    run, truths = new_prefix(), dict[tuple[Path, str], dict[str, str]]()
    seeds = itertools.count(FIRST_SEED + int(run[1:], 16) * 10_000)
    for number in itertools.count(1):
        is_shared, serial = number % _SHARED_EVERY == 1, f"{run}-{number:03d}"
        for (config, camera), (name, rate) in zip(cameras.items(), DEFECT_RATES.items(), strict=True):
            board, own = render_board(_PRODUCT, next(seeds), rate), serial if is_shared else f"{serial}-{name}"
            publish_images(camera, images_of(board, own, _SHARED if is_shared else run))
            if is_shared:
                truths[config, own] = {part.designator: part.truth for part in board.placements}
            settings = load_config(config)
            for image in waiting_images(settings, 100, WaitingFilter(lot=_SHARED)):
                if truth := truths.get((config, image["serial"])):
                    verdict = "pass" if truth[image["designator"]] == "ok" else "fail"
                    about = {"inspection_id": image["inspection_id"], "verdict": verdict, "reviewer": "demo"}
                    with suppress(CommandError):  # a person was faster, or the line is too busy: next time
                        decide(config, settings, about)
        if is_shared:
            console.print(f"{serial} goes through all lines: http://127.0.0.1:{port}/serial/{_PRODUCT}/{serial}")
        time.sleep(_PAUSE_S if number > _AT_ONCE else 0.0)


@contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """Run a server over `folder`, which the first run makes; yield its database's address. Raises CommandError."""
    servers = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if int(path.parent.name) >= 15]
    if not servers:
        raise CommandError("there is no PostgreSQL 15 or newer: make system-tools installs it")
    programs, folder = max(servers, key=lambda path: int(path.parent.name)), folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    options: dict[str, Any] = {"cwd": "/", "start_new_session": True}  # a terminal's Ctrl-C must not reach it
    if os.geteuid() == 0:  # the server refuses root, and Debian's package brings this user
        shutil.chown(folder, "postgres", "postgres")
        options |= {"user": "postgres", "group": "postgres", "extra_groups": ()}
    data, log = folder / "data", folder / "server.log"
    if not data.exists():
        command = [programs / "initdb", "-D", data, "--username=coserve", "--auth=trust", "--encoding=UTF8"]
        initdb = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # noqa: S603
        if initdb.returncode:
            raise CommandError(f"PostgreSQL cannot use {folder} (--dir names another place): {initdb.stderr.strip()}")
    command = [programs / "postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "shared_buffers=32MB"]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, **options)  # noqa: S603
    try:
        while subprocess.run([programs / "pg_isready", "-q", "-U", "coserve", "-h", folder], check=False).returncode:  # noqa: S603
            if server.poll() is not None:
                raise CommandError(f"PostgreSQL did not start: {log.read_text(errors='replace')[-800:].strip()}")
            time.sleep(0.1)
        yield f"postgresql://coserve@/postgres?host={quote(str(folder), safe='')}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
