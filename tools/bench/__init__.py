"""Benchmarks of a user's machine: `coserve bench line` and `load`. tests/bench has those that judge CoServe."""
