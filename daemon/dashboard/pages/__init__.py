"""A module for each page with `router(site) -> APIRouter`; no page imports another's routes."""
