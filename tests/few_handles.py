"""`python -m tests.few_handles SOFT HARD MODULE …`: run MODULE with these limits of open files."""

import resource
import runpy
import sys

if __name__ == "__main__":
    soft, hard, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    sys.argv[:4] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
