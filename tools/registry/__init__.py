"""Releases: `pack` makes, `pull` puts in force (docs/plant.md); `line_releases` is a line's own record."""
