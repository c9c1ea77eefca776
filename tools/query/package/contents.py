"""Contents of a package: rows, pictures and experts of the chosen boards, and the reasons for what is missing."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Select

from daemon.config.settings import Config
from daemon.storage.database.reviews import VersionKey
from daemon.storage.image_archive import is_as_sent
from experts.catalog import backbone_file, dump, entry_with
from experts.spec import digest_of
from experts.versions import weights_of
from experts.weights import file_sha256
from tools.experts.look import CatalogVersions
from tools.query.formats import CsvWriter, JsonLinesWriter
from tools.query.reading import BATCH_ROWS, BoardSelection, read_position

_PICTURE_LIST = "pictures.csv"
_PICTURE_COLUMNS = ("inspection_id", "serial", "designator", "verdict", "file", "why_not")
_MAX_NAME_LENGTH = 60


@dataclass(slots=True)
class PackageRows:
    """Numbers of rows by table, and notes taken while they were written.

    `rules` are the texts of rules versions, None if the database has none any more. `answered` names what gave answers,
    `experts` has the sha256 of expert versions, `settings` the texts of settings by their digest. `tasks` are the
    daemon's open ones by image: `judge` or `keep`.
    """

    last_seq: int
    epoch: str | None
    rows: dict[str, int] = field(default_factory=dict[str, int])
    rules: dict[str, str | None] = field(default_factory=dict[str, str | None])
    answered: set[VersionKey] = field(default_factory=set[VersionKey])
    experts: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    settings: dict[tuple[str, str | None], str] = field(default_factory=dict[tuple[str, str | None], str])
    tasks: dict[int, str] = field(default_factory=dict[int, str])
    picture_bytes: int = 0


def write_rows(connection: Connection, selection: BoardSelection, folder: Path) -> PackageRows:
    """Write all rows of the chosen boards, one state of the database, into `folder`; nothing without boards."""
    written = PackageRows(*read_position(connection))
    queries = selection.queries()
    tasks = queries.pop("pending")
    if connection.execute(queries["boards"].limit(1)).first() is None:
        return written
    for name, query in queries.items():
        for row in _write_table(connection, written, folder, name, query):
            match name:
                case "boards":
                    written.rules.setdefault(row["rules_version"])
                case "inspections":
                    written.rules.setdefault(row["rules_version"])
                    written.picture_bytes += row["image_bytes"] if row["image_path"] else 0
                case "stages":
                    written.answered.add((row["expert"], row["expert_version"], row["expert_settings"]))
                case "rules_versions":
                    written.rules[row["rules_version"]] = row["text"]
                case "expert_versions":
                    written.experts[row["expert"], row["expert_version"]] = row["sha256"]
                case "expert_settings" if digest_of(row["settings"]) == row["expert_settings"]:
                    written.settings[row["expert"], row["expert_settings"]] = row["settings"]
                case _:
                    pass
    written.tasks = {row.inspection_id: row.task for row in connection.execute(tasks)}
    return written


def _write_table(
    connection: Connection, written: PackageRows, folder: Path, name: str, query: "Select[Any]"
) -> Iterator[dict[str, Any]]:
    names = [column.name for column in query.selected_columns]
    written.rows[name] = 0
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        writer = JsonLinesWriter(file, names)
        for batch in connection.execution_options(yield_per=BATCH_ROWS).execute(query).partitions():
            writer.add(batch)
            written.rows[name] += len(batch)
            yield from (dict(zip(names, row, strict=True)) for row in batch)


@dataclass(slots=True)
class PackagePictures:
    """The number of pictures, and of images without one by reason; `damaged` ones are not as they were sent."""

    copied: int = 0
    bytes: int = 0
    missing: dict[str, int] = field(default_factory=dict[str, int])
    damaged: list[int] = field(default_factory=list[int])


def copy_pictures(settings: Config, written: PackageRows, rows: Path, package: Path) -> PackagePictures:
    """Copy stored pictures into `package/pictures` and list every image in `pictures.csv`; no transaction."""
    pictures = PackagePictures()
    serials = {row["board_id"]: row["serial"] for row in json_lines(rows / "boards.jsonl")}
    with (package / _PICTURE_LIST).open("w", encoding="utf-8", newline="") as file:
        listing = CsvWriter(file, _PICTURE_COLUMNS)
        for row in json_lines(rows / "inspections.jsonl"):
            serial = serials[row["board_id"]]
            target = _picture_name(row, serial)
            why_not = _copy_picture(settings, written, row, package / target, pictures)
            if why_not is not None:
                pictures.missing[why_not] = pictures.missing.get(why_not, 0) + 1
            place = (row["inspection_id"], serial, row["designator"], row["verdict"])
            listing.add([(*place, "" if why_not else target, why_not)])
    return pictures


def _copy_picture(
    settings: Config, written: PackageRows, row: dict[str, Any], target: Path, pictures: PackagePictures
) -> str | None:
    if row["image_path"] is None:
        return _why_not_stored(settings, written, row)
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


def _why_not_stored(settings: Config, written: PackageRows, row: dict[str, Any]) -> str:
    task = written.tasks.get(row["inspection_id"])
    if task is not None:
        return "not judged yet" if task == "judge" else "its copy was not made yet: export again"
    if row["verdict"] not in settings.retention.keep:
        return f"verdict {row['verdict']}: not kept (retention.keep)"
    return "pruned by retention (images_for, images_bytes, free), or lost"


def _picture_name(row: dict[str, Any], serial: str) -> str:
    """Return a path legal on every system for any serial and designator, unique by its numbers."""
    suffix = Path(row["image_path"]).suffix if row["image_path"] else ""
    return f"pictures/{row['board_id']}-{_safe(serial)}/{row['inspection_id']}-{_safe(row['designator'])}{suffix}"


def _safe(text: str) -> str:
    return quote(text, safe="").replace("~", "%7E").replace("%", "_")[:_MAX_NAME_LENGTH]


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


@dataclass(slots=True)
class PackageExperts:
    """Versions that answered, each with its checksum, its standing today, and its weights file."""

    listed: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    warnings: list[str] = field(default_factory=list[str])


def copy_experts(catalog: Path, written: PackageRows, folder: Path, *, with_weights: bool) -> PackageExperts:
    """Write `catalog.yaml` with the versions' entries as they answered, and copy their weights."""
    folder.mkdir()
    today, experts = CatalogVersions.of(catalog), PackageExperts()
    entries: dict[str, Any] = {}
    if today.problem:
        experts.warnings.append(f"the catalog cannot be read, so there are no entries of experts: {today.problem}")
    for expert, version, digest in sorted(written.answered, key=lambda key: (*key[:2], key[2] or "")):
        settings, sha256 = written.settings.get((expert, digest)), written.experts.get((expert, version))
        row: dict[str, Any] = {
            "expert": expert,
            "expert_version": version,
            "expert_settings": digest,
            "sha256": sha256,
            "today": today.standing(expert, version, settings),
            "weights": None,
        }
        experts.listed.append(row)
        name = f"{quote(expert, safe='').replace('%', '_')}-{version}.safetensors"
        known = today.experts[expert].entries if expert in today.experts else {}
        kept = next((entry for name, entry in known.items() if weights_of(name) == version), None)
        if kept is None and not today.problem:
            experts.warnings.append(f"expert {expert} {version}: its weights are deleted")
        if kept is not None and with_weights:
            row["weights"] = _copy_weights(catalog.parent / kept.file, folder / name, kept.sha256, experts)
            if (backbone := kept.backbone) is not None:
                place = folder / backbone_file(backbone.sha256)
                _copy_weights(catalog.parent / backbone.file, place, backbone.sha256, experts)
        entry = None if settings is None or sha256 is None else entry_with(settings, name, sha256)
        if entry is None and kept is not None:
            entry = kept.model_copy(update={"file": name, "backbone": kept.backbone and kept.backbone.for_package()})
            experts.warnings.append(f"expert {expert} {version}: its settings are not known; its entry is today's")
        if entry is None:
            continue
        label = f"{expert} {version}+{digest}" if digest is not None else f"{expert} {version}"
        entries[label] = entry.model_dump(mode="json", exclude_unset=True)
    if entries:
        (folder / "catalog.yaml").write_text(dump({"experts": entries}), encoding="utf-8")
    return experts


def _copy_weights(source: Path, target: Path, sha256: str, experts: PackageExperts) -> str | None:
    """Copy weights and compare them with the catalog's checksum; return the file's name, None if there is none."""
    if target.exists():
        return f"experts/{target.name}"
    if not source.is_file():
        experts.warnings.append(f"{source}: this weights file does not exist")
        return None
    shutil.copyfile(source, target)
    if file_sha256(target) != sha256:
        experts.warnings.append(f"{source}: these are not the weights that the catalog names (sha256)")
    return f"experts/{target.name}"
