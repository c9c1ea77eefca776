"""Pure decisions: values in, values out (an AST test checks this). Drivers call `scheduler.Scheduler`.

`paper/` binds a request when it arrives, `late/` when an executor is free; both stand on `residency` (facts and a
ledger per pool).
"""
