"""Checkpoints as files: headers, experts on disk, prepared files, quantised experts.

Imports only the values of experts/moe (`arch`, `gating`, `errors`). Nothing here keeps an expert in memory.
"""
