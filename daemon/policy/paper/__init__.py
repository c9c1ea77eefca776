"""The paper's policies and baselines (CoServe §4): `queues` binds requests to an executor when they arrive."""
