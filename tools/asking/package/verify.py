"""`coserve export --verify`: whether a package is as it was written, file by file, and nothing was put beside."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tools.asking.package.write import MANIFEST, SUMS, PackageError, sha256_of

_LINE = re.compile(r"([0-9a-f]{64})  ([^\x00\\]+)")


@dataclass(slots=True)
class Verified:
    """Files by what is wrong with them; `made` and `boards` are the manifest's."""

    files: int
    fingerprint: str
    changed: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])
    added: list[str] = field(default_factory=list[str])
    made: str | None = None
    boards: int | None = None

    @property
    def is_whole(self) -> bool:
        return not (self.changed or self.missing or self.added)


def verify_package(package: Path) -> Verified:
    """Compare every file; PackageError where this is no package."""
    sums = package / SUMS
    if not sums.is_file() or sums.is_symlink():
        raise PackageError(f"{package} has no {SUMS}: it is no package of `coserve export`, or it was cut short")
    wanted = _wanted(sums)
    found = Verified(len(wanted), sha256_of(sums))
    there = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if not _is_folder(path)}
    for name, sha256 in wanted.items():
        path = there.pop(name, None)
        if path is None:
            found.missing.append(name)
        elif path.is_symlink() or not path.is_file() or sha256_of(path) != sha256:
            found.changed.append(name)
    there.pop(SUMS, None)
    found.added = sorted(there)
    if MANIFEST in wanted and MANIFEST not in (*found.changed, *found.missing):
        manifest = json.loads((package / MANIFEST).read_text(encoding="utf-8"))
        found.made, found.boards = manifest.get("made"), manifest.get("rows", {}).get("boards")
    elif MANIFEST not in wanted:
        raise PackageError(f"{sums} does not name {MANIFEST}: it is no package of `coserve export`")
    return found


def _wanted(sums: Path) -> dict[str, str]:
    """Checksums by file name; only names inside of the package."""
    wanted: dict[str, str] = {}
    for number, line in enumerate(sums.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        parts = _LINE.fullmatch(line)
        path = PurePosixPath(parts[2]) if parts else PurePosixPath("..")
        if parts is None or path.is_absolute() or ".." in path.parts:
            raise PackageError(f"{sums}:{number}: expected a sha256, two blanks and a name inside of the package")
        wanted[path.as_posix()] = parts[1]
    return wanted


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
