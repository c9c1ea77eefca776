"""A model whose experts are replaced by slots: runtime, dispatch, batching engine, keys and values, text.

`runtime.MoeRuntime` opens a checkpoint under a mode. What a mode is, `mode` says; which ones there are, `modes`.
"""
