"""The process of one run: `python -m tests.bench.live.process CALL RESULT` (sides.in_own_process)."""

import logging
import pickle
import sys
from pathlib import Path

import structlog

if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    function, argument = pickle.loads(Path(sys.argv[1]).read_bytes())  # noqa: S301 - written by our own benchmark
    Path(sys.argv[2]).write_bytes(pickle.dumps(function(argument)))
