"""`coserve demo`: a line of rendered boards with experts trained on them.

`prepare.prepare` makes the line (benchmarks use it), `run.run_demo` shows it. Nothing else imports this room but tests
and the examples, which judge parts with `judge.judge_parts`.
"""
