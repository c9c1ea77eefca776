"""A model whose experts are replaced by slots: runtime, dispatch, batching engine, keys and values, text.

`runtime.MoeRuntime` opens a checkpoint under a `mode.Mode`; the modes themselves are in experts/moe/modes.
"""
