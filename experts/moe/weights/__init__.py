"""Checkpoints as files: headers, experts on disk, prepared files, quantised experts. Keeps no expert in memory."""
