"""`python -m daemon.dashboard CONFIG`: the web pages of a line, as a process beside its daemon.

Started by hand it binds `endpoints.http` itself, and the daemon need not run.
"""

import argparse
import signal
import socket
import sys
from pathlib import Path

from daemon.config.settings import load_config
from daemon.dashboard.app import make_app
from daemon.dashboard.site.access import Keyring
from daemon.dashboard.site.server import PageServer
from daemon.dashboard.site.site import Site
from daemon.errors import ConfigError, StartError
from daemon.host.children import live_with_parent
from daemon.host.logs import configure_logs
from daemon.units import printable
from daemon.wire.keys import CredentialError
from daemon.wire.sockets import bind_http


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m daemon.dashboard", description="The web pages of a line.")
    parser.add_argument("config", type=Path, help="the line's coserve.yaml")
    parser.add_argument("--fd", type=int, help="file descriptor of an open listening socket")
    parser.add_argument("--heart", type=int, metavar="FD", help="eventfd for the heartbeat to the daemon")
    arguments = parser.parse_args()
    live_with_parent()
    configure_logs(sys.stderr)
    try:
        serve(arguments.config, arguments.fd, arguments.heart)
    except (ConfigError, StartError, CredentialError) as error:
        print(f"coserve dashboard: cannot start: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


def serve(path: Path, fd: int | None, heart: int | None) -> None:
    config = load_config(path)
    keyring = Keyring(config.security.http_token, config.logged_out)
    if fd is not None:
        listener = socket.socket(fileno=fd)
    elif config.endpoints.http is not None:
        listener = bind_http(config.endpoints.http, has_token=not keyring.is_open)
        print(f"coserve dashboard: {config.endpoints.http}", flush=True)
    else:
        raise StartError(f"{path}: endpoints.http is not set: for example http://127.0.0.1:9470")
    site = Site(config)
    signal.signal(signal.SIGHUP, lambda *_: keyring.reload())
    # uvicorn replaces this handler while it serves, and raises the signal again when it has stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    PageServer(make_app(site, keyring, heart), site.live).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
