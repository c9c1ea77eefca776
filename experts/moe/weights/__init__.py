"""Checkpoints as files: their headers, the experts in them, prepared parts, narrower numbers.

Imports only the values of experts/moe (`arch`, `gating`, `errors`). Nothing here keeps an expert in memory.
"""
