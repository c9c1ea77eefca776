"""`python -m tests.few_handles SOFT HARD MODULE …`: run MODULE with these limits of open files.

As for a process without privileges, the hard limit cannot be raised; HARD of 0 is one that can, at SOFT.
"""

import resource
import runpy
import sys

if __name__ == "__main__":
    soft, hard, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard or soft))
    set_limit = resource.setrlimit

    def refuse_more(kind: int, limits: tuple[int, int]) -> None:
        if limits[1] > hard:
            raise ValueError("not allowed to raise maximum limit")
        set_limit(kind, limits)

    if hard:
        resource.setrlimit = refuse_more
    sys.argv[:4] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
