"""Benchmarks of a user's machine: `coserve bench line`, `load`, `compute`. tests/bench has those that judge CoServe."""
