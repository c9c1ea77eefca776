"""The hub's process: schema and upkeep in a thread, and one HTTP server for lines, programs and pages."""

import hashlib
import signal
import sys
import time
from asyncio import Semaphore
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from sqlalchemy import Connection, Engine, delete, exists, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from daemon.consumers.plant.tables import lines, pictures, uploads
from daemon.dashboard.site.access import TokenGuesses
from daemon.dashboard.site.live import LiveTopics
from daemon.dashboard.site.server import PageServer
from daemon.errors import ReleaseError, StartError
from daemon.host.logs import configure_logs
from daemon.plant.picture_store import PictureStoreError, open_pictures
from daemon.plant.schema import database_problem, open_database, require_utf8, unknown_line
from daemon.plant.settings import HubSettings, load_plant
from daemon.plant.upkeep import UNNAMED_S, Upkeep
from daemon.registry.hub_store import SIGNATURE_HEADER
from daemon.registry.manifest import MAX_FILE_BYTES, MAX_MANIFEST_BYTES, SignedManifest
from daemon.registry.store import Store, check_free_space
from daemon.wire.keys import KeyFileError, Token, no_token_text, read_password, read_token
from daemon.wire.sockets import bind_http, is_loopback_name, url_of
from experts.catalog import Digest

#: The longest pause between parts of a picture or of a release's file, which may come over a slow link.
_PAUSE_S = 600.0
_PART_BYTES = 64 * 1024
_INCOMING = "incoming-"
#: Pictures that a line may send at once, and the number and bytes of those that may lack a row.
_SENT_AT_ONCE = 4
_MAX_UNNAMED, _MAX_UNNAMED_BYTES = 1000, 2 << 30
_NO_KEY = "`lines` of plant.yaml names each line's key; only http_token changes releases"
#: First parts of the paths for lines and programs; all other paths are pages.
_API = frozenset({"pictures", "healthz", "releases", "objects"})


class Hub:
    """Settings, database, pictures and keys for the routers; nothing is started or connected yet."""

    def __init__(self, settings: HubSettings) -> None:
        self.settings = settings
        self.engine = open_database(settings.database, read_password(settings.password) if settings.password else None)
        self.pictures = open_pictures(settings.pictures)
        self.upkeep = Upkeep(self.engine, settings, self.pictures)
        self.keys = {name: read_token(line.key) for name, line in settings.lines.items()}
        self.token = read_token(settings.http_token) if settings.http_token else None
        self.guesses = TokenGuesses()
        self.quotas = LineQuotas(self.engine)


