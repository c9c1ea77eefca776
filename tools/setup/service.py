"""A daemon as a child process, for the demo, the benchmarks and the tests."""

import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tools.terminal.console import CommandError, quiet_start

READY = "coserve ready"
_STARTED_WITHIN_S, _TAIL_LINES = 300.0, 12
#: SIGKILL acts at once, but reaping may wait for a disk.
_REAPED_WITHIN_S = 60.0


class ServiceError(CommandError):
    """The daemon did not start, or ended early; the text carries the end of its log."""


class Service:
    """`coserve run CONFIG` as a process of its own: ready on entry, stopped by SIGTERM on exit."""

    def __init__(
        self,
        config: Path,
        log: Path,
        environ: Mapping[str, str] | None = None,
        command: Sequence[str] = ("tools", "run"),
        ready: str = READY,
    ) -> None:
        """`command` is what `python -m` runs with the configuration behind it, until it prints `ready`."""
        self.config = config
        self.log = log
        self._environ = quiet_start(dict(environ or {}))
        self._command, self._ready = tuple(command), ready
        self._command_line = f"coserve {' '.join(command[1:])} {config}"
        self.process: subprocess.Popen[str] | None = None
        self._log_start = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until it is ready; ServiceError if it ends or stays silent."""
        ready = threading.Event()
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a", encoding="utf-8") as log:
            process = subprocess.Popen(  # noqa: S603 - our own command, no shell
                [sys.executable, "-m", *self._command, str(self.config)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environ,
            )
        self.process = process

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(self._ready):
                    ready.set()
            process.stdout.close()

        self._listener = threading.Thread(target=listen, name="service-stdout", daemon=True)
        self._listener.start()
        try:
            until_s = time.monotonic() + _STARTED_WITHIN_S
            while not ready.wait(0.05) and process.poll() is None and time.monotonic() < until_s:
                pass
        except BaseException:  # Ctrl-C and SIGTERM, too: nobody else would stop it
            self.kill()
            raise
        if not ready.is_set():
            self.kill()
            raise ServiceError(f"`{self._command_line}` did not start; the end of {self.log}:\n{self.tail()}")

    def stop(self, timeout_s: float = 90.0) -> int:
        process = self.process
        assert process is not None
        process.terminate()
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            message = f"`{self._command_line}` did not stop within {timeout_s:.0f} s of SIGTERM; see {self.log}"
            raise ServiceError(message) from None
        self._listener.join(5.0)
        return status

    def kill(self) -> None:
        """Send SIGKILL, as a power cut would end it."""
        process = self.process
        assert process is not None
        process.kill()
        process.wait(_REAPED_WITHIN_S)
        self._listener.join(5.0)

    def tail(self) -> str:
        text = self.log.read_bytes()[self._log_start :].decode(errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])
