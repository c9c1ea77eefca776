"""Commands `coserve moe …`: prepare, check and measure language models whose experts stay on disk.

tools/cli/moe.py lists their functions; `text`, `checkpoint` and `progress` are shared. Measurements of quality and
speed (docs/moe.md) are in tests/moe.
"""
