"""The hub's releases over HTTP: a line's key reads, only the hub's own token adds. Lines check what they take."""

from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from daemon.plant.hub import Hub, in_parts, parts_of, read_body, require_administrator, require_reader
from daemon.registry.hub_store import SIGNATURE_HEADER
from daemon.registry.manifest import MAX_FILE_BYTES, MAX_MANIFEST_BYTES, ReleaseError, SignedManifest
from daemon.registry.store import Store

_INCOMING = "incoming-"


def release_router(hub: Hub) -> APIRouter:
    router, store = APIRouter(), Store(hub.settings.releases)
    read, change = [Depends(partial(require_reader, hub))], [Depends(partial(require_administrator, hub))]
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
        data = await read_body(request, MAX_MANIFEST_BYTES)
        signed = SignedManifest(data, f"{request.headers.get(SIGNATURE_HEADER, '')}\n".encode())
        await run_in_threadpool(store.add_manifest, name, number, signed)
        return Response(status_code=201)

    @router.put("/objects/{sha256}/space", dependencies=change)
    def check_space_for_object(sha256: str, bytes: int) -> dict[str, Any]:  # noqa: A002  # pyright: ignore[reportUnusedFunction]
        present = store.has(sha256)
        store.check_free_space(0 if present else bytes)
        return {"present": present}

    @router.get("/objects/{sha256}", dependencies=read)
    def get_object(sha256: str, start: int = 0) -> Response:  # pyright: ignore[reportUnusedFunction]
        return StreamingResponse(in_parts(store.pieces(sha256, max(start, 0))), media_type="application/octet-stream")

    @router.put("/objects/{sha256}", status_code=201, dependencies=change)
    async def put_object(sha256: str, request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        store.place(sha256)
        await _receive(store, sha256, request)
        return Response(status_code=201)

    return router


async def _receive(store: Store, sha256: str, request: Request) -> None:
    """Receive a file under a temporary name, and store it once its bytes have the digest."""
    store.folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=store.folder, prefix=_INCOMING) as part:
        size_bytes = 0
        async for piece in parts_of(request):
            size_bytes += len(piece)
            if size_bytes > MAX_FILE_BYTES:
                raise ReleaseError(f"a file of a release has {MAX_FILE_BYTES} bytes at most")
            await run_in_threadpool(part.write, piece)
        part.flush()
        await run_in_threadpool(store.add_object, Path(part.name), sha256)
