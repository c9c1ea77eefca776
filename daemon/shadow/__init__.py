"""Versions of experts that answer beside those in force, in a process of their own. They change no verdict."""
