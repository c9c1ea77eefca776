"""The results database (docs/results.md): schema, its changes, and every statement. No threads.

The writer's thread writes through `store`, all others read through `reader` or `connections`. A verdict or text that is
written after its deadline becomes `unknown`.
"""
