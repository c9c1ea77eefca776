"""`coserve.yaml`: its settings, the environment variables that override them, and what changed since the start.

`settings.Config` is what every other room reads. Nothing here opens the files that the settings name.
"""
