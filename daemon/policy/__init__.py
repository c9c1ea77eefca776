"""Decisions, pure: values in, values out. No clock, threads, files, torch or logging; an AST test holds it.

`scheduler.Scheduler` is what drivers call; `presets` names the policies. `paper/` binds a request when it arrives,
`late/` when an executor is free; both stand on `residency` (facts and a ledger per pool).
"""
