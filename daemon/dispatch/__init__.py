"""Inspection of durable images: the drive, chains and missed deadlines (`flow`), executors, loaders, channels.

The drive's thread alone asks the scheduler (daemon/policy). `orders` is the contract that real and simulated devices
keep; `simulated` has the simulated ones. Nothing here opens a socket or writes the database.
"""
