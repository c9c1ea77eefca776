"""What can be wrong with a language model's checkpoint, or with what was prepared for it; says what to do next."""

from pathlib import Path


class ModelError(Exception):
    """A checkpoint (its folder, or one file of it) cannot be used: `message` says what was expected and what to do."""

    def __init__(self, file: Path, message: str) -> None:
        super().__init__(f"{file}: {message}")
        self.file = file
        self.message = message


class InvalidLogitsError(ModelError):
    """What was computed for one text is no number: it lies in this text, or the weights are damaged."""
