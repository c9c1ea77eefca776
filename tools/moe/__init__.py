"""Commands `coserve moe …`: prepare, check and measure language models whose experts stay on disk.

Each command is a function of a module (tools/cli/moe.py lists them); `text`, `checkpoint` and `progress` are shared.
Measurements of quality and speed (docs/moe.md) are in tests/moe.
"""
