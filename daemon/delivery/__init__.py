"""Processes that deliver results to `consumers`. The daemon imports `deliveries` only."""
