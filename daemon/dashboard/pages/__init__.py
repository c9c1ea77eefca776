"""A module for each page with `router(site) -> APIRouter`, beside its questions to the database and its pictures.

A page imports from daemon/dashboard/site; no page imports another's routes.
"""
