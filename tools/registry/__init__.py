"""Releases: `pack` makes one of what a line has in force, `pull` puts it in force on others (docs/releases.md).

`line_releases` is a line's own record of them. Keys are made in daemon/registry.
"""
