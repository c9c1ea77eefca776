"""The processes that deliver results to the plant, one for each of `consumers`: position, gaps, back-off, status.

The daemon imports `deliveries`; everything else runs in a child process. How a kind of consumer speaks is in
daemon/consumers.
"""
