"""The results database (docs/results.md): schema, its changes, and every statement that the daemon sends it.

The writer's thread writes through `store`, all others read through `reader` or `connections`. A verdict or text that is
written after its deadline becomes `unknown` in `inspections` or `generations`. Nothing here starts a thread.
"""
