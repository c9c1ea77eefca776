"""Inspection of durable images. The drive's thread alone asks the scheduler (daemon/policy).

`orders` is the contract that real and simulated devices keep. Nothing here opens a socket or writes the database.
"""
