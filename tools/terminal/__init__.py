"""Shared parts of all commands: printing, progress, values of options, and opening a line's files."""
