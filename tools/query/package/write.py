"""`coserve export`: an audit package of chosen boards, complete under its name or absent.

First the rows, in one read transaction; then the pictures, while the writer can checkpoint its log; last the manifest
and the checksums of every file.
"""

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, func

from daemon.config.settings import Config
from daemon.registry.signing import SIGNATURE, key_id, read_signing_key, sign
from daemon.storage.database.schema import boards, inspections
from daemon.storage.image_archive import is_as_sent
from experts.catalog import backbone_file, dump, entry_with
from experts.durable import sync
from experts.editions.history import weights_of
from experts.people import current_user
from experts.spec import digest_of
from experts.weights import file_sha256
from tools.experts.look import CatalogVersions
from tools.query.evidence import check_evidence
from tools.query.formats import write_csv, write_json_lines
from tools.query.reading import BATCH_ROWS, BoardSelection, read_position
from tools.terminal.console import CommandError
from tools.terminal.new_files import MARK, need_room, unfinished_folder

SUMS = "SHA256SUMS"
MANIFEST = "manifest.json"
_FORMAT = 1
_PICTURE_COLUMNS = ("inspection_id", "serial", "designator", "verdict", "file", "why_not")
_MAX_NAME_LENGTH = 60
#: A generous estimate for the rows of an image.
_ROW_BYTES = 4000


@dataclass(frozen=True, slots=True)
class PackageReport:
    """`fingerprint` is the sha256 of the package's SHA256SUMS."""

    boards: int
    images: int
    pictures: int
    files: int
    bytes: int
    missing: dict[str, int]
    warnings: list[str]
    fingerprint: str


