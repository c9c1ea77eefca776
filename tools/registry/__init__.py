"""Releases of what a line has in force (docs/plant.md)."""
