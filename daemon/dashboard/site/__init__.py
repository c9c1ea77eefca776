"""What every page stands on: access, live events, pictures, the database with its limits, the HTTP server."""
