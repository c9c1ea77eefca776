"""`coserve worker`: lend this PC's devices to a line on another PC."""

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from tools.terminal.console import console, fail


def worker(
    name: Annotated[str, typer.Option(metavar="NAME", help="This PC's name: `host` of its devices in coserve.yaml.")],
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Join the cluster whose head is there.")
    ] = None,
    head: Annotated[
        bool, typer.Option("--head", help="Start a new cluster as its head, on the line's own PC.")
    ] = False,
    port: Annotated[int, typer.Option(min=1024, max=65535, help="With --head: the port where others join.")] = 6379,
    ports: Annotated[int, typer.Option(min=1024, max=65435, help="The first of 100 ports for this PC.")] = 20000,
    token: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The cluster's secret; without it anyone may join.")
    ] = None,
    cache: Annotated[Path, typer.Option(metavar="DIR", help="Where experts are kept.")] = Path(
        "~/.cache/coserve/worker"
    ),
    cache_size: Annotated[str, typer.Option(metavar="SIZE", help="The most disk space that they may take.")] = "20GB",
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Ray's sockets and logs; a short path.")] = Path(
        "/tmp/coserve-cluster"  # noqa: S108  the unit names another
    ),
) -> None:
    """Lend this PC's devices to a line on another PC: join its cluster, and stay until SIGTERM or Ctrl-C.

    Example: coserve worker --name pc2 --address 10.0.0.1:6379 --token /etc/coserve/keys/ray_token
    """
    from daemon.cluster.joining import WorkerSettings, join_command
    from daemon.config.settings import CLUSTER_ADDRESS, HOST_NAME
    from daemon.errors import MissingExtraError, StartError
    from daemon.units import parse_bytes

    if head == (address is not None):
        fail("expected either --head or --address HOST:PORT", status=2)
    if address is not None and not re.fullmatch(CLUSTER_ADDRESS, address):
        fail(f"--address: expected HOST:PORT, not {address!r}", status=2)
    if not re.fullmatch(HOST_NAME, name):
        fail(f"--name: expected a `host` of coserve.yaml (letters, digits, '.', '_', '-'), not {name!r}", status=2)
    try:
        cache_bytes = parse_bytes(cache_size)
    except ValueError as error:
        fail(f"--cache-size: {error}", status=2)
    settings = WorkerSettings(
        name, address, port, ports, token and token.absolute(), cache.expanduser().absolute(), cache_bytes,
        folder.absolute(),
    )  # fmt: skip
    try:
        command, environment = join_command(settings)
    except (StartError, MissingExtraError) as error:
        fail(str(error), status=1)
    if token is None:
        warning = "no --token: anyone who reaches this PC's ports can run programs here (docs/several-pcs.md)"
        console.print(warning, style="yellow")
    os.execve(command[0], command, environment)  # noqa: S606  Ray's own command replaces this one, and ends on SIGTERM
