"""Errors of one expert or one image; each says what to do next."""

from pathlib import Path
from typing import Literal

from experts.spec import ExpertId, name_of


class ExpertError(Exception):
    """One expert cannot be used: its images are answered `unknown`/`expert_failed`, the other experts go on."""

    def __init__(self, expert: ExpertId, message: str, file: Path | None = None) -> None:
        where = f"{file}: " if file is not None else ""
        super().__init__(f"expert {name_of(expert)}: {where}{message}")
        self.expert = expert
        self.message = message
        self.file = file


class WeightsError(Exception):
    """A weights file contradicts its catalog entry or its layout; fields as in ExpertError."""

    def __init__(self, file: Path, message: str) -> None:
        super().__init__(f"{file}: {message}")
        self.file = file
        self.message = message


class ImageError(Exception):
    """An image that cannot be decoded, `reason` in one line. Its verdict is `unknown`/`bad_image`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ImageHeaderError(ImageError):
    """An image whose structure is refused at intake: `code` is bad_image or too_large."""

    def __init__(self, reason: str, code: Literal["bad_image", "too_large"] = "bad_image") -> None:
        super().__init__(reason)
        self.code: Literal["bad_image", "too_large"] = code


class LongWalkError(ImageError):
    """The image has more parts than this check may walk; it may still be valid."""
