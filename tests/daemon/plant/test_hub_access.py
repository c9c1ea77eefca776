"""Who may change releases at a hub without a token: programs on its own PC, and no web page elsewhere."""

import asyncio
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
from fastapi import APIRouter, FastAPI

from daemon.plant.hub import by_path
from daemon.plant.releases import release_router
from daemon.plant.rollouts import rollout_router
from daemon.plant.settings import HubSettings
from daemon.wire.keys import Token


def status_of(router: APIRouter, path: str, headers: dict[str, str], bodies: Iterable[bytes] = (), **more: str) -> int:
    """Return the status of the answer to a request with these headers and parts of a body."""
    app, statuses, parts = FastAPI(), list[int](), iter(bodies)
    app.include_router(router)
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "query_string": b""} | more
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def receive() -> dict[str, Any]:
        part = next(parts, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

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


@pytest.mark.parametrize("path", ["*", "", "/"])
def test_an_address_without_a_path_is_a_page(path: str) -> None:
    asked: list[str] = []

    async def pages(scope: Any, _receive: Any, _send: Any) -> None:
        asked.append(scope["path"])

    asyncio.run(by_path(FastAPI(), pages)({"type": "http", "path": path}, None, None))  # type: ignore[arg-type]
    assert asked == [path]


@pytest.mark.parametrize("path", ["/rollouts", "/line-releases"])
@pytest.mark.parametrize(("key", "status", "most_parts"), [("a-strangers", 401, 0), ("the-lines", 413, 17)])
def test_a_body_without_end_is_not_read(tmp_path: Path, path: str, key: str, status: int, most_parts: int) -> None:
    settings = HubSettings(database="postgresql://nobody@127.0.0.1/none", releases=tmp_path / "releases")
    token = Token(b"the-lines")
    hub: Any = SimpleNamespace(settings=settings, token=token, keys={"line-1": token})
    taken: list[bytes] = []

    def endless() -> Iterator[bytes]:
        while True:
            taken.append(bytes(1 << 16))
            yield taken[-1]

    headers = {"host": "hub", "authorization": f"Bearer {key}", "content-type": "application/json"}
    assert status_of(rollout_router(hub), path, headers, endless(), method="POST") == status
    assert len(taken) <= most_parts
