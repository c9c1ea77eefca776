"""Errors about a language model's checkpoint or a file prepared for it; each message says what to do next."""

from pathlib import Path


class ModelError(Exception):
    """A checkpoint, its folder or one file, cannot be used; `message` says what was expected and what to do."""

    def __init__(self, file: Path, message: str) -> None:
        super().__init__(f"{file}: {message}")
        self.file = file
        self.message = message


class InvalidLogitsError(ModelError):
    """The model computed NaN or infinity for one text: the text is at fault, or the weights are damaged."""
