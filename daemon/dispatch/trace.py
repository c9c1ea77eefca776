"""Record the scheduler's calls and decisions, and read them again.

A trace is JSON lines. The first describes the scheduler; each other line is one call with its arguments and result.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from types import FunctionType
from typing import Any

import structlog
from pydantic import TypeAdapter
from pydantic_core import to_json

from daemon.policy.matrix import Performance
from daemon.policy.operate import OperationRefusedError
from daemon.policy.presets import Tuning, preset
from daemon.policy.request import ExecutorFacts, ExpertFacts, PoolFacts
from daemon.policy.scheduler import Scheduler
from experts.ledger import LedgerError

#: Version of the format; a reader refuses others. 3: other weights or settings are another expert.
FORMAT = 3

#: Calls that change nothing; all others are recorded.
_QUERIES = {"pools_to_ask", "is_stuck", "misfits", "predicted_s", "pools", "budgets", "snapshot"}

#: The fault of a line that cannot have been recorded after the lines before it.
CONTRADICTS = "contradicts the lines before it; was the file edited?"


class TraceError(Exception):
    """A trace that cannot be replayed: file, line and fault."""


@contextmanager
def trace_line(path: Path, line: int, fault: str) -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, AssertionError, LedgerError, LookupError, TypeError, ValueError) as error:
        raise TraceError(f"{path}:{line}: {fault} ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, slots=True)
class Makeup:
    """All parts of a scheduler; pools and executors are divided as the policy needs (`partition`)."""

    experts: tuple[ExpertFacts, ...]
    pools: tuple[PoolFacts, ...]
    executors: tuple[ExecutorFacts, ...]
    policy: str
    tuning: Tuning
    matrix: tuple[Performance, ...] = ()

    def scheduler(self) -> Scheduler:
        return Scheduler(self.experts, self.pools, self.executors, preset(self.policy), self.tuning, self.matrix)


class RecordingScheduler(Scheduler):
    """A scheduler that writes each call and its result to `path`. A full disk ends the recording, not the line."""

    def __init__(self, makeup: Makeup, path: Path) -> None:
        chosen = preset(makeup.policy)
        super().__init__(makeup.experts, makeup.pools, makeup.executors, chosen, makeup.tuning, makeup.matrix)
        self._path = path
        self._file: Any = path.open("wb")
        self._write({"trace": FORMAT, "makeup": makeup})

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                structlog.get_logger("trace").error("trace_incomplete", file=str(self._path), error=str(error))

    def record_call(self, call: str, *given: Any) -> Any:
        # An iterator would be used up before it is written.
        arguments = [list(each) if isinstance(each, Iterator) else each for each in given]
        try:
            result = getattr(super(), call)(*arguments)
        except OperationRefusedError as error:
            self._write({"call": call, "args": arguments, "refused": error.code})
            raise
        self._write({"call": call, "args": arguments, "result": result})
        return result

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(to_json(line) + b"\n")
        except OSError as error:
            structlog.get_logger("trace").error("trace_ended", file=str(self._path), error=str(error))
            self._file = None


for _call in [name for name, each in vars(Scheduler).items() if isinstance(each, FunctionType)]:
    if _call not in _QUERIES and not _call.startswith("_"):
        setattr(RecordingScheduler, _call, partialmethod(RecordingScheduler.record_call, _call))


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call: its line in the file, and as JSON its arguments, and its `result` or `refused`."""

    line: int
    name: str
    arguments: list[Any]
    recorded: dict[str, Any]


def read_makeup(path: Path) -> Makeup:
    """TraceError if the file is not a trace of this version."""
    with path.open("rb") as file, trace_line(path, 1, "not a trace"):
        line = json.loads(file.readline())
        version = line["trace"]
        if version != FORMAT:
            message = f"a trace of format {version}, and this version reads {FORMAT}: record the run again"
            raise TraceError(f"{path}:1: {message}")
        makeup = TypeAdapter(Makeup).validate_python(line["makeup"])
        makeup.scheduler()
        return makeup


def read_calls(path: Path) -> Iterator[Call]:
    with path.open("rb") as file:
        file.readline()
        for number, text in enumerate(file, start=2):
            with trace_line(path, number, "not a recorded call; was the daemon killed here?"):
                line = json.loads(text)
                recorded = {key: line[key] for key in ("result", "refused") if key in line}
                call = Call(number, line["call"], line["args"], recorded)
            yield call
