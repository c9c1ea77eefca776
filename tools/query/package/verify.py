"""Check of a package (`coserve export --verify`): its files, its signature, its rows beside those of the database."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath

from sqlalchemy import Connection, select, tuple_

from daemon.registry.signing import SIGNATURE, read_public_key, signature_problem
from daemon.storage.database.schema import metadata
from experts.weights import file_sha256
from tools.query.package.write import MANIFEST, SUMS, json_lines
from tools.terminal.console import CommandError

_MAX_PROBLEMS = 100
_LINE = re.compile(r"([0-9a-f]{64})  ([^\x00\\]+)")
_ROWS_PER_QUERY = 500
#: By table: a row may still change while this column has this value.
_UNFINISHED = {
    "boards": ("verdict", None),
    "inspections": ("status", "accepted"),
    "generations": ("status", "accepted"),
    "runs": ("ended_at", None),
}
#: Columns that change later: pictures are pruned, late images add attributes.
_CHANGING = {("inspections", "image_path"), ("boards", "attributes")}


@dataclass(slots=True)
class PackageCheck:
    """Names of files by problem; `made` and `boards` are the manifest's.

    `files` counts all files of a whole package, SHA256SUMS included. `links` are symbolic links among the others.
    `problems` are sentences. `signed_by` is the key that the manifest names, of the user `signer`; `is_signature_valid`
    is None without a key.
    """

    files: int
    fingerprint: str
    changed: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])
    added: list[str] = field(default_factory=list[str])
    links: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])
    signed_by: str | None = None
    signer: str | None = None
    is_signature_valid: bool | None = None
    made: str | None = None
    boards: int | None = None

    @property
    def is_whole(self) -> bool:
        return not (self.changed or self.missing or self.added or self.problems)


def verify_package(
    package: Path, key: Path | None = None, connect: Callable[[], AbstractContextManager[Connection]] | None = None
) -> PackageCheck:
    """Compare files, rows (with a database) and, with a public `key`, the signature. Raises CommandError."""
    public = None if key is None else read_public_key(key)
    sums = package / SUMS
    if sums.is_symlink():
        raise CommandError(f"{sums} is a link: `coserve export` writes none, so it was replaced")
    if not sums.is_file():
        raise CommandError(f"{package} has no {SUMS}: it is not a package of `coserve export`, or it was cut short")
    checksums = _checksums(sums)
    if MANIFEST not in checksums:
        raise CommandError(f"{sums} does not name {MANIFEST}: it is not a package of `coserve export`")
    check = PackageCheck(len(checksums) + 1, file_sha256(sums))
    present = {
        path.relative_to(package).as_posix(): path
        for path in package.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    check.links = sorted(_readable(name) for name, path in present.items() if path.is_symlink())
    _compare_files(check, checksums, present)
    present.pop(SUMS, None)
    signature = present.pop(SIGNATURE, None)
    check.files += signature is not None
    check.added = sorted(map(_readable, present))
    if MANIFEST not in (*check.changed, *check.missing):
        check.made, counts, check.signed_by, check.signer = _read_manifest(package / MANIFEST)
        check.boards = counts["boards"]
        if check.is_whole and connect is not None:
            check.problems += _row_problems(package / "rows", counts, connect)
    if public is not None:
        problem = signature_problem(sums, public, check.signed_by)
        check.is_signature_valid = problem is None
        check.problems += [problem] if problem else []
    elif signature is None and check.signed_by is not None:
        check.problems.append(f"its {SIGNATURE} is missing: it was signed with the key {check.signed_by}")
    return check


def _compare_files(check: PackageCheck, checksums: dict[str, str], present: dict[str, Path]) -> None:
    for name, sha256 in checksums.items():
        path = present.pop(name, None)
        if path is None:
            check.missing.append(name)
        elif path.is_symlink() or not path.is_file() or file_sha256(path) != sha256:
            check.changed.append(name)


def _row_problems(
    rows: Path, counts: dict[str, int], connect: Callable[[], AbstractContextManager[Connection]]
) -> list[str]:
    """Return the differences of rows; an unreadable file counts as one."""
    try:
        with connect() as connection:
            return list(islice(_database_problems(connection, rows, counts), _MAX_PROBLEMS))
    except (ValueError, KeyError, TypeError, OSError) as error:
        return [f"rows cannot be compared: {error}"]


def _read_manifest(manifest: Path) -> tuple[str, dict[str, int], str | None, str | None]:
    """Return when the package was made, its rows by table, its signing key, and its signer. CommandError."""
    try:
        fields = json.loads(manifest.read_text(encoding="utf-8"))
        counts = {str(name): int(count) for name, count in fields["rows"].items()}
        signed_by = fields.get("signed_by") or {}
        counts["boards"]  # a package has some
        return str(fields["made"]), counts, signed_by.get("key"), signed_by.get("user")
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CommandError(f"{manifest} does not say when it was made and how many boards it has") from None


def _readable(name: str) -> str:
    """Return a file name for a terminal and for JSON: bytes that are not UTF-8 in hexadecimal."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _checksums(sums: Path) -> dict[str, str]:
    """Return the checksums by file name. Raises CommandError for names outside the package."""
    checksums: dict[str, str] = {}
    for number, line in enumerate(sums.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        parts = _LINE.fullmatch(line)
        path = PurePosixPath(parts[2]) if parts else PurePosixPath("..")
        if parts is None or path.is_absolute() or ".." in path.parts:
            raise CommandError(f"{sums}:{number}: expected a sha256, two blanks and a name inside the package")
        name = path.as_posix()
        if name in checksums or name == SUMS:
            raise CommandError(f"{sums}:{number}: {name} has no place here: each file has one line, and {SUMS} none")
        checksums[name] = parts[1]
    return checksums


def _database_problems(connection: Connection, rows: Path, counts: Mapping[str, int]) -> Iterator[str]:
    """Yield the package's finished rows that were changed or deleted in the database since, by table and key."""
    for name in counts.keys() & metadata.tables.keys():
        table = metadata.tables[name]
        keys = [column.name for column in table.primary_key.columns]
        lines = json_lines(rows / f"{name}.jsonl")
        while part := list(islice(lines, _ROWS_PER_QUERY)):
            is_one = tuple_(*table.primary_key.columns).in_([tuple(row[key] for key in keys) for row in part])
            found = connection.execute(select(table).where(is_one)).mappings()
            today = {tuple(row[key] for key in keys): row for row in found}
            for row in part:
                key = tuple(row[key] for key in keys)
                what = f"{name} {' '.join(map(str, key))}"
                if key not in today:
                    yield f"{what}: not in the database any more (pruned, or deleted)"
                    continue
                column, value = _UNFINISHED.get(name, (keys[0], None))
                if row[column] == value:
                    continue
                for column, value in row.items():
                    if (name, column) not in _CHANGING and column in today[key] and today[key][column] != value:
                        yield f"{what}: {column} is {today[key][column]} in the database, {value} in the package"
