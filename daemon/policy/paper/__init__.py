"""The paper's policies and its baselines (CoServe §4): requests are bound to an executor's queue when they arrive."""
