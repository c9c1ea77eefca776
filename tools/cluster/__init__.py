"""Long work of commands on the PCs of a cluster, as Ray tasks: `--cluster` of `train all`, `rejudge`, `measure`.

Import `work_on`, and from `kinds` the command's side of each kind of work; the worker's side is `carry_out`. Nothing
here judges or trains: the rooms below do, with the same code on one PC and on many.
"""
