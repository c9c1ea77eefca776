"""Signed, content-addressed releases of experts and rules (docs/releases.md). Nothing here changes a line."""
