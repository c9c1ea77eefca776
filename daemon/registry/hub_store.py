"""The releases of a plant's hub, over HTTP, with the methods of a folder's Store."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from daemon.registry.manifest import MAX_MANIFEST_BYTES, ReleaseError, SignedManifest
from daemon.registry.store import Store
from daemon.units import printable

#: The header that carries a manifest's signature.
SIGNATURE_HEADER = "Coserve-Signature"
_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 4 << 20


class HubStore:
    """A hub at `http://HOST:PORT`. Raises ReleaseError if it refuses or cannot be reached."""

    def __init__(self, url: str, token: str | None = None) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ReleaseError(f"{url}: expected a hub's address such as http://hub.plant.lan:9480")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._opener = build_opener(ProxyHandler({}), _NoRedirect)  # the token is for the hub alone

    def __str__(self) -> str:
        return self._url

    def names(self) -> list[str]:
        return list(self._listed("names"))

    def numbers(self, name: str) -> list[int]:
        return self._listed("names").get(name, [])

    def revoked(self) -> list[str]:
        return self._listed("revoked")

    def manifest(self, name: str, number: int) -> SignedManifest:
        with self._ask("GET", f"/releases/{name}/{number}") as answer:
            signature = answer.headers.get(SIGNATURE_HEADER, "")
            return SignedManifest(_read(answer, MAX_MANIFEST_BYTES), signature.encode("ascii", "replace"))

    def add_manifest(self, name: str, number: int, signed: SignedManifest) -> None:
        header = {SIGNATURE_HEADER: signed.signature.decode("ascii", "replace").strip()}
        with self._ask("PUT", f"/releases/{name}/{number}", signed.data, header):
            pass

    def pieces(self, sha256: str, start: int) -> Iterable[bytes]:
        with self._ask("GET", f"/objects/{sha256}?start={start}") as answer:
            while piece := _part(answer, _CHUNK_BYTES):
                yield piece

    def add_object(self, file: Path, sha256: str) -> None:
        """Send a file that the hub lacks. Ask first: the hub cuts the connection of an upload that it refuses."""
        if self.ask_json("PUT", f"/objects/{sha256}/space?bytes={file.stat().st_size}")["present"]:
            return
        with file.open("rb") as body:
            self.put(f"/objects/{sha256}", body, file.stat().st_size)

    def put(self, path: str, body: Iterable[bytes], size_bytes: int) -> None:
        length = {"Content-Length": str(size_bytes), "Content-Type": "application/octet-stream"}
        with self._ask("PUT", path, body, length):
            pass

    def ask_json(self, method: str, path: str) -> Any:
        with self._ask(method, path) as answer:
            try:
                return json.loads(_read(answer, _MAX_ANSWER_BYTES) or b"null")
            except (ValueError, RecursionError):
                raise ReleaseError(f"{self}{path} does not answer as a hub does: is this its address?") from None

    def _listed(self, part: str) -> Any:
        try:
            return self.ask_json("GET", "/releases")[part]
        except (KeyError, TypeError):
            raise ReleaseError(f"{self}/releases does not answer as a hub does: is this its address?") from None

    @contextmanager
    def _ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Iterator[Any]:
        request = Request(self._url + path, body, {**self._headers, **(headers or {})}, method=method)  # noqa: S310
        try:
            answer = self._opener.open(request, timeout=_TIMEOUT_S)
        except HTTPError as error:
            with error:
                raise ReleaseError(f"{self}: {_reason(error)}") from None
        except (URLError, OSError, HTTPException) as error:
            raise ReleaseError(f"{self} cannot be reached: {getattr(error, 'reason', error)}") from None
        try:
            with answer:
                yield answer
        except (OSError, HTTPException) as error:
            raise ReleaseError(f"{self}: the connection broke ({error}): try again, a pull goes on there") from None


#: A place that has releases and takes new ones.
Source = Store | HubStore


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none: its status is an error."""


def _reason(error: HTTPError) -> str:
    try:
        return f"{printable(str(json.loads(error.read(4096))['detail']))} (HTTP {error.code})"
    except (ValueError, KeyError, TypeError, OSError, HTTPException, RecursionError):
        return f"it answers with HTTP {error.code} {printable(str(error.reason))}"


def _part(answer: HTTPResponse, max_bytes: int) -> bytes:
    """Return the next bytes of an answer. Raises IncompleteRead if it ends before its length."""
    data = answer.read(max_bytes)
    if len(data) < max_bytes and answer.length:
        raise IncompleteRead(data, answer.length)
    return data


def _read(answer: HTTPResponse, max_bytes: int) -> bytes:
    data = _part(answer, max_bytes + 1)
    if len(data) > max_bytes:
        raise ReleaseError(f"the hub's answer has more than {max_bytes} bytes")
    return data
