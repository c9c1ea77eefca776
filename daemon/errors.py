"""Errors that the user has to correct before the line can start or go on."""

from collections.abc import Sequence

from routing_rules.load import Problem


class ConfigError(Exception):
    """The line cannot start, or a reload was refused: every mistake found, each with its file and line."""

    def __init__(self, problems: Sequence[Problem | str]) -> None:
        self.problems = tuple(str(problem) for problem in problems)
        super().__init__("\n".join(self.problems))


class StartError(ConfigError):
    """The configuration is right but this machine refuses it: a port in use, another daemon, a folder not writable."""

    def __init__(self, problem: str) -> None:
        super().__init__([problem])


class DeviceLostError(Exception):
    """A device of another PC is unreachable or has failed: its work must be done elsewhere."""


def is_device_error(error: BaseException) -> bool:
    """Return True if a device failed, not its work; by name, so that this needs no torch."""
    if isinstance(error, DeviceLostError):
        return True
    if type(error).__name__ == "OutOfMemoryError":
        return False
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error) or "CUDA driver error" in str(error)


def ran_out_of_memory(error: BaseException) -> bool:
    """Return True if a smaller batch may succeed; torch has an error for GPUs and only a text for the CPU."""
    is_torch_error = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or is_torch_error or "can't allocate memory" in str(error)


def install_with(extra: str) -> str:
    """Return the command to install an extra into a checkout, at the versions of constraints.txt."""
    return f".venv/bin/python -m pip install --constraint constraints.txt --editable '.[{extra}]'"


class MissingExtraError(Exception):
    """`package` is missing, so `what` cannot be done; the text says how to install it."""

    status = 2

    def __init__(self, package: str | None, what: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; {what} needs the extra `{extra}`: {install_with(extra)}")


class ReleaseError(Exception):
    """A refused or unavailable release; the text says which, why, and what to do."""
