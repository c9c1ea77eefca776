"""This PC: folders and locks, logs, child processes, the service manager, temperatures.

Every other room may import these modules. Nothing here knows of images, experts or the wire.
"""