class LineQuotas:
    """Limits of each line: pictures that it sends at once, and `uploads`, stored ones that no row names yet."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: A line sends one after the other.
        self.sending: defaultdict[str, Semaphore] = defaultdict(partial(Semaphore, _SENT_AT_ONCE))

    def require_room(self, line: str) -> None:
        of_line, size = uploads.c.line == line, func.coalesce(func.sum(uploads.c.bytes), 0)
        has_row = exists().where(pictures.c.sha256 == uploads.c.sha256, pictures.c.state == "stored")
        is_swept = uploads.c.at < func.now() - timedelta(seconds=UNNAMED_S)
        with self._engine.begin() as connection:
            connection.execute(delete(uploads).where(of_line, has_row | is_swept))
            count, size_bytes = connection.execute(select(func.count(), size).where(of_line)).one()
        if count >= _MAX_UNNAMED or size_bytes >= _MAX_UNNAMED_BYTES:
            raise HTTPException(507, f"{count} pictures of {line} have no row: the hub takes no more of them today")

    def add_upload(self, line: str, sha256: str, size_bytes: int) -> None:
        added = insert(uploads).values(line=line, sha256=sha256, bytes=size_bytes)
        with self._engine.begin() as connection:
            connection.execute(added.on_conflict_do_update(index_elements=uploads.primary_key, set_={"at": func.now()}))


def make_app(hub: Hub) -> FastAPI:
    app = FastAPI(title="CoServe plant", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.hub = hub
    # Lines try again after a status of 500 or more.
    for kind, status in ((ReleaseError, 409), (KeyFileError, 503), (OSError, 507), (SQLAlchemyError, 503)):
        app.add_exception_handler(kind, partial(_refuse, hub, status))
    app.add_exception_handler(ClientDisconnect, _note_broken_upload)
    app.include_router(picture_router(hub))
    app.include_router(release_router(hub))
    return app


def _refuse(hub: Hub, status: int, _request: Request, error: Exception) -> JSONResponse:
    detail = database_problem(hub.engine, error) if isinstance(error, SQLAlchemyError) else str(error)
    return JSONResponse({"detail": detail}, status)


def _note_broken_upload(request: Request, _error: Exception) -> Response:
    structlog.get_logger("hub").warning("upload_broken", line=request.state.line, path=request.url.path)
    return Response(status_code=400)  # the client has gone


def picture_router(hub: Hub) -> APIRouter:
    router = APIRouter()
    by_line = Depends(partial(require_token, hub, hub.keys, _NO_KEY))
    read = [Depends(partial(admit, hub, hub.keys, _NO_KEY))]
    folder = hub.settings.pictures.folder or hub.settings.releases

    @router.put("/pictures/{sha256}/space", dependencies=[by_line])
    def check_size_of_picture(sha256: Digest, bytes: int) -> dict[str, Any]:  # noqa: A002, ARG001  # pyright: ignore[reportUnusedFunction]
        return {"fits": bytes <= hub.settings.pictures.max_picture}

    @router.put("/pictures/{sha256}", status_code=201)
    async def put_picture(sha256: Digest, request: Request, line: Annotated[str, by_line]) -> Response:  # pyright: ignore[reportUnusedFunction]
        await run_in_threadpool(hub.quotas.require_room, line)
        folder.mkdir(parents=True, exist_ok=True)
        if (sending := hub.quotas.sending[line]).locked():
            raise HTTPException(503, f"{line} sends {_SENT_AT_ONCE} pictures already: wait until one has arrived")
        async with sending:
            with TemporaryFile(dir=folder) as content:  # it has no name: nothing is left of it
                if await _spool(request, content, hub.settings.pictures.max_picture) != sha256:
                    raise HTTPException(422, "the picture has another sha256 than its address: damaged on the way")
                await run_in_threadpool(hub.quotas.add_upload, line, sha256, content.tell())
                try:
                    await run_in_threadpool(hub.pictures.put, sha256, content)
                except PictureStoreError as error:
                    raise HTTPException(507, str(error)) from None
        return Response(status_code=201)

    @router.get("/pictures/{sha256}", dependencies=read)
    def get_picture(sha256: Digest) -> Response:  # pyright: ignore[reportUnusedFunction]
        return picture(hub, sha256)

    @router.get("/healthz")
    def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        problem = hub.upkeep.problem
        return Response(problem or "ok", 503 if problem else 200, media_type="text/plain")

    return router


def picture(hub: Hub, sha256: str) -> Response:
    try:
        content = hub.pictures.get(sha256)
    except PictureStoreError as error:
        raise HTTPException(503, str(error)) from None
    if content is None:
        raise HTTPException(404, "the hub does not have this picture, or has deleted it")
    kind = "image/jpeg" if content.startswith(b"\xff\xd8") else "application/octet-stream"
    kind = "image/png" if content.startswith(b"\x89PNG") else kind
    headers = {"Cache-Control": "private, max-age=86400", "Content-Length": str(len(content))}
    return StreamingResponse(in_parts([content]), media_type=kind, headers=headers)


async def in_parts(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield parts so small that a slow client can read each within the server's time limit."""
    async for piece in iterate_in_threadpool(pieces):
        for start in range(0, len(piece), _PART_BYTES):
            yield piece[start : start + _PART_BYTES]


