"""The work of the commands `coserve moe …` (tools/cli/moe.py), which import it when they run."""
