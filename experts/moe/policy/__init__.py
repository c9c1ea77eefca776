"""Pure decisions of language models: eviction, prefetching, importance, brownout, the order of requests.

Nothing here imports torch, reads a clock or draws random numbers of its own.
"""
