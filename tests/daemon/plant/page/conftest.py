"""A running hub over a real PostgreSQL with three lines of rows."""

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from sqlalchemy import Engine

from tests.daemon.dashboard.browser import browser, open_page
from tests.daemon.plant.page.plant_rows import PlantRows, a_plant_file, filled, some_weeks, utc_now
from tests.daemon.storage.database.postgresql_server import Server
from tests.ports import free_port
from tests.waiting import PATIENCE_S, until

__all__ = ["browser", "open_page"]


@dataclass
class ShownHub:
    """A hub's process and its database."""

    folder: Path
    server: Server
    engine: Engine
    plant: PlantRows
    config: Path
    http: str

    def url(self, path: str = "/", **query: str) -> str:
        return self.http + path + (f"?{urlencode(query)}" if query else "")

    def get(self, path: str, **query: str) -> str:
        """Return a page's text as a browser asks for it."""
        request = urllib.request.Request(self.url(path, **query), headers={"Accept": "text/html"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310 - our own http
            return answer.read().decode()

    @contextmanager
    def running(self) -> Iterator["ShownHub"]:
        log = self.folder / "hub.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tools", "plant", "run", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            until(lambda: "ready at" in log.read_text() or process.poll() is not None, log.read_text)
            assert process.poll() is None, log.read_text()
            yield self
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0, log.read_text()


@contextmanager
def a_hub(folder: Path, server: Server, **settings: Any) -> Iterator[ShownHub]:
    """A hub with three lines: one connected, one gone for three hours, one that has never been."""
    now = utc_now()
    plant, http = some_weeks(now), f"http://127.0.0.1:{free_port()}"
    url = server.url(f"hub_{folder.name}")
    seen = {"line-1": now + timedelta(hours=1), "line-2": now - timedelta(hours=3), "line-3": None}
    with filled(url, plant, seen) as engine:
        hub = ShownHub(folder, server, engine, plant, a_plant_file(folder, url, http, **settings), http)
        with hub.running():
            yield hub


@pytest.fixture(scope="module")
def hub(postgresql: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownHub]:
    folder = tmp_path_factory.mktemp("hub")
    with a_hub(folder, postgresql) as hub:
        yield hub
