"""Services of every page: access, live events, pictures, the database with its limits, the HTTP server."""
