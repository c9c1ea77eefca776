"""Releases: `pack` makes, `pull` puts in force (docs/releases.md); `line_releases` is a line's own record."""
