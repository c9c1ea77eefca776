"""Signed, content-addressed releases of experts and rules (docs/plant.md). Nothing here changes a line."""
