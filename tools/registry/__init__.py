"""Releases of a line: packed from what it has in force, and put in force on others (docs/releases.md).

Commands use `pack` and `pull`; a line's notes about its releases are in `line_releases`. Nothing here makes a key.
"""
