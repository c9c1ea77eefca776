"""Observation of a running line: metrics, gauges, health, timeline, and the small HTTP server.

Other rooms never import this one: `daemon.app` and `daemon.operations` bring it what it shows.
"""
