"""Runs of a benchmark in processes of their own: each begins with clean memory and everything imported."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_END_S = 20.0


class RunError(Exception):
    """A run's process failed; the text is the end of its output."""


class OwnProcesses:
    """Starts a process for each call, all forked from one that has imported `modules` and has computed nothing."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*modules])

    def call(self, function: Callable[[T], R], argument: T, timeout_s: float) -> R:
        """Return `function(argument)`, computed by a fresh process. Raises RunError."""
        ours, theirs = self._context.Pipe(duplex=False)
        with NamedTemporaryFile(prefix="coserve-bench-") as output, ours:
            process = self._context.Process(target=_carry_out, args=(theirs, output.name, function, argument))
            process.start()
            theirs.close()
            try:
                if not ours.poll(timeout_s):
                    raise RunError(f"did not end within {timeout_s:.0f} s")
                result = ours.recv()
                process.join(_END_S)
            except EOFError:
                process.join(_END_S)
                text = output.read().decode(errors="replace").strip()[-800:]
                raise RunError(text or f"exit status {process.exitcode}") from None
            finally:
                if process.is_alive():
                    process.kill()
                    process.join()
        return result


def peak_bytes() -> int:
    """Return the largest memory that this process had at once."""
    with Path("/proc/self/status").open(encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def _carry_out(answer: Connection, output: str, function: Callable[[T], R], argument: T) -> None:
    with Path(output).open("wb") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    with suppress(OSError):
        # The peak of the process that this one was forked from is not its own.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    answer.send(function(argument))
