"""A module for each page with `router(site) -> APIRouter`, beside its questions to the database and its pictures.

`dashboard.app` names them all. A page imports from daemon/dashboard; no page imports another's routes.
"""
