"""What is said where the packages of an extra are not installed: one sentence, with the command that brings them.

The command takes them for this checkout, at the versions of constraints.txt: by name alone a registry might give
somebody else's package.
"""


def install_with(extra: str) -> str:
    """The command for a checkout; the bundle has the extras of a line already."""
    return f".venv/bin/python -m pip install --constraint constraints.txt --editable '.[{extra}]'"


class MissingExtraError(Exception):
    """`package` is not installed, so `what` cannot be done; the text says how it comes."""

    def __init__(self, package: str | None, what: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; {what} needs the extra `{extra}`: {install_with(extra)}")
