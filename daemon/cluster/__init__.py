"""Devices on other PCs, over Ray (docs/plant.md).

`remote_devices` is the daemon's side: the drive decides over its proxies as over any device. The process behind it
(`python -m daemon.cluster`) is the Ray driver, and `worker` runs on the other PC. Ray is imported in that process only:
it ends its driver when its own processes die, and the line judges on.
"""
