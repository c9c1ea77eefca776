"""`coserve demo`: a line of rendered boards with experts trained on them.

`line.make_line` makes the line from the shipped experts (benchmarks use it too), `run.run_demo` shows it, and `recipe`
makes the experts again. Only tests and examples import this room otherwise; they judge parts with `judge.judge_parts`.
"""
