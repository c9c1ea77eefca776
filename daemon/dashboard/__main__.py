"""`python -m daemon.dashboard CONFIG`: the web pages of a line, as a process of their own beside its daemon.

The daemon starts it, with the listening socket as `--fd` and its `--heart`. By hand, for whoever works on the pages, it
binds `endpoints.http` itself; the daemon is asked over its control socket, and need not run.
"""

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

from daemon.config.settings import load_config
from daemon.dashboard.app import make_app
from daemon.dashboard.site.access import Keyring
from daemon.dashboard.site.database import NoDatabase
from daemon.dashboard.site.server import Server
from daemon.dashboard.site.site import make_site
from daemon.errors import ConfigError, StartError
from daemon.host.children import live_with_parent
from daemon.host.logs import configure_logs
from daemon.monitor.http_server import bind_http
from daemon.wire.http_token import TokenError


def main() -> int:
    """0 after SIGTERM; 2, and one line on stderr, where it could not start."""
    parser = argparse.ArgumentParser(prog="python -m daemon.dashboard", description="The web pages of a line.")
    parser.add_argument("config", type=Path, help="the line's coserve.yaml")
    parser.add_argument("--fd", type=int, help="a listening socket that is open already")
    parser.add_argument("--heart", type=int, metavar="FD", help="where the daemon hears that it does not hang")
    arguments = parser.parse_args()
    live_with_parent()
    configure_logs(os.environ, sys.stderr)
    try:
        serve(arguments.config, arguments.fd, arguments.heart)
    except (ConfigError, NoDatabase, StartError, TokenError) as error:
        print(f"coserve dashboard: cannot start: {error}", file=sys.stderr)
        return 2
    return 0


def serve(path: Path, fd: int | None, heart: int | None) -> None:
    """Until SIGTERM. SIGHUP reads the token again."""
    config = load_config(path)
    keyring = Keyring(config.security.http_token)
    if fd is not None:
        listener = socket.socket(fileno=fd)
    elif config.endpoints.http is not None:
        listener = bind_http(config.endpoints.http, has_token=not keyring.is_open)
        print(f"coserve dashboard: {config.endpoints.http}", flush=True)
    else:
        raise StartError(f"{path}: endpoints.http is not set: for example http://127.0.0.1:9470")
    site = make_site(config)
    signal.signal(signal.SIGHUP, lambda *_: keyring.reload())
    # uvicorn's own handler takes this one's place, and raises the signal again at its end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Server(make_app(site, keyring, heart), site.live).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main())
