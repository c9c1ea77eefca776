"""Check of a package (`coserve export --verify`): files that were changed, are missing, or were added."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from experts.weights import file_sha256
from tools.query.package.write import MANIFEST, SUMS, PackageError

_LINE = re.compile(r"([0-9a-f]{64})  ([^\x00\\]+)")


@dataclass(slots=True)
class PackageCheck:
    """Names of files by problem; `made` and `boards` are the manifest's.

    `files` counts all files that a whole package has, SHA256SUMS included. `links` are symbolic links among the others.
    """

    files: int
    fingerprint: str
    changed: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])
    added: list[str] = field(default_factory=list[str])
    links: list[str] = field(default_factory=list[str])
    made: str | None = None
    boards: int | None = None

    @property
    def is_whole(self) -> bool:
        return not (self.changed or self.missing or self.added)


def verify_package(package: Path) -> PackageCheck:
    """Compare every file with its checksum. Raises PackageError if `package` is not a package."""
    sums = package / SUMS
    if sums.is_symlink():
        raise PackageError(f"{sums} is a link: `coserve export` writes none, so it was replaced")
    if not sums.is_file():
        raise PackageError(f"{package} has no {SUMS}: it is not a package of `coserve export`, or it was cut short")
    checksums = _checksums(sums)
    if MANIFEST not in checksums:
        raise PackageError(f"{sums} does not name {MANIFEST}: it is not a package of `coserve export`")
    check = PackageCheck(len(checksums) + 1, file_sha256(sums))
    present = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if not _is_folder(path)}
    check.links = sorted(_readable(name) for name, path in present.items() if path.is_symlink())
    for name, sha256 in checksums.items():
        path = present.pop(name, None)
        if path is None:
            check.missing.append(name)
        elif path.is_symlink() or not path.is_file() or file_sha256(path) != sha256:
            check.changed.append(name)
    present.pop(SUMS, None)
    check.added = sorted(map(_readable, present))
    if MANIFEST not in (*check.changed, *check.missing):
        check.made, check.boards = _read_manifest(package / MANIFEST)
    return check


def _read_manifest(manifest: Path) -> tuple[str, int]:
    """Return when the package was made and how many boards it has. Raises PackageError."""
    try:
        fields = json.loads(manifest.read_text(encoding="utf-8"))
        return str(fields["made"]), int(fields["rows"]["boards"])
    except (ValueError, TypeError, KeyError):
        raise PackageError(f"{manifest} does not say when it was made and how many boards it has") from None


def _readable(name: str) -> str:
    """Return a file name for a terminal and for JSON: bytes that are not UTF-8 in hexadecimal."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _checksums(sums: Path) -> dict[str, str]:
    """Return the checksums by file name. Raises PackageError for names outside the package."""
    checksums: dict[str, str] = {}
    for number, line in enumerate(sums.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        parts = _LINE.fullmatch(line)
        path = PurePosixPath(parts[2]) if parts else PurePosixPath("..")
        if parts is None or path.is_absolute() or ".." in path.parts:
            raise PackageError(f"{sums}:{number}: expected a sha256, two blanks and a name inside the package")
        name = path.as_posix()
        if name in checksums or name == SUMS:
            raise PackageError(f"{sums}:{number}: {name} has no place here: each file has one line, and {SUMS} none")
        checksums[name] = parts[1]
    return checksums


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
