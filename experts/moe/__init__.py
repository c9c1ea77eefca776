"""Language models: mixtures of experts whose experts stay in the checkpoint's files until a token needs them.

`weights/` reads checkpoints, `cache/` holds experts in slots, `model/` runs a model on them, `modes/` decides which
experts are in memory, `policy/` has their pure decisions. Nothing here knows the daemon.
"""
