"""Observation of a running line, wired by `daemon.app` and `daemon.operations`; other rooms never import it."""
