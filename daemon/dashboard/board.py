"""The page Board: one attempt at one board, with everything that was found; and the search for it by serial."""

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from daemon.dashboard.site import Site


def router(site: Site) -> APIRouter:
    routes = APIRouter()

    @routes.get("/boards")
    def search(request: Request, serial: str = "") -> HTMLResponse:
        return site.page(request, "boards.html", serial=serial)

    return routes