def release_router(hub: Hub) -> APIRouter:
    """Return the releases' routes: a line's key reads, only the hub's own token adds. Lines check what they take."""
    router, store = APIRouter(), Store(hub.settings.releases)
    read = [Depends(partial(admit, hub, hub.keys, _NO_KEY))]
    change = [Depends(partial(admit, hub, {}, "releases are changed with the hub's http_token"))]
    for left in store.folder.glob(f"{_INCOMING}*"):
        left.unlink()  # a hub that was killed left it

    @router.get("/releases", dependencies=read)
    def list_releases() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        return {"names": {name: store.numbers(name) for name in store.names()}, "revoked": store.revoked()}

    @router.get("/releases/{name}/{number}", dependencies=read)
    def get_release(name: str, number: int) -> Response:  # pyright: ignore[reportUnusedFunction]
        signed = store.manifest(name, number)
        signature = signed.signature.decode("ascii", "replace").strip()
        return Response(signed.data, media_type="application/json", headers={SIGNATURE_HEADER: signature})

    @router.put("/releases/{name}/{number}", status_code=201, dependencies=change)
    async def put_release(name: str, number: int, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        data = BytesIO()
        await _spool(request, data, MAX_MANIFEST_BYTES)
        signed = SignedManifest(data.getvalue(), f"{request.headers.get(SIGNATURE_HEADER, '')}\n".encode())
        await run_in_threadpool(store.add_manifest, name, number, signed)
        return Response(status_code=201)

    @router.put("/objects/{sha256}/space", dependencies=change)
    def check_space_for_object(sha256: str, bytes: int) -> dict[str, Any]:  # noqa: A002  # pyright: ignore[reportUnusedFunction]
        present = store.has(sha256)
        check_free_space(store.folder, 0 if present else bytes)
        return {"present": present}

    @router.get("/objects/{sha256}", dependencies=read)
    def get_object(sha256: str, start: int = 0) -> Response:  # pyright: ignore[reportUnusedFunction]
        return StreamingResponse(in_parts(store.pieces(sha256, max(start, 0))), media_type="application/octet-stream")

    @router.put("/objects/{sha256}", status_code=201, dependencies=change)
    async def put_object(sha256: str, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        store.place(sha256)
        store.folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=store.folder, prefix=_INCOMING) as part:
            await _spool(request, part, MAX_FILE_BYTES)
            await run_in_threadpool(store.add_object, Path(part.name), sha256)
        return Response(status_code=201)

    return router


async def _spool(request: Request, file: Any, max_bytes: int) -> str:
    """Write a body to `file` as it comes, and return its sha256."""
    digest, size_bytes = hashlib.sha256(), 0
    async for part in request.stream():
        request.state.heard_s = time.monotonic()  # it may take any time while parts keep coming
        size_bytes += len(part)
        if size_bytes > max_bytes:
            raise HTTPException(413, f"{request.url.path}: the hub takes {max_bytes} bytes at most")
        digest.update(part)
        await run_in_threadpool(file.write, part)
    await run_in_threadpool(file.flush)
    return digest.hexdigest()


def by_path(api: ASGIApp, pages: ASGIApp) -> ASGIApp:
    """Return one application: `api` answers its paths, `pages` all others and the lifespan events."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["type"] == "http" and scope["path"].lstrip("/").split("/")[0] in _API
        await (api if is_api else pages)(scope, receive, send)

    return answer


def run_hub(path: Path, pages: Callable[[Hub, Path], tuple[ASGIApp, LiveTopics]]) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError, StartError or CredentialError if it cannot start."""
    configure_logs(sys.stderr)
    settings = load_plant(path)
    hub = Hub(settings)
    try:
        listener = bind_http(settings.http, has_token=hub.token is not None)
    except StartError as error:
        raise StartError(str(error).replace("endpoints.http", f"{path}: http")) from None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    site, live = pages(hub, path.resolve().parent)
    app = by_path(make_app(hub), site)
    hub.upkeep.start()
    print(f"coserve plant: ready at {url_of(listener)}, database {hub.engine.url.render_as_string()}", flush=True)
    try:
        PageServer(app, live, request_s=_PAUSE_S).run(sockets=[listener])
    finally:
        hub.upkeep.stop()


@contextmanager
def _hub_transaction(path: Path) -> Iterator[tuple[Hub, Connection]]:
    """Yield the hub of plant.yaml and a transaction in its database. ConfigError, StartError."""
    hub = Hub(load_plant(path))
    try:
        with hub.engine.begin() as connection:
            yield hub, connection
    except SQLAlchemyError as error:
        raise StartError(database_problem(hub.engine, error)) from None
    finally:
        hub.engine.dispose()


def check_hub(path: Path) -> dict[str, Any]:
    with _hub_transaction(path) as (hub, connection):
        require_utf8(connection)
        version = connection.exec_driver_sql("SHOW server_version").scalar()
        has_schema = connection.exec_driver_sql("SELECT to_regclass('lines')").scalar() is not None
        count = connection.execute(select(func.count()).select_from(lines)).scalar() if has_schema else 0
    return {"database": hub.engine.url.render_as_string(), "postgresql": version, "schema": has_schema, "lines": count}


def accept_line(path: Path, line: str) -> None:
    """Let the next PC that connects as `line` take the name over. ConfigError, StartError."""
    with _hub_transaction(path) as (_, connection):
        if problem := unknown_line(connection, line):
            raise StartError(problem)
        connection.execute(update(lines).where(lines.c.line == line).values(accepts=True))


async def admit(hub: Hub, keys: Mapping[str, Token], hint: str, request: Request) -> None:
    """Admit holders of one of `keys`, of the hub's token or, if there is none, programs on the hub's PC."""
    if hub.token is not None:
        await require_token(hub, {**keys, "": hub.token}, hint, request)
    elif "origin" in request.headers or not is_loopback_name(request.headers.get("host", "")):
        # A web page sent this through a browser on the hub's PC.
        raise HTTPException(421, "without http_token the hub answers only programs on its own PC, at http://127.0.0.1")
    else:
        request.state.is_admitted, request.state.line = True, ""


async def require_token(hub: Hub, tokens: Mapping[str, Token], hint: str, request: Request) -> str:
    """Return the name of the line whose key the request has."""
    header = request.headers.get("authorization", "")
    line = next((name for name, token in tokens.items() if token.matches(header)), None)
    if header:
        await hub.guesses.delay(request.scope["state"], is_right=line is not None)
    if line is None:
        raise HTTPException(401, f"{no_token_text(header)}: {hint}")
    request.state.line = line
    return line
