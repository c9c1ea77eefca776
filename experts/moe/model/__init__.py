"""A model whose experts are replaced by slots: `runtime.MoeRuntime` opens a checkpoint under a `mode.Mode`."""
