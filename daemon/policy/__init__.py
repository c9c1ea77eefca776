"""Pure decisions: the next batch, the order of loads (`late.demand`, `paper.queues`), eviction, missed deadlines.

Values in, values out: no clock, threads, files, torch or logging; an AST test checks this.

`scheduler.Scheduler` is what drivers call; `presets` names the policies. `paper/` binds a request when it arrives,
`late/` when an executor is free; both stand on `residency` (facts and a ledger per pool).
"""
