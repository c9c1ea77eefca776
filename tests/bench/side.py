"""One side in a process of its own, so that each starts with clean memory: `python -m tests.bench.side JOB RUN`."""

import logging
import sys
from pathlib import Path

import structlog

from tests.bench.job import JOB, NAIVE, RAY, RUN, Job, Run


def run_side(job: Job) -> Run:
    """Each side imports only what it is made of."""
    if job.side == NAIVE:
        from tests.bench.naive import run_naive

        return run_naive(job)
    if job.side == RAY:
        from tests.bench.ray_side import run_ray

        return run_ray(job)
    from tests.bench.engine import run_engine

    return run_engine(job)


def main(job_file: str, run_file: str) -> None:
    """Read the job, run it, write what happened."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    job = JOB.validate_json(Path(job_file).read_bytes())
    Path(run_file).write_bytes(RUN.dump_json(run_side(job)))


if __name__ == "__main__":
    main(*sys.argv[1:])
