"""Versions of experts that answer beside those in force, in a process of their own (`python -m daemon.shadow`).

They change no verdict, and no image waits for them. `shadows` is the daemon's side, and imports no torch.
"""
