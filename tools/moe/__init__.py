"""Commands `coserve moe …`: prepare, check and measure language models whose experts stay on disk.

Each command is a module with a `register`; `corpus`, `text` and `evaluate` are shared. What judges the project's own
figures (docs/moe.md) is in tests/moe.
"""
