"""What surrounds and serves every page: access, live events, pictures, the database with its limits, the server.

Pages get all of it through `site.Site`. Nothing here knows a page.
"""
