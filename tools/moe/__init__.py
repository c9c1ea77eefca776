"""Commands `coserve moe …`: prepare, check and measure language models whose experts stay on disk.

Each command is a function of a module (tools/cli/moe.py lists them); `corpus`, `text` and `evaluate` are shared. Tests
of the project's own figures (docs/moe.md) are in tests/moe.
"""
