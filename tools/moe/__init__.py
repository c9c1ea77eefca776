"""Commands `coserve moe …` (tools/cli/moe.py), and their shared `text`, `checkpoint` and `progress`."""
