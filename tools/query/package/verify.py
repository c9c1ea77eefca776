"""`coserve export --verify`: whether a package is as it was written, file by file, and nothing was put beside."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tools.query.package.write import MANIFEST, SUMS, PackageError, sha256_of

_LINE = re.compile(r"([0-9a-f]{64})  ([^\x00\\]+)")


@dataclass(slots=True)
class Verified:
    """Files by what is wrong with them; `made` and `boards` are the manifest's.

    `files` counts all that a whole package has, SHA256SUMS too. Of the others `links` are no files but links.
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


def verify_package(package: Path) -> Verified:
    """Compare every file; PackageError where this is no package."""
    sums = package / SUMS
    if sums.is_symlink():
        raise PackageError(f"{sums} is a link: `coserve export` writes none, so somebody else has put it there")
    if not sums.is_file():
        raise PackageError(f"{package} has no {SUMS}: it is no package of `coserve export`, or it was cut short")
    wanted = _wanted(sums)
    if MANIFEST not in wanted:
        raise PackageError(f"{sums} does not name {MANIFEST}: it is no package of `coserve export`")
    found = Verified(len(wanted) + 1, sha256_of(sums))
    there = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if not _is_folder(path)}
    found.links = sorted(_printable(name) for name, path in there.items() if path.is_symlink())
    for name, sha256 in wanted.items():
        path = there.pop(name, None)
        if path is None:
            found.missing.append(name)
        elif path.is_symlink() or not path.is_file() or sha256_of(path) != sha256:
            found.changed.append(name)
    there.pop(SUMS, None)
    found.added = sorted(map(_printable, there))
    if MANIFEST not in (*found.changed, *found.missing):
        found.made, found.boards = _said_by(package / MANIFEST)
    return found


def _said_by(manifest: Path) -> tuple[str, int]:
    """When the package was made and how many boards it has; PackageError where this is no manifest of ours."""
    try:
        said = json.loads(manifest.read_text(encoding="utf-8"))
        return str(said["made"]), int(said["rows"]["boards"])
    except (ValueError, TypeError, KeyError):
        raise PackageError(f"{manifest} does not say when it was made and how many boards it has") from None


def _printable(name: str) -> str:
    """A name that anybody may have given, for a terminal and for JSON: bytes that are no UTF-8 in hexadecimal."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _wanted(sums: Path) -> dict[str, str]:
    """Checksums by file name; only names inside of the package."""
    wanted: dict[str, str] = {}
    for number, line in enumerate(sums.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        parts = _LINE.fullmatch(line)
        path = PurePosixPath(parts[2]) if parts else PurePosixPath("..")
        if parts is None or path.is_absolute() or ".." in path.parts:
            raise PackageError(f"{sums}:{number}: expected a sha256, two blanks and a name inside of the package")
        name = path.as_posix()
        if name in wanted or name == SUMS:
            raise PackageError(f"{sums}:{number}: {name} has no place here: each file has one line, and {SUMS} none")
        wanted[name] = parts[1]
    return wanted


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
