"""Which executor takes a request: `samba` binds all to the first; `coserve-plus` binds none, free executors pull."""

from collections.abc import Sequence

from daemon.policy.presets import Preset
from daemon.policy.request import ExecutorFacts, PoolFacts


def executors_in_use(
    pools: Sequence[PoolFacts], executors: Sequence[ExecutorFacts], preset: Preset
) -> tuple[Sequence[PoolFacts], Sequence[ExecutorFacts]]:
    """The executors that the preset uses and their pools, a GPU's first."""
    gpus = {facts.pool for facts in pools if facts.processor == "gpu"}
    ordered = sorted(executors, key=lambda facts: facts.pool not in gpus)
    used = ordered[:1] if preset.single_executor else ordered
    names = {facts.pool for facts in used}
    bounded = [
        facts
        if preset.batch_bound is None
        else PoolFacts(facts.pool, facts.processor, facts.budget_bytes, preset.batch_bound)
        for facts in pools
        if facts.pool in names
    ]
    return bounded, used