def write_package(
    config: Path,
    settings: Config,
    engine: Engine,
    selection: BoardSelection,
    out: Path,
    *,
    with_weights: bool,
    sign_with: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> PackageReport:
    """Write the package `out`. After CommandError or OSError nothing is left of it."""
    key = None if sign_with is None else read_signing_key(sign_with)
    made = datetime.now(UTC).isoformat(timespec="seconds")  # before the rows: what is not among them is later
    with unfinished_folder(out) as part:
        progress("rows")
        with engine.connect() as connection:
            written = write_rows(connection, selection, part / "rows")
            if not written.counts["boards"]:
                raise CommandError("no board matches: `coserve results --boards` lists those that closed last")
            evidence = check_evidence(
                lambda: nullcontext(connection), settings.images, selection.condition(), with_tables=False
            )
        need_room(settings, out, written.picture_bytes + _ROW_BYTES, "the package")
        progress("pictures")
        pictures = copy_pictures(settings, written, part)
        progress("experts")
        experts, warnings = copy_experts(settings.catalog, written, part / "experts", with_weights=with_weights)
        deleted = sorted(name for name, text in written.rules.items() if text is None)
        warnings = [
            *(f"rules {name}: the database no longer has their text" for name in deleted),
            *warnings,
            *(f"inspection {number}: its picture is not what the camera sent (sha256)" for number in pictures.damaged),
            *evidence.problems,
            *evidence.gaps,
        ]
        (part / "rules").mkdir()
        for name, text in written.rules.items():
            if text is not None:
                (part / "rules" / f"{name}.yaml").write_text(text, encoding="utf-8", newline="")
        manifest = {
            "coserve_export": _FORMAT,
            "coserve": version("coserve"),
            "made": made,
            "line": {
                "name": settings.line,
                "epoch": written.epoch,
                "host": socket.gethostname(),
                "config": str(config.resolve()),
                "database": settings.database,
            },
            "selection": asdict(selection),
            "last_seq": written.last_seq,
            "rows": written.counts,
            "pictures": asdict(pictures),
            "rules": sorted(written.rules),
            "experts": experts,
            "judged_once_more": evidence.counts,
            "signed_by": {"key": key_id(key.public_key()), "user": current_user()} if key else None,
            "warnings": warnings,
        }
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        shutil.copyfile(Path(__file__).with_name("README.txt"), part / "README.txt")
        progress("checksums")
        files, size_bytes = _write_sums(part)
        if key is not None:
            sign(part / SUMS, key)
            sync(part / SIGNATURE)
            files += 1
        fingerprint = file_sha256(part / SUMS)
    return PackageReport(
        boards=written.counts["boards"],
        images=written.counts["inspections"],
        pictures=pictures.copied,
        files=files,
        bytes=size_bytes,
        missing=pictures.missing,
        warnings=warnings,
        fingerprint=fingerprint,
    )


def _write_sums(package: Path) -> tuple[int, int]:
    """Write checksums of all other files as `sha256sum` does; return the number of files, and their bytes."""
    files = sorted(path for path in package.rglob("*") if path.is_file() and path.name != MARK)
    size_bytes = 0
    with (package / SUMS).open("w", encoding="utf-8") as sums:
        for path in files:
            sums.write(f"{file_sha256(path)}  {path.relative_to(package).as_posix()}\n")
            size_bytes += path.stat().st_size
            sync(path)
    for path in (package / SUMS, *filter(Path.is_dir, package.rglob("*"))):
        sync(path)
    return len(files) + 1, size_bytes


@dataclass(slots=True)
class PackageRows:
    """The rows in `folder`: `counts` by table, and what no row of the package says.

    `rules` are the texts of rules versions, None if the database has none any more. `tasks` are the daemon's open ones
    by image: `judge` or `keep`.
    """

    folder: Path
    last_seq: int
    epoch: str | None
    counts: dict[str, int] = field(default_factory=dict[str, int])
    rules: dict[str, str | None] = field(default_factory=dict[str, str | None])
    tasks: dict[int, str] = field(default_factory=dict[int, str])
    picture_bytes: int = 0

    def read(self, table: str) -> Iterator[dict[str, Any]]:
        return json_lines(self.folder / f"{table}.jsonl")


def write_rows(connection: Connection, selection: BoardSelection, folder: Path) -> PackageRows:
    """Write all rows of the chosen boards, one state of the database, into `folder`."""
    folder.mkdir()
    written, queries = PackageRows(folder, *read_position(connection)), selection.queries()
    written.tasks = {row.inspection_id: row.task for row in connection.execute(queries.pop("pending"))}
    for name, query in queries.items():
        names = [column.name for column in query.selected_columns]
        rows = connection.execution_options(yield_per=BATCH_ROWS).execute(query)
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            written.counts[name] = write_json_lines(file, names, rows)
    image = inspections.c
    size = queries["inspections"].with_only_columns(func.sum(image.image_bytes)).order_by(None)
    written.picture_bytes = connection.execute(size.where(image.image_path.is_not(None))).scalar() or 0
    for table in (boards, inspections):
        named = queries[table.name].with_only_columns(table.c.rules_version).distinct().order_by(None)
        written.rules |= dict.fromkeys(connection.execute(named).scalars())
    written.rules |= {row["rules_version"]: row["text"] for row in written.read("rules_versions")}
    return written


@dataclass(slots=True)
class PackagePictures:
    """The number of pictures, and of images without one by reason; `damaged` ones are not as they were sent."""

    copied: int = 0
    bytes: int = 0
    missing: dict[str, int] = field(default_factory=dict[str, int])
    damaged: list[int] = field(default_factory=list[int])


def copy_pictures(settings: Config, written: PackageRows, package: Path) -> PackagePictures:
    """Copy stored pictures into `package/pictures` and list every image in `pictures.csv`; no transaction."""
    pictures = PackagePictures()
    serials = {row["board_id"]: row["serial"] for row in written.read("boards")}

    def listed() -> Iterator[tuple[Any, ...]]:
        for row in written.read("inspections"):
            serial = serials[row["board_id"]]
            target = _picture_name(row, serial)
            why_not = _copy_picture(settings, written, row, package / target, pictures)
            if why_not is not None:
                pictures.missing[why_not] = pictures.missing.get(why_not, 0) + 1
            place = (row["inspection_id"], serial, row["designator"], row["verdict"])
            yield *place, "" if why_not else target, why_not

    with (package / "pictures.csv").open("w", encoding="utf-8", newline="") as file:
        write_csv(file, _PICTURE_COLUMNS, listed())
    return pictures


def _copy_picture(
    settings: Config, written: PackageRows, row: dict[str, Any], target: Path, pictures: PackagePictures
) -> str | None:
    if row["image_path"] is None:
        task = written.tasks.get(row["inspection_id"])
        if task is not None:
            return "not judged yet" if task == "judge" else "its copy was not made yet: export again"
        if row["verdict"] not in settings.retention.keep:
            return f"verdict {row['verdict']}: not kept (retention.keep)"
        return "pruned by retention (images_for, images_bytes, free), or lost"
    try:
        data = (settings.images.parent / row["image_path"]).read_bytes()
    except FileNotFoundError:
        return "deleted since its row was read, or by hand"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    pictures.copied += 1
    pictures.bytes += len(data)
    if not is_as_sent(data, target.suffix, row["image_sha256"]):
        pictures.damaged.append(row["inspection_id"])
    return None


def _picture_name(row: dict[str, Any], serial: str) -> str:
    """Return a path legal on every system for any serial and designator, unique by its numbers."""
    suffix = Path(row["image_path"]).suffix if row["image_path"] else ""
    return f"pictures/{row['board_id']}-{_safe(serial)}/{row['inspection_id']}-{_safe(row['designator'])}{suffix}"


def _safe(text: str) -> str:
    return quote(text, safe="").replace("~", "%7E").replace("%", "_")[:_MAX_NAME_LENGTH]


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def copy_experts(
    catalog: Path, written: PackageRows, folder: Path, *, with_weights: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Write `catalog.yaml` with the entries of the versions that answered, as they were then, and copy their weights.

    Return each version with its checksum, its standing today and its weights file; and warnings.
    """
    folder.mkdir()
    today, listed, warnings = CatalogVersions.from_catalog(catalog), list[dict[str, Any]](), list[str]()
    sums = {(row["expert"], row["expert_version"]): row["sha256"] for row in written.read("expert_versions")}
    texts = {
        (row["expert"], row["expert_settings"]): row["settings"]
        for row in written.read("expert_settings")
        if digest_of(row["settings"]) == row["expert_settings"]
    }
    names = ("expert", "expert_version", "expert_settings")
    entries: dict[str, Any] = {}
    if today.problem:
        warnings.append(f"the catalog cannot be read, so there are no entries of experts: {today.problem}")
    answered = {tuple(row[name] for name in names) for row in written.read("stages")}
    for expert, weights, digest in sorted(answered, key=lambda key: (*key[:2], key[2] or "")):
        settings, sha256 = texts.get((expert, digest)), sums.get((expert, weights))
        standing = today.standing(expert, weights, settings)
        row = dict(zip(names, (expert, weights, digest), strict=True)) | {"sha256": sha256, "today": standing}
        listed.append(row | {"weights": None})
        name = f"{quote(expert, safe='').replace('%', '_')}-{weights}.safetensors"
        known = today.experts[expert].entries if expert in today.experts else {}
        kept = next((entry for name, entry in known.items() if weights_of(name) == weights), None)
        if kept is None and not today.problem:
            warnings.append(f"expert {expert} {weights}: its weights are deleted")
        if kept is not None and with_weights:
            listed[-1]["weights"] = _copy_weights(catalog.parent / kept.file, folder / name, kept.sha256, warnings)
            if (backbone := kept.backbone) is not None:
                place = folder / backbone_file(backbone.sha256)
                _copy_weights(catalog.parent / backbone.file, place, backbone.sha256, warnings)
        entry = None if settings is None or sha256 is None else entry_with(settings, name, sha256)
        if entry is None and kept is not None:
            entry = kept.model_copy(update={"file": name, "backbone": kept.backbone and kept.backbone.for_package()})
            warnings.append(f"expert {expert} {weights}: its settings are not known; its entry is today's")
        if entry is not None:
            label = f"{expert} {weights}+{digest}" if digest is not None else f"{expert} {weights}"
            entries[label] = entry.model_dump(mode="json", exclude_unset=True)
    if entries:
        (folder / "catalog.yaml").write_text(dump({"experts": entries}), encoding="utf-8")
    return listed, warnings


def _copy_weights(source: Path, target: Path, sha256: str, warnings: list[str]) -> str | None:
    """Copy weights and compare them with the catalog's checksum; return the file's name, None if there is none."""
    if target.exists():
        return f"experts/{target.name}"
    if not source.is_file():
        warnings.append(f"{source}: this weights file does not exist")
        return None
    shutil.copyfile(source, target)
    if file_sha256(target) != sha256:
        warnings.append(f"{source}: these are not the weights that the catalog names (sha256)")
    return f"experts/{target.name}"
