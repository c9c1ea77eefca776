"""Check of a package (`coserve export --verify`): its files, its signature, its rows beside those of the database."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from heapq import merge
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import Any

from sqlalchemy import Connection, func, select

from daemon.registry.signing import SIGNATURE, read_public_key, signature_problem
from daemon.storage.database.schema import boards, metadata
from experts.weights import file_sha256
from tools.query.package.write import MANIFEST, SUMS, json_lines
from tools.query.reading import BATCH_ROWS, BoardSelection, Row, read_position
from tools.terminal.console import CommandError

_MAX_PROBLEMS = 100
_LINE = re.compile(r"([0-9a-f]{64})  ([^\x00\\]+)")
#: By table: a row may still change while this column has this value.
_UNFINISHED = {
    "boards": ("verdict", None),
    "inspections": ("status", "accepted"),
    "generations": ("status", "accepted"),
    "runs": ("ended_at", None),
}
#: Columns that change later: pictures are pruned, editions end.
_CHANGING = {("inspections", "image_path"), ("editions", "ended_at")}
#: Tables whose rows belong to other boards too.
_TEXTS = frozenset({"rules_versions", "expert_versions", "expert_settings", "recipes", "editions"})
#: Tables whose rows are written with another row, which this column names.
_PARTS = {"stages": "inspection_id", "detections": "inspection_id", "drawn_boxes": "review_id"}
#: Columns that say when a row was written; rows of other tables may come after their time, or belong elsewhere too.
_TIMES = {
    "boards": "completed_at",
    "reviews": "at",
    "inspections": "accepted_at",
    "generations": "accepted_at",
    "runs": "started_at",
}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


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
        manifest = _read_manifest(package / MANIFEST)
        signed_by = manifest.get("signed_by") or {}
        check.made, check.boards = str(manifest["made"]), int(manifest["rows"]["boards"])
        check.signed_by, check.signer = signed_by.get("key"), signed_by.get("user")
        if check.is_whole and connect is not None:
            check.problems += _row_problems(package / "rows", manifest, connect)
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
    rows: Path, manifest: Mapping[str, Any], connect: Callable[[], AbstractContextManager[Connection]]
) -> list[str]:
    """Return the differences of rows; an unreadable file counts as one."""
    try:
        with connect() as connection:
            return list(islice(_database_problems(connection, rows, manifest), _MAX_PROBLEMS))
    except (ValueError, KeyError, TypeError, OSError) as error:
        return [f"rows cannot be compared: {error}"]


def _read_manifest(manifest: Path) -> dict[str, Any]:
    """Return what is checked later too: time, boards, position in the line's results. Raises CommandError."""
    try:
        fields = json.loads(manifest.read_text(encoding="utf-8"))
        _ = fields["made"], int(fields["rows"]["boards"]), fields["last_seq"], fields["line"]["epoch"]
        _ = (fields.get("signed_by") or {}).get("key")
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CommandError(f"{manifest} does not say when it was made and how many boards it has") from None
    return fields


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


def _database_problems(connection: Connection, rows: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield differences between package and database, by table and key: each row of one is looked for in the other."""
    ids = json.dumps([row["board_id"] for row in json_lines(rows / "boards.jsonl")])
    chosen = boards.c.board_id.in_(select(func.json_each(ids).table_valued("value").c.value))
    chosen |= BoardSelection(**manifest["selection"]).condition()
    complete = {
        "inspection_id": {row["inspection_id"] for row in json_lines(rows / "inspections.jsonl") if row["seq"]},
        "review_id": {row["review_id"] for row in json_lines(rows / "reviews.jsonl")},
    }
    same_epoch = read_position(connection)[1] == manifest["line"]["epoch"]
    last_seq = manifest["last_seq"] if same_epoch else None
    for name, query in BoardSelection().queries(chosen).items():
        if name not in manifest["rows"] or name not in metadata.tables:
            continue
        table = metadata.tables[name]
        of_table = select(table).order_by(*table.primary_key.columns) if name in _TEXTS else query
        today = connection.execution_options(yield_per=BATCH_ROWS).execute(of_table).mappings()
        keys = [column.name for column in table.primary_key.columns]
        for key, before, now in _side_by_side(json_lines(rows / f"{name}.jsonl"), map(dict, today), keys):
            what = f"{name} {' '.join(map(str, key))}"
            if now is None:
                yield f"{what}: not in the database any more (pruned, or deleted)"
            elif before is not None:
                yield from (f"{what}: {difference}" for difference in _changes(name, before, now))
            elif name in _PARTS:
                if now[_PARTS[name]] in complete[_PARTS[name]]:
                    yield f"{what}: added to the database since, to a row that was complete"
            elif name in _TIMES and (why := _too_old(now, now[_TIMES[name]], str(manifest["made"]), last_seq)):
                yield f"{what}: added to the database since, {why}"


def _side_by_side(
    package: Iterator[Row], database: Iterator[Row], keys: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], Row | None, Row | None]]:
    """Yield key, row of the package and row of the database, None where it has none; both come in order of key."""

    def keyed(rows: Iterator[Row], side: int) -> Iterator[tuple[tuple[Any, ...], int, Row]]:
        return ((tuple(row[key] for key in keys), side, row) for row in rows)

    both = merge(keyed(package, 0), keyed(database, 1), key=lambda row: row[:2])
    for key, rows in groupby(both, key=lambda row: row[0]):
        sides = {side: row for _, side, row in rows}
        yield key, sides.get(0), sides.get(1)


def _changes(name: str, before: Row, now: Row) -> Iterator[str]:
    unfinished = _UNFINISHED.get(name)
    if unfinished is not None and before[unfinished[0]] == unfinished[1]:
        return
    for column, value in before.items():
        if (name, column) not in _CHANGING and column in now and now[column] != value:
            yield f"{column} is {now[column]} in the database, {value} in the package"


def _too_old(row: Row, at: str | None, made: str, last_seq: int | None) -> str | None:
    """Return why a row cannot be later than the package, None if it may be."""
    verdict = row.get("verdict")
    if at is None and verdict is None:
        return None  # an open board
    if at is None or not _TIME.fullmatch(at) or at < made:
        return f"with the time {at}, before the package was made (or the clock was set back)"
    if verdict is not None and row["seq"] is None:
        return "without a seq, which each verdict gets"
    if last_seq is not None and (seq := row.get("seq")) is not None and seq <= last_seq:
        return f"with the seq {seq}, given out before the package was made"
    return None
