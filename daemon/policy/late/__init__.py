"""`coserve-plus`: one demand table, a free executor pulls, the loader runs ahead (docs/how-it-schedules.md)."""
