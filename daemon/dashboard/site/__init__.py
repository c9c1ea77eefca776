"""The services around every page: access, live events, pictures, the database with its limits, the HTTP server.

Pages import `site.Site` and the types here. Nothing here imports a page.
"""
