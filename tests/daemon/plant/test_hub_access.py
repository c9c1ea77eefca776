"""Who may change releases at a hub without a token: programs on its own PC, and no web page elsewhere."""

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI

from daemon.plant.hub import release_router
from daemon.plant.settings import HubSettings


def status_of(router: APIRouter, path: str, headers: dict[str, str]) -> int:
    """Return the status of the answer to a request with these headers."""
    app, statuses = FastAPI(), list[int]()
    app.include_router(router)
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "query_string": b""}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    asyncio.run(app(scope, receive, send))
    return statuses[0]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:9480"}, 200),
        ({"host": "localhost:9480"}, 200),
        ({"host": "a-site.example"}, 421),
        ({"host": "127.0.0.1:9480", "origin": "https://a-site.example"}, 421),
        ({}, 421),
    ],
)
def test_without_a_token_only_programs_on_the_hubs_pc_are_answered(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    settings = HubSettings(database="postgresql://nobody@127.0.0.1/none", releases=tmp_path / "releases")
    hub: Any = SimpleNamespace(settings=settings, token=None, keys={})
    assert status_of(release_router(hub), "/releases", headers) == status
